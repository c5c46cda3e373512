"""Open a checkpoint: find it, refuse what cannot or must not be loaded, hand out its three sides.

    directory (config.json, *.safetensors) ─┐
    file.gguf ──────────────────────────────┼─> Checkpoint: config, text, weights by parameter name
    hub id org/name ── snapshot_download ───┘

Everything that can be refused is refused before a weight is read or downloaded. Pickles are never
opened. Does not build models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from spec_export.engines.errors import CheckpointError, UnsupportedModel
from spec_export.engines.extras import require
from spec_export.export.json_files import read_json_object
from spec_export.export.text_files import TextFiles, text_from_directory
from spec_export.export.weight_source import Shape, WeightSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Checkpoint", "TextFiles", "WeightSource", "open_checkpoint"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_NEEDS = ("torch", "transformers", "optimum", "gguf", "huggingface_hub", "ml_dtypes")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, no weight of it read.

    Attributes:
        source: what the user typed.
        config: transformers configuration, of this checkpoint alone.
        text: tokenizer, chat template, end tokens.
    """

    source: str
    config: PretrainedConfig
    text: TextFiles
    _resolve: Callable[[Mapping[str, Shape]], WeightSource] = field(repr=False)

    def weights_for(self, parameter_shapes: Mapping[str, Shape]) -> WeightSource:
        """Match the stored tensors to the parameters of a model.

        Args:
            parameter_shapes: parameter name of the transformers model to its shape; parameters
                that are tied once, under either name.

        Raises:
            CheckpointError: a parameter is missing or has another shape; no weight was read yet.
            UnsupportedModel: a tensor is quantized in a way that is not read.
        """
        return self._resolve(parameter_shapes)


def open_checkpoint(
    source: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> Checkpoint:
    """Open a checkpoint of a decoder-only language model.

    Args:
        source: a directory in Hugging Face layout, a `.gguf` file, or a hub id `org/name`. What
            looks like a path (starts with `.`, `/` or `~`, has two separators or a weight file's
            ending) is never looked up on the hub.
        trust_remote_code: run the model code a checkpoint brings with it.
        revision: of a hub id.

    Raises:
        MissingExtra: the extra `[export]` is not installed.
        CheckpointError: there is none, it is truncated, holds only pickles, or needs its own code.
        UnsupportedModel: its architecture or its quantization is not supported.
    """
    require("export", *_NEEDS)
    path = Path(source).expanduser()
    if path.suffix in _PICKLES and (path.exists() or _looks_like_path(source)):
        raise _pickle_error(source)
    if path.is_dir():
        return _open_directory(source, path, trust_remote_code)
    if path.is_file():
        return _open_file(source, path)
    if path.exists():
        raise CheckpointError(f"{source} is neither a file nor a directory")
    if _looks_like_path(source) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} does not exist; is the path right?")
    return _open_directory(
        source, _download(source, revision, trust_remote_code), trust_remote_code
    )


def _looks_like_path(source: str) -> bool:
    endings = (".gguf", ".safetensors", *_PICKLES)
    return (
        source.startswith((".", os.sep, "~"))
        or source.count(os.sep) > 1
        or source.endswith(endings)
    )


# --- GGUF --------------------------------------------------------------------------------------


def _open_file(source: str, path: Path) -> Checkpoint:
    if path.suffix != ".gguf":
        raise CheckpointError(
            f"{source} is a file that is not .gguf; name the directory of the checkpoint"
        )
    from spec_export.export.gguf_config import config_from_gguf
    from spec_export.export.gguf_file import read_gguf
    from spec_export.export.gguf_source import resolve_gguf
    from spec_export.export.gguf_text import text_from_gguf

    file = read_gguf(path)
    config = config_from_gguf(file)
    text = text_from_gguf(path, file.metadata)
    # The vocabulary is in `text` now, and has hundreds of thousands of strings.
    small = {key: value for key, value in file.metadata.items() if not isinstance(value, list)}
    kept = replace(file, metadata=small)
    return Checkpoint(source, config, text, lambda shapes: resolve_gguf(kept, config, shapes))


# --- Hugging Face layout -----------------------------------------------------------------------


def _open_directory(source: str, directory: Path, trust_remote_code: bool) -> Checkpoint:
    from spec_export.export.safetensors_files import map_safetensors, safetensors_files

    described = _described(source, directory, trust_remote_code)
    _refuse_other_libraries(source, directory)
    files = safetensors_files(directory)
    if not files:
        raise _no_weights(source, directory)
    stored = map_safetensors(files)
    _refuse_more_layers_than(len(stored), source, described)
    config = _config(source, directory, trust_remote_code)
    text = text_from_directory(directory, described, trust_remote_code)

    def resolve(shapes: Mapping[str, Shape]) -> WeightSource:
        from spec_export.export.parameter_names import resolve_parameters

        return resolve_parameters(stored, config, shapes, source, trust_remote_code)

    return Checkpoint(source, config, text, resolve)


def _described(source: str, directory: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Content of `config.json`, refused here if its model can be."""
    if not (directory / "config.json").is_file():
        raise _no_config(source, directory)
    described = read_json_object(directory / "config.json")
    model_type = described.get("model_type")
    if "auto_map" in described and not trust_remote_code:
        raise CheckpointError(
            f"{source} brings its own model code (auto_map in config.json), which is not run "
            "unless you trust it: read the code, then pass --trust-remote-code"
        )
    for key in ("quantization_config", "compression_config"):
        if key in described:
            method = described[key].get("quant_method") if isinstance(described[key], dict) else ""
            raise UnsupportedModel(
                f"{source} is quantized ({method or key}); export the unquantized checkpoint, or "
                "its GGUF file"
            )
    if "auto_map" not in described:
        _refuse_other_models(source, described, model_type)
    return described


def _refuse_other_libraries(source: str, directory: Path) -> None:
    """A sentence embedder or a diffusion pipeline may wrap a model that looks like ours."""
    from optimum.exporters.tasks import TasksManager

    library = TasksManager.infer_library_from_model(str(directory))
    if library != "transformers":
        raise UnsupportedModel(
            f"{source} is made for the library {library}; only causal language models of "
            "transformers are exported"
        )


def _refuse_other_models(source: str, described: dict[str, Any], model_type: Any) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    what = f"{source} is a {model_type!r} model"
    if described.get("is_encoder_decoder") is True:
        raise UnsupportedModel(f"{what} with an encoder; only decoder-only models are exported")
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(f"{what}, which this transformers knows no causal model for")
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and described.get("is_decoder") is not True:
        raise UnsupportedModel(f"{what}: an encoder; only decoder-only models are exported")
    heads = [str(name) for name in described.get("architectures") or () if "For" in str(name)]
    if heads and not any("ForCausalLM" in name for name in heads):
        raise UnsupportedModel(f"{what} made for another task ({heads[0]})")


def _refuse_more_layers_than(tensors: int, source: str, described: dict[str, Any]) -> None:
    """Building a model of 10^9 layers, only to find its weights missing, would take for ever."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        layers = described.get(key)
        if isinstance(layers, int) and layers > tensors:
            raise CheckpointError(
                f"config.json of {source} says {key} is {layers}, and there are {tensors} tensors"
            )


def _config(source: str, directory: Path, trust_remote_code: bool) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise CheckpointError(f"config.json of {source} describes no model: {error}") from error
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise UnsupportedModel(
            f"{source} is a {config.model_type!r} model of several parts; only decoder-only "
            "language models are exported"
        )
    return cast("PretrainedConfig", config)


def _no_config(source: str, directory: Path) -> CheckpointError:
    if (directory / "adapter_config.json").is_file():
        return UnsupportedModel(f"{source} is an adapter; merge it into its base model first")
    files = sorted(path.name for path in directory.glob("*.gguf"))
    hint = f"; to export a GGUF file, name it: {directory / files[0]}" if files else ""
    return CheckpointError(f"{source} has no config.json, so it is no checkpoint{hint}")


def _no_weights(source: str, directory: Path) -> CheckpointError:
    if any(path.suffix in _PICKLES for path in directory.iterdir()):
        return _pickle_error(source)
    return CheckpointError(f"{source} has no *.safetensors file; is the download complete?")


def _pickle_error(source: str) -> CheckpointError:
    return CheckpointError(
        f"{source} holds its weights as a pickle, and loading a pickle can run any code in it. "
        "Convert it where you trust it: load it with transformers and call "
        "model.save_pretrained(DIRECTORY), which writes safetensors"
    )


# --- hub ---------------------------------------------------------------------------------------


def _download(source: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Fetch what describes a model first, so that refusing it costs no gigabytes."""
    wanted = [*_DESCRIPTIONS, *(["*.py"] if trust_remote_code else [])]
    directory = _snapshot(source, revision, wanted)
    if (directory / "config.json").is_file():
        _described(source, directory, trust_remote_code)
    directory = _snapshot(source, revision, [*wanted, "*.safetensors"])
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"{source} on the hub has no *.safetensors (pickles are never downloaded); look for "
            "another repository of the model, or download a GGUF file of it and name that"
        )
    return directory


def _snapshot(source: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            source, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    except Exception as error:  # of several libraries: not found, gated, offline, disk
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{source} is no directory here, and the hub did not give it: {cause}. Check the name "
            "and the network, log in if it is gated, or name a downloaded directory"
        ) from error
    return Path(found)

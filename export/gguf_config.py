"""Rebuild a transformers configuration from the metadata of a GGUF file.

The names come from transformers' own table. It leaves out some of what a file says, and loads a
model that computes something else without a word; here each such statement is either carried over
or refused. Only architectures that were written and read back in a test are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from gguf.constants import GGMLQuantizationType
from transformers import AutoConfig, PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from spec_export.engines.errors import CheckpointError, UnsupportedModel
from spec_export.export.gguf_file import GGUFFile

# GGUF architecture to transformers model type.
ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
ROPE_FREQS = "rope_freqs.weight"
_NEEDED = ("block_count", "context_length", "embedding_length", "attention.head_count")
_FREE_HEAD_DIM = {"gemma2", "gemma3", "llama", "qwen2", "qwen3"}
# Gemma divides the scores by sqrt(hidden / heads) in its 27B sizes only, and no key says so:
# llama.cpp knows them by their layer count, and so must we.
_SCALED_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}
# Every Llama 3.1, 3.2 and 3.3 was released with these; a file holds only the resulting factors.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def architecture_of(file: GGUFFile) -> str:
    """The GGUF architecture of a file.

    Raises:
        UnsupportedModel: it is none of `ARCHITECTURES`, or the file is one part of several.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}. Other models are read from safetensors"
        )
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise UnsupportedModel(
            f"{file.path} is one of {parts} parts; join them with `llama-gguf-split --merge`"
        )
    return cast(str, architecture)


def config_from_gguf(file: GGUFFile) -> PretrainedConfig:
    """Build the configuration a file describes.

    Args:
        file: as from `read_gguf`.

    Raises:
        UnsupportedModel: the architecture, or something the file says about it, is not supported.
        CheckpointError: the metadata is incomplete or describes no model.
    """
    architecture = architecture_of(file)
    keys = _Keys(file, architecture)
    values = keys.mapped() | _tokens_and_ties(file)
    values |= _heads(keys) | _extras(keys)
    _refuse_unknown_rules(keys)
    values |= _rope(keys, values)
    try:
        config = cast(Any, AutoConfig).for_model(ARCHITECTURES[architecture], **values)
        return cast(PretrainedConfig, config)
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: its metadata describes no {architecture} model: {error}"
        ) from error


class _Keys:
    """The metadata keys of one architecture, without its prefix."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        for key in _NEEDED:
            found = self.get(key)
            if type(found) is not int or found < 1:
                raise CheckpointError(
                    f"{file.path}: {architecture}.{key} is {_short(found)}, expected a positive "
                    "integer"
                )

        if self.get("block_count") > len(file.tensors):  # every layer is built before it is missed
            raise CheckpointError(
                f"{file.path}: {architecture}.block_count is {self.get('block_count')}, and the "
                f"file has {len(file.tensors)} tensors"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def mapped(self) -> dict[str, Any]:
        table = cast(dict[str, Any], GGUF_CONFIG_MAPPING)[self.architecture]
        return {name: self.get(key) for key, name in table.items() if name and self.get(key)}

    def refuse(self, key: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.file.path}: {self.architecture}.{key} is {_short(self.get(key))}, {why}. "
            "Use the safetensors checkpoint"
        )


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]


def _tokens_and_ties(file: GGUFFile) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight")
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    # Absent ids are None on purpose: the defaults of a configuration class are another model's.
    special = {name: file.metadata.get(f"tokenizer.ggml.{k}_token_id") for name, k in ids.items()}
    return special | {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _heads(keys: _Keys) -> dict[str, Any]:
    heads, hidden = keys.get("attention.head_count"), keys.get("embedding_length")
    size = keys.get("attention.key_length", keys.get("rope.dimension_count", hidden // heads))
    if keys.architecture not in _FREE_HEAD_DIM:
        size = keys.get("attention.key_length", hidden // heads)
        if size != hidden // heads:
            raise keys.refuse("attention.key_length", f"expected {hidden // heads}")
        return _kv_heads(keys, heads)
    if keys.get("attention.value_length", size) != size:
        raise keys.refuse("attention.value_length", f"but keys have {size}")
    if keys.get("rope.dimension_count", size) != size:
        raise keys.refuse("rope.dimension_count", f"but heads have {size}: partial rotation")
    return _kv_heads(keys, heads) | {"head_dim": size}


def _kv_heads(keys: _Keys, heads: int) -> dict[str, Any]:
    if keys.architecture == "gpt2":
        return {}
    found = keys.get("attention.head_count_kv", heads)
    if type(found) is not int or found < 1 or heads % found:
        raise keys.refuse("attention.head_count_kv", f"expected a divisor of {heads}")
    return {"num_key_value_heads": found}


def _extras(keys: _Keys) -> dict[str, Any]:
    """What transformers' table leaves out, by architecture."""
    find = _EXTRAS.get(keys.architecture)
    return find(keys) if find else {}


def _llama(keys: _Keys) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


def _gpt2(keys: _Keys) -> dict[str, Any]:
    return {
        "n_positions": keys.get("context_length"),
        "n_inner": keys.get("feed_forward_length"),
    }


def _gemma(keys: _Keys) -> dict[str, Any]:
    found = {
        name: keys.get(name)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
        if keys.get(name) is not None
    }
    if (keys.architecture, keys.get("block_count")) in _SCALED_BY_HIDDEN:
        found["query_pre_attn_scalar"] = keys.get("embedding_length") // keys.get(
            "attention.head_count"
        )
    return found


def _phi3(keys: _Keys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window") or None
    return {"sliding_window": window if window != keys.get("context_length") else None}


_EXTRAS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gpt2": _gpt2,
    "llama": _llama,
    "phi3": _phi3,
}


def _refuse_unknown_rules(keys: _Keys) -> None:
    if keys.get("expert_count"):
        raise keys.refuse("expert_count", "and a mixture of experts is not read from GGUF")
    if keys.get("attention.causal") is False:
        raise keys.refuse("attention.causal", "and only causal models are exported")
    window, context = keys.get("attention.sliding_window"), keys.get("context_length")
    has_window = keys.architecture in {"gemma2", "gemma3", "phi3"}
    if window and not has_window and window < context:
        raise keys.refuse("attention.sliding_window", "which this architecture has no place for")
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 1.0)
    if kind != "none" and factor not in (0, 1):
        raise keys.refuse("rope.scaling.type", f"factor {factor}: scaled positions are not read")


def _rope(keys: _Keys, values: dict[str, Any]) -> dict[str, Any]:
    if keys.architecture == "phi3":
        size = keys.get("embedding_length") // keys.get("attention.head_count")
        return {"partial_rotary_factor": keys.get("rope.dimension_count", size) / size}
    if ROPE_FREQS not in keys.file.tensors:
        return {}
    stored = keys.file.tensors[ROPE_FREQS]
    if stored.kind != GGMLQuantizationType.F32:
        raise CheckpointError(f"{keys.file.path}: {ROPE_FREQS} is {stored.kind.name}, expected F32")
    factors = keys.file.rows(ROPE_FREQS).view(np.float32).reshape(-1)
    if np.all(factors == 1.0):
        return {}
    theta = float(values.get("rope_theta", 10000.0))
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": round(float(factors.max()), 3)}
    rope |= _LLAMA3_ROPE
    if not _makes(factors, rope):
        raise UnsupportedModel(
            f"{keys.file.path}: {ROPE_FREQS} holds position factors up to {factors.max():g} that "
            "are not those of Llama 3. Use the safetensors checkpoint"
        )
    values.pop("rope_theta", None)
    return {"rope_parameters": rope}


def _makes(factors: np.ndarray, rope: dict[str, Any]) -> bool:
    """Whether Llama 3's rule with these parameters gives the stored factors."""
    size = 2 * len(factors)
    wavelength = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] / wavelength
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return bool(np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4))

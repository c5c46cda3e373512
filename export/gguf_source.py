"""Read the weights of a GGUF file by parameter name, dequantized one tensor at a time.

Names come from the `gguf` package, what llama.cpp did to the values (the interleaving of Llama's
query and key rows, Gemma's norms plus one, GPT-2's transposes) is undone by transformers' own
processors. A tensor that the model would compute with and that has no parameter is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from gguf import get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import dequantize
from transformers import PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from spec_export.engines.errors import UnsupportedModel
from spec_export.export.gguf_config import ROPE_FREQS, architecture_of
from spec_export.export.gguf_file import GGUFFile
from spec_export.export.weight_source import Shape, check_shapes

# Elements dequantized at once. The dequantizer's temporaries are a few times its result, so a whole
# embedding would take several times its size; and small blocks stay in the cache: Q4_K is 3 times
# as fast as in one call (2026, 2-core x86-64: 23 against 72 ms for 6.3M elements).
_BLOCK_ELEMENTS = 1 << 19
_HEAD = "lm_head.weight"
_NEVER_WEIGHTS = re.compile(rf"^{re.escape(ROPE_FREQS)}$|\.attn_rot_embd\.")


class GGUFWeights:
    """A `WeightSource` over a GGUF file; every value is float32."""

    def __init__(
        self,
        file: GGUFFile,
        names: Mapping[str, str],
        processor: TensorProcessor,
        unused: tuple[str, ...],
    ) -> None:
        self.unused = unused
        self._file, self._names, self._processor = file, names, processor

    def read(self, name: str) -> np.ndarray:
        """See `WeightSource.read`."""
        stored = self._names[name]
        tensor = self._file.tensors[stored]
        values = _dequantized(self._file.rows(stored), tensor.kind, tensor.shape)
        return _processed(self._processor, values, stored)

    def nbytes_largest(self) -> int:
        """See `WeightSource.nbytes_largest`."""
        sizes = (math.prod(self._file.tensors[name].shape) for name in self._names.values())
        return 4 * max(sizes, default=0)


def resolve_gguf(
    file: GGUFFile, config: PretrainedConfig, parameter_shapes: Mapping[str, Shape]
) -> GGUFWeights:
    """Match the tensors of a file to parameters; reads no weight.

    Args:
        file: as from `read_gguf`.
        config: as from `config_from_gguf`.
        parameter_shapes: shape of every parameter that will be read.

    Raises:
        CheckpointError: a parameter is missing or has another shape.
        UnsupportedModel: a tensor is quantized in a way that is not read, or belongs to something
            the model does not have.
    """
    processor = _processor(architecture_of(file), config)
    names = _names(file, config, parameter_shapes)
    shapes = {name: _shape(file, stored, processor) for name, stored in names.items()}
    check_shapes(parameter_shapes, shapes, str(file.path))
    _check_kinds(file, names.values())
    unused = tuple(sorted(set(file.tensors) - set(names.values())))
    _refuse_lost(file, config, unused)
    return GGUFWeights(file, names, processor, unused)


def _processor(architecture: str, config: PretrainedConfig) -> TensorProcessor:
    values = {
        key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")
    }
    made = cast(Any, TENSOR_PROCESSORS.get(architecture, TensorProcessor))
    return cast(TensorProcessor, made(config=values))


def _names(
    file: GGUFFile, config: PretrainedConfig, parameter_shapes: Mapping[str, Shape]
) -> dict[str, str]:
    """Stored name of every parameter the file has."""
    architecture = architecture_of(file)
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for parameter in parameter_shapes:
        module, _, leaf = parameter.rpartition(".")
        # A checkpoint may have been converted from the base model, without its prefix.
        stems = (module, module.partition(".")[2])
        stored = [f"{name}.{leaf}" for name in map(table.get_name, stems) if name]
        if config.tie_word_embeddings and parameter == _HEAD:
            stored.append("token_embd.weight")
        present = next((name for name in stored if name in file.tensors), None)
        if present is not None:
            found[parameter] = present
    return found


def _shape(file: GGUFFile, stored: str, processor: TensorProcessor) -> Shape:
    """The shape after processing, found by processing an array that has a shape and no memory."""
    nothing = np.broadcast_to(np.float32(0), file.tensors[stored].shape)
    return tuple(_processed(processor, nothing, stored).shape)


def _processed(processor: TensorProcessor, values: np.ndarray, stored: str) -> np.ndarray:
    if stored == "output.weight":  # never transformed; GPT-2's processor would copy it to torch
        return values
    return cast(np.ndarray, cast(Any, processor).process(weights=values, name=stored).weights)


def _check_kinds(file: GGUFFile, names: Iterable[str]) -> None:
    for kind in sorted({file.tensors[name].kind for name in names}):
        block, block_bytes = GGML_QUANT_SIZES[kind]
        try:
            _dequantized(np.zeros((1, block_bytes), np.uint8), kind, (block,))
        except NotImplementedError:
            raise UnsupportedModel(
                f"{file.path} holds {kind.name} tensors, which cannot be dequantized; use another "
                "quantization of the model"
            ) from None


def _refuse_lost(file: GGUFFile, config: PretrainedConfig, unused: tuple[str, ...]) -> None:
    """A GGUF file holds what llama.cpp computes with; what is left over would change the result."""
    layers = {f"blk.{layer}" for layer in range(config.num_hidden_layers)}
    lost = [
        name
        for name in unused
        if not _NEVER_WEIGHTS.search(name)
        and (not name.startswith("blk.") or ".".join(name.split(".")[:2]) in layers)
    ]
    if lost:
        raise UnsupportedModel(
            f"{file.path}: {len(lost)} tensors have no place in a {config.model_type} model, first "
            f"{lost[0]}. Use the safetensors checkpoint"
        )


def _dequantized(rows: np.ndarray, kind: GGMLQuantizationType, shape: Shape) -> np.ndarray:
    """Values of `[rows, bytes per row]`, float32; float32 tensors stay mapped."""
    if kind == GGMLQuantizationType.F32:
        return rows.view(np.float32).reshape(shape)
    values = np.empty((len(rows), shape[-1]), np.float32)
    step = max(1, _BLOCK_ELEMENTS // shape[-1])
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        # One long row: blocks of weights never straddle rows, and one call beats many.
        values[start : start + step] = dequantize(block.reshape(1, -1), kind).reshape(
            len(block), -1
        )
    return values.reshape(shape)

"""What the weights of a model take in memory, from its description alone.

A description has the bytes of all weights together. A decoder layer has about 12 h^2 parameters and
embedding and head V h each, of which one is stored where they are tied; with the bytes of a weight
in each, that gives the hidden size h and the parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spec_export.engines.graphs import BY_ROW, FP4_BLOCK, ModelSpec, QuantizationSpec

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CACHE_BYTES = ITEM_BYTES | {"int8": 1}
_NUMBER_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "nvfp4": 0.5}
_SUM_BYTES = 4  # of each block: what 8-bit products keep besides; onnxruntime 1.32, x86-64


@dataclass(frozen=True)
class Parts:
    """Bytes of a model's weights, as they are stored, and its hidden size.

    Attributes:
        hidden: numbers of a row between layers.
        embedding: the table of tokens, which is the head as well where those are tied.
        head: the matrix of the logits, where it is quantized.
        layers: all the rest.
    """

    hidden: float
    embedding: float
    head: float
    layers: float


def parts(spec: ModelSpec) -> Parts:
    """Take the bytes of a model apart."""
    found, item = spec.quantization or QuantizationSpec(), ITEM_BYTES[spec.dtype]
    of_layers, of_head = _weight_bytes(found.weights, found, item), 0.0
    if found.head is not None:
        of_head = _weight_bytes(found.head, found, item)
    square, linear = 12 * spec.layers * of_layers, spec.vocabulary * (item + of_head)
    root = math.sqrt(linear**2 + 4 * square * spec.parameters_bytes)
    hidden = (root - linear) / (2 * square)
    embedding, head = (spec.vocabulary * hidden * size for size in (item, of_head))
    return Parts(hidden, embedding, head, spec.parameters_bytes - embedding - head)


def resident_bytes(spec: ModelSpec, *, on_processor: bool) -> int:
    """Bytes of the weights as an engine keeps them.

    onnxruntime has no half-precision kernels on a processor and keeps float32 (SmolLM2-135M: 269 MB
    on disk, 538 MB in memory). Weights of few bits it packs anew, with a sum for each block where
    products are in 8 bits. A table that is only looked up in stays on disk, mapped.
    """
    found = spec.quantization
    if found is None or found.weights is None:
        return spec.parameters_bytes * (4 // ITEM_BYTES[spec.dtype] if on_processor else 1)
    if not on_processor and found.activations != BY_ROW:
        return spec.parameters_bytes
    stored, item = parts(spec), ITEM_BYTES[spec.dtype]
    kept = stored.layers + stored.head
    if found.head is None:
        kept += stored.embedding * 4 / item
    if found.activations == BY_ROW and found.block:
        for size, kind in ((stored.layers, found.weights), (stored.head, found.head)):
            kept += size / _weight_bytes(kind, found, item) * _SUM_BYTES / found.block
    return round(kept)


def quantized_bytes(spec: ModelSpec, wanted: QuantizationSpec) -> int:
    """Bytes that the weights of a model in float32 would take as `wanted`."""
    stored, item = parts(spec), ITEM_BYTES[spec.dtype]
    layers = stored.layers / item * _weight_bytes(wanted.weights, wanted, item)
    head = stored.embedding / item * _weight_bytes(wanted.head, wanted, item) if wanted.head else 0
    return round(layers + stored.embedding + head)


def _weight_bytes(kind: str | None, found: QuantizationSpec, item: int) -> float:
    """Bytes of a weight, with its share of a scale and a zero point."""
    if kind is None:
        return item
    number = _NUMBER_BYTES[kind]
    if kind == "nvfp4":
        return number + 1 / FP4_BLOCK
    if not found.block:
        return number
    return number + (item + number * found.zeros) / found.block

"""Weights of 8 or 4 bits, read back by a standard `DequantizeLinear` in front of their `MatMul`.

Symmetric, rounded to nearest: a block's largest magnitude maps to the largest number of the format.
`int8` and `fp8` (E4M3) have a scale for each column, `int4` one for each block of 128 rows of a
column (axis 0, what a sum runs over), or of 64 where 128 do not divide them: what both TensorRT
libraries and onnxruntime take. Only the matrices inside the layers are quantized. The
embedding is looked up, not multiplied, and the head decides between near-equal tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from spec_export.engines.errors import BuildError
from spec_export.engines.weight_files import Pending, row_blocks

WeightFormat = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class _Format:
    """Numbers of a format.

    Attributes:
        dtype: of the numbers.
        largest: of their magnitudes that is used.
        blocks: rows that may share a scale, the best first; empty: all rows of a column do.
    """

    dtype: ir.DataType
    largest: float
    blocks: tuple[int, ...]


_FORMATS: dict[str, _Format] = {
    "int8": _Format(ir.DataType.INT8, 127.0, ()),
    "int4": _Format(ir.DataType.INT4, 7.0, (128, 64)),
    "fp8": _Format(ir.DataType.FLOAT8E4M3FN, 448.0, ()),
}


def quantize_weights(
    model: ir.Model,
    originals: dict[str, ir.TensorProtocol],
    weights: WeightFormat,
) -> dict[str, Pending]:
    """Quantize every matrix that a `MatMul` of a layer reads, in place.

    Args:
        model: the graph, in the type it computes in.
        originals: float32 values of its initializers.
        weights: the format.

    Returns:
        The weights to write, by initializer.

    Raises:
        BuildError: a matrix does not divide into blocks, or none can be quantized.
    """
    graph, pending = model.graph, dict[str, Pending]()
    for node in [node for node in graph if _is_layer_product(graph, node)]:
        weight = node.inputs[1]
        assert weight is not None and weight.name is not None
        tensor, kind = originals[weight.name], _FORMATS[weights]
        rows, columns = tensor.shape.numpy()
        block = next((size for size in kind.blocks if rows % size == 0), 0)
        if kind.blocks and not block:
            raise BuildError(
                f"--weights {weights}: {weight.name} has {rows} rows, which blocks of "
                f"{' or '.join(map(str, kind.blocks))} do not divide; build this model with "
                "--weights int8, or leave --weights out"
            )
        if weights == "int4" and columns % 2:
            raise BuildError(f"--weights int4: {weight.name} has an odd number of columns")
        pending |= _quantize(graph, weight, tensor, kind, block, weights)
    if not pending:
        raise BuildError(f"--weights {weights}: the graph has no matrix to quantize")
    return pending


def _is_layer_product(graph: ir.Graph, node: ir.Node) -> bool:
    """Whether a node multiplies by a weight, and its result is not the logits."""
    if node.op_type != "MatMul":
        return False
    weight, result = node.inputs[1], node.outputs[0]
    if weight is None or weight.name not in graph.initializers or len(weight.consumers()) != 1:
        return False
    names = {result.name, *(out.name for user in result.consumers() for out in user.outputs)}
    return "logits" not in names


def _quantize(
    graph: ir.Graph,
    weight: ir.Value,
    tensor: ir.TensorProtocol,
    kind: _Format,
    block: int,
    name: str,
) -> dict[str, Pending]:
    """Put a `DequantizeLinear` between a weight and its only reader; block 0: none."""
    assert weight.dtype is not None
    scale_type, shape = weight.dtype, tuple(int(dim) for dim in tensor.shape.numpy())
    scale_shape = (shape[0] // block, shape[1]) if block else shape[1:]
    made = {
        f"{weight.name}.{name}": Pending(
            kind.dtype, shape, lambda: _numbers(tensor, kind, block, scale_type)
        ),
        f"{weight.name}.scale": Pending(
            scale_type, scale_shape, lambda: _scales(tensor, kind, block, scale_type)
        ),
    }
    inputs = []
    for title, content in made.items():
        value = ir.Value(name=title, shape=ir.Shape(content.shape))
        value.dtype = content.dtype
        graph.initializers[title] = _placeholder(value)
        inputs.append(value)
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    dequantize = ir.node("DequantizeLinear", inputs, attributes)
    result = dequantize.outputs[0]
    result.name, result.dtype, result.shape = f"{weight.name}.read", scale_type, ir.Shape(shape)
    (reader,) = {use.node for use in weight.uses()}
    graph.insert_before(reader, dequantize)
    weight.replace_all_uses_with(result)
    assert weight.name is not None
    del graph.initializers[weight.name]
    return made


def _placeholder(value: ir.Value) -> ir.Value:
    """An initializer must have a value; what it is comes when it is written."""
    assert value.dtype is not None
    value.const_value = ir.tensor(np.zeros((), np.int8), name=value.name)
    return value


def _scales(
    tensor: ir.TensorProtocol, kind: _Format, block: int, scale_type: ir.DataType
) -> Iterator[np.ndarray]:
    if not block:
        yield _column_scales(tensor, kind, scale_type)
        return
    for rows in row_blocks(tensor.numpy(), block):
        yield _block_scales(rows, kind, block, scale_type)


def _numbers(
    tensor: ir.TensorProtocol, kind: _Format, block: int, scale_type: ir.DataType
) -> Iterator[np.ndarray]:
    content = tensor.numpy()
    whole = None if block else _column_scales(tensor, kind, scale_type)
    for rows in row_blocks(content, block or 1):
        if whole is not None:
            scaled = rows / whole.astype(np.float32)
        else:
            scale = _block_scales(rows, kind, block, scale_type).astype(np.float32)
            scaled = rows / np.repeat(scale, block, axis=0)
        yield _encoded(scaled, kind)


def _block_scales(
    rows: np.ndarray, kind: _Format, block: int, scale_type: ir.DataType
) -> np.ndarray:
    """`[K / block, N]`, rounded as they are stored, so that the numbers fit them."""
    largest = np.abs(rows).reshape(-1, block, rows.shape[1]).max(axis=1).astype(np.float32)
    return _stored_scale(largest, kind, scale_type)


def _column_scales(tensor: ir.TensorProtocol, kind: _Format, scale_type: ir.DataType) -> np.ndarray:
    largest = [np.abs(rows).max(axis=0) for rows in row_blocks(tensor.numpy())]
    return _stored_scale(np.max(largest, axis=0).astype(np.float32), kind, scale_type)


def _stored_scale(largest: np.ndarray, kind: _Format, scale_type: ir.DataType) -> np.ndarray:
    stored = (largest / kind.largest).astype(scale_type.numpy())
    smallest = np.asarray(2.0**-24, scale_type.numpy())  # a block of zeros has a scale as well
    floored: np.ndarray = np.maximum(stored, smallest)
    return floored


def _encoded(scaled: np.ndarray, kind: _Format) -> np.ndarray:
    limited = np.clip(scaled, -kind.largest, kind.largest)
    if kind.dtype == ir.DataType.FLOAT8E4M3FN:
        small: np.ndarray = limited.astype(kind.dtype.numpy())
        return small
    whole: np.ndarray = np.rint(limited).astype(np.int8)
    if kind.dtype == ir.DataType.INT8:
        return whole
    pairs = whole.reshape(-1, 2)
    packed: np.ndarray = ((pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)).astype(np.int8)
    return packed

"""What TensorRT is given to compile: graphs with numbers for dimensions, and small ones that ask.

Whether there is a fused attention kernel for a shape, a type and a GPU is found out by compiling
that attention alone, which takes hundredths of a second. So a role without one is known, and named,
before a whole model is built in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import FP4_BLOCK, WeightFormat

LONGEST_TOP_K = 3840
_OPSET = 24
_SIDE = 128  # of the matrix in a probe: the largest block of rows
_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
_WEIGHTS: dict[int, WeightFormat] = {
    TensorProto.INT8: "int8",
    TensorProto.INT4: "int4",
    TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.FLOAT4E2M1: "nvfp4",
}


@dataclass(frozen=True, order=True)
class AttentionShape:
    """Heads of one layer's attention.

    Attributes:
        heads: of the queries.
        kv_heads: of keys and values.
        size: of a head.
    """

    heads: int
    kv_heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.size} over {self.kv_heads}"


def read_pinned(graph: Path, pins: Mapping[str, int]) -> onnx.ModelProto:
    """A graph with symbols of `pins` replaced by numbers; its weights are not loaded."""
    model = onnx.load(str(graph), load_external_data=False)
    pin(model, pins)
    return model


def pin(model: onnx.ModelProto, pins: Mapping[str, int]) -> None:
    """Write numbers for symbols, in place."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in pins:
                dim.dim_value = pins[dim.dim_param]


def attention_shapes(model: onnx.ModelProto) -> frozenset[AttentionShape]:
    """The attention of every layer.

    Raises:
        BuildError: a node is not what the export makes.
    """
    known = {value.name: value for value in (*model.graph.input, *model.graph.value_info)}
    known |= {value.name: value for value in model.graph.output}
    found = set()
    for node in model.graph.node:
        if node.op_type != "Attention":
            continue
        query, key = (_dims(known.get(name)) for name in node.input[:2])
        if len(query) != 4 or len(key) != 4 or not all((query[1], query[3], key[1])):
            raise BuildError(
                f"{node.name}: the attention has no shapes written down; export the model again"
            )
        softcap = [a.f for a in node.attribute if a.name == "softcap"]
        if any(softcap):
            raise BuildError(
                f"{node.name}: attention with a soft cap of {softcap[0]:g} has no place in "
                "TensorRT; build with --backend onnxruntime"
            )
        found.add(AttentionShape(query[1], key[1], query[3]))
    return frozenset(found)


def _dims(value: onnx.ValueInfoProto | None) -> list[int]:
    return [] if value is None else [d.dim_value for d in value.type.tensor_type.shape.dim]


def weight_format(model: onnx.ModelProto) -> WeightFormat | None:
    """Format of the quantized weights; None where there are none."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    read = {node.input[0] for node in _matrices(model)}
    found = {_WEIGHTS[types[name]] for name in read if types.get(name) in _WEIGHTS}
    if len(found) > 1:
        raise BuildError(f"the weights have several formats: {', '.join(sorted(found))}")
    return found.pop() if found else None


def weight_blocks(model: onnx.ModelProto) -> tuple[int, ...]:
    """Rows that share a scale in the quantized weights, each number once; 0: a whole column."""
    sizes = {
        next((a.i for a in node.attribute if a.name == "block_size"), 0)
        for node in _matrices(model)
    }
    return tuple(sorted(sizes))


def _matrices(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """What reads a matrix of few bits; not what reads its scales, or an activation."""
    weights = {tensor.name for tensor in model.graph.initializer}
    factors = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    return [
        node
        for node in model.graph.node
        if node.op_type == "DequantizeLinear"
        and node.input[0] in weights
        and node.output[0] in factors
    ]


def attention_model(shape: AttentionShape, rows: int, capacity: int, dtype: str) -> bytes:
    """One layer's cache updates and attention."""
    kind = _TYPES[dtype]

    def tensor(name: str, dims: list[int], of: int = kind) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, of, dims)

    cache = [1, shape.kv_heads, capacity, shape.size]
    written = [1, shape.kv_heads, rows, shape.size]
    queries = [1, shape.heads, rows, shape.size]
    nodes = [
        helper.make_node("TensorScatter", [f"past_{x}", x, "kv_len"], [f"present_{x}"], axis=-2)
        for x in ("key", "value")
    ]
    reads = ["query", "present_key", "present_value", "mask"]
    nodes.append(helper.make_node("Attention", reads, ["result"], scale=shape.size**-0.5))
    inputs = [
        tensor("query", queries),
        *(tensor(name, written) for name in ("key", "value")),
        *(tensor(name, cache) for name in ("past_key", "past_value")),
        tensor("kv_len", [1], TensorProto.INT64),
        tensor("mask", [1, 1, rows, capacity], TensorProto.BOOL),
    ]
    outputs = [tensor("result", queries)]
    outputs += [tensor(name, cache) for name in ("present_key", "present_value")]
    return _model(nodes, inputs, outputs, [])


def product_model(dtype: str, weights: str, block: int) -> bytes:
    """One product with a quantized matrix, a scale for each `block` rows; 0: for a column."""
    kind = _TYPES[dtype]
    if weights == "nvfp4":
        return _fp4_product_model(kind)
    stored = next(key for key, name in _WEIGHTS.items() if name == weights)
    bits = np.zeros(_SIDE * _SIDE // (2 if weights == "int4" else 1), np.uint8).tobytes()
    matrix = helper.make_tensor("matrix", stored, [_SIDE, _SIDE], bits, raw=True)
    scales = [_SIDE // block, _SIDE] if block else [_SIDE]
    how: dict[str, Any] = {"axis": 0, "block_size": block} if block else {"axis": 1}
    scale = helper.make_tensor("scale", kind, scales, np.ones(int(np.prod(scales))))
    nodes = [
        helper.make_node("DequantizeLinear", ["matrix", "scale"], ["read"], **how),
        helper.make_node("MatMul", ["row", "read"], ["result"]),
    ]
    row, result = (
        helper.make_tensor_value_info(name, kind, [1, 2, _SIDE]) for name in ("row", "result")
    )
    return _model(nodes, [row], [result], [matrix, scale])


def _fp4_product_model(kind: int) -> bytes:
    """The same with a matrix of E2M1: the scales of its blocks are E4M3, with one scale for all."""
    small = TensorProto.FLOAT8E4M3FN
    side, blocks = _SIDE, _SIDE // FP4_BLOCK
    matrix = helper.make_tensor(
        "matrix", TensorProto.FLOAT4E2M1, [side, side], bytes(side * side // 2), raw=True
    )
    ones = np.full(blocks * side, 0x38, np.uint8).tobytes()  # 1 as E4M3
    scales = helper.make_tensor("scales", small, [blocks, side], ones, raw=True)
    whole = helper.make_tensor("whole", kind, [], [1.0])
    nodes = [
        helper.make_node("DequantizeLinear", ["scales", "whole"], ["read_scales"]),
        helper.make_node(
            "DequantizeLinear", ["matrix", "read_scales"], ["read"], axis=0, block_size=FP4_BLOCK
        ),
        helper.make_node("MatMul", ["row", "read"], ["result"]),
    ]
    row, result = (
        helper.make_tensor_value_info(name, kind, [1, 2, side]) for name in ("row", "result")
    )
    return _model(nodes, [row], [result], [matrix, scales, whole])


def _model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: list[onnx.TensorProto],
) -> bytes:
    graph = helper.make_graph(nodes, "probe", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", _OPSET)]
    content: bytes = helper.make_model(graph, opset_imports=opsets).SerializeToString()
    return content


def check_sampling(model: onnx.ModelProto, name: str) -> None:
    """Refuse a `TopK` that TensorRT would refuse, in words.

    Raises:
        BuildError: naming the graph and both numbers.
    """
    constants = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "TopK" and node.input[1] in constants:
            count = int(onnx.numpy_helper.to_array(constants[node.input[1]]).max())
            if count > LONGEST_TOP_K:
                raise BuildError(
                    f"{name}: lists the {count} largest of a row, TensorRT lists at most "
                    f"{LONGEST_TOP_K}"
                )

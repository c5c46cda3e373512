"""Retype a float32 graph to half precision, so that one exported directory serves CPU and GPU.

Weights, caches and activations become half. What stays float32 is what loses more than rounding by
it: positions and the rotary angles made of them (until their sine and cosine are taken), sums and
squares that are spelled out in the graph, and logits. `RMSNormalization`, `LayerNormalization` and
`Attention` add up in float32 by their definition. Masks and indices are no floats and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import ElementType
from spec_export.engines.weight_files import Pending, row_blocks

HALF_TYPES: dict[str, ir.DataType] = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
_SINGLE = ir.DataType.FLOAT
# Sums, squares and their inverses: their intermediate values leave the range of float16, or the
# seven bits of bfloat16. Attention and the norms are not here: they do this inside.
_WIDE_OPERATORS = frozenset(
    [
        "Pow",
        "ReduceMean",
        "ReduceSum",
        "ReduceSumSquare",
        "ReduceL2",
        "ReduceLogSumExp",
        "Sqrt",
        "Reciprocal",
        "Exp",
        "Log",
        "Softmax",
        "LogSoftmax",
        "Softplus",
        "Cos",
        "Sin",
        "CumSum",
    ]
)
_SCALED = frozenset({"DequantizeLinear", "QuantizeLinear"})
Kind = Literal["half", "single", "either"]


class _Retyper:
    """One pass over a graph in topological order."""

    def __init__(self, graph: ir.Graph, half: ir.DataType) -> None:
        self._graph, self._half = graph, half
        self._kinds: dict[ir.Value, Kind] = {}
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._split: dict[ir.Value, ir.Value] = {}
        self.halved: dict[str, ir.Value] = {}

    def run(self) -> None:
        """Retype every input, initializer and node."""
        for value in self._graph.inputs:
            if value.dtype == _SINGLE:
                value.dtype = self._half
                self._kinds[value] = "half"
        for value in list(self._graph.initializers.values()):
            if value.dtype == _SINGLE:
                self._kinds[value] = "half" if _is_matrix(value) else "either"
        for value in [v for v, kind in self._kinds.items() if kind == "half"]:
            self._halve_initializer(value)
        for node in list(self._graph):
            self._retype(node)

    def kind(self, value: ir.Value | None) -> Kind | None:
        """What a value is; None for one that is no float."""
        return None if value is None else self._kinds.get(value)

    def _retype(self, node: ir.Node) -> None:
        kinds = {self.kind(value) for value in node.inputs} - {None}
        wanted = self._wanted(node, kinds)
        if wanted is None:
            return
        for index, value in enumerate(node.inputs):
            if self.kind(value) is not None:
                assert value is not None
                node.replace_input_with(index, self._as(value, wanted, node))
        if node.op_type == "Cast":
            wanted = self._cast_result(node, wanted)
        for output in node.outputs:
            if _is_float(node, output):
                output.dtype = self._half if wanted == "half" else _SINGLE
                self._kinds[output] = wanted

    def _wanted(self, node: ir.Node, kinds: set[Kind | None]) -> Kind | None:
        """In which type a node computes; None where it reads and makes no floats."""
        if not kinds:
            makes = node.op_type in ("Cast", "ConstantOfShape", "RandomUniform", "EyeLike")
            return "single" if makes and _makes_single(node) else None
        if node.op_type in _WIDE_OPERATORS or _is_square(node):
            return "single"
        return "half" if "half" in kinds else "single"

    def _cast_result(self, node: ir.Node, wanted: Kind) -> Kind:
        """A cast keeps what it is told; one to float32 marks what the model computes in it."""
        return "single" if _makes_single(node) else wanted

    def _as(self, value: ir.Value, wanted: Kind, before: ir.Node) -> ir.Value:
        kind = self._kinds[value]
        if kind == "either":
            return value if wanted == "single" else self._half_copy(value)
        if kind == wanted:
            return value
        to = self._half if wanted == "half" else _SINGLE
        if (value, to) not in self._casts:
            cast = ir.node("Cast", [value], attributes={"to": to.value})
            made = cast.outputs[0]
            made.dtype, made.shape, made.name = to, value.shape, f"{value.name}.{to.name.lower()}"
            self._insert(cast, value, before)
            self._kinds[made], self._casts[value, to] = wanted, made
        return self._casts[value, to]

    def _insert(self, cast: ir.Node, value: ir.Value, before: ir.Node) -> None:
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(before, cast)
        else:
            self._graph.insert_after(producer, cast)

    def _half_copy(self, value: ir.Value) -> ir.Value:
        """The half form of a small initializer; its float32 form goes if nothing reads it."""
        if value not in self._split:
            assert value.const_value is not None
            name = f"{value.name}.half"
            copy = ir.Value(name=name, shape=value.shape, const_value=value.const_value)
            self._graph.initializers[name] = copy
            self._split[value] = copy
            self._kinds[copy] = "half"
            self._halve_initializer(copy)
        return self._split[value]

    def _halve_initializer(self, value: ir.Value) -> None:
        if value.name in self._graph.initializers and not value.is_graph_input():
            value.dtype = self._half
            self.halved[str(value.name)] = value


def retype(model: ir.Model, dtype: ElementType) -> dict[str, Pending]:
    """Retype a float32 decoder in place.

    Args:
        model: a graph as it was exported, float32.
        dtype: `float16` or `bfloat16`.

    Returns:
        The weights to write, by initializer.
    """
    graph, half = model.graph, HALF_TYPES[dtype]
    work = _Retyper(graph, half)
    work.run()
    _restore_logits(graph, half)
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)
    kept = {name: value for name, value in work.halved.items() if name in graph.initializers}
    return {name: _halved(value, half) for name, value in kept.items()}


def _restore_logits(graph: ir.Graph, half: ir.DataType) -> None:
    """Logits leave the graph as float32, whatever the head computes in."""
    for index, output in enumerate(graph.outputs):
        if output.name != "logits" or output.dtype != half:
            continue
        output.name = "logits.half"
        cast = ir.node("Cast", [output], attributes={"to": _SINGLE.value})
        wide = cast.outputs[0]
        wide.name, wide.dtype, wide.shape = "logits", _SINGLE, output.shape
        graph.append(cast)
        graph.outputs[index] = wide


def _halved(value: ir.Value, half: ir.DataType) -> Pending:
    tensor = value.const_value
    assert tensor is not None
    return Pending(half, tuple(tensor.shape.numpy()), lambda: _cast_blocks(value, tensor, half))


def _cast_blocks(
    value: ir.Value, tensor: ir.TensorProtocol, half: ir.DataType
) -> Iterator[np.ndarray]:
    for block in row_blocks(tensor.numpy()):
        with np.errstate(over="ignore"):
            cast = block.astype(half.numpy())
        if not np.isfinite(cast.astype(np.float32)).all():
            raise BuildError(
                f"{value.name} overflows {half.name.lower()}: its largest value is "
                f"{float(np.abs(block).max()):.3g}; build with --dtype bfloat16"
            )
        yield cast


def _is_matrix(value: ir.Value) -> bool:
    """Whether an initializer is a weight, and not a scale, a bias, a frequency or a constant.

    The scales of a weight of few bits are a part of it.
    """
    if any(node.op_type in _SCALED and node.inputs[1] is value for node in value.consumers()):
        return True
    shape = () if value.shape is None else value.shape.numpy()
    return sum(dim > 1 for dim in shape) > 1


def _is_square(node: ir.Node) -> bool:
    return node.op_type == "Mul" and node.inputs[0] is node.inputs[1]


def _makes_single(node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return bool(node.attributes["to"].value == _SINGLE.value)
    return any(output.dtype == _SINGLE for output in node.outputs)


def _is_float(node: ir.Node, output: ir.Value) -> bool:
    """Whether an output is of the type the node computes in; some have none written down."""
    if output.dtype is not None:
        return output.dtype == _SINGLE
    return node.op_type not in ("Shape", "Size", "ArgMax", "ArgMin", "NonZero")

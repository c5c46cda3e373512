"""Put initializers and nodes into a graph that is rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir


def add_initializer(
    graph: ir.Graph, name: str, kind: ir.DataType, shape: tuple[int, ...]
) -> ir.Value:
    """An initializer whose content comes when it is written."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
    value.const_value = ir.tensor(np.zeros((), np.int8), name=name)
    graph.initializers[name] = value
    return value


def insert(
    graph: ir.Graph,
    before: ir.Node,
    kind: str,
    inputs: Sequence[ir.Value],
    dtype: ir.DataType,
    shape: ir.Shape | None,
    *,
    name: str | None = None,
    attributes: Mapping[str, int] | None = None,
) -> ir.Value:
    """Put a node of one result in front of another; returns the result.

    Args:
        graph: changed in place.
        before: the node that follows.
        kind: operator of the standard domain.
        inputs: of the node.
        dtype: of its result.
        shape: of its result.
        name: of its result; None: any.
        attributes: of the node.
    """
    node = ir.node(kind, inputs, attributes or {})
    result = node.outputs[0]
    result.dtype, result.shape = dtype, shape
    if name is not None:
        result.name = name
    graph.insert_before(before, node)
    return result

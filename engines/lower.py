"""Lowering for ONNX Runtime's CPU provider.

Standard attention over a cache becomes `GroupQueryAttention`, whose cost follows the length used
instead of the capacity. Only for passes whose rows are a chain. What does not match stays as it
is, layer by layer. Sampling graphs add up in doubles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from spec_export.engines.graphs import ModelSpec

CONTRIB = "com.microsoft"
_HEADS_BEHIND_ROWS = [0, 2, 1, 3]
_OLDEST_OPSET, _OLDEST_IR = 23, 11
_SCALES_AT = 12  # of the operator's inputs


@dataclass(frozen=True)
class _Lengths:
    """Shared inputs of every lowered layer."""

    last: ir.Value  # [1] int32: kv_len + T - 1
    total: ir.Value  # [1] int32: kv_len + T


@dataclass(frozen=True)
class _Write:
    """How a layer writes a cache.

    Attributes:
        past: the cache.
        present: the same memory after it.
        rows: what is written.
        scale: of each channel of a cache of 8 bits; None: the cache has the type of the rows.
    """

    past: ir.Value
    present: ir.Value
    rows: ir.Value
    scale: np.ndarray | None


def lower_attention(model: ir.Model, spec: ModelSpec, capacity: int | None = None) -> int:
    """Replace attention where it matches; returns the number of layers replaced.

    Args:
        model: changed in place.
        spec: its description.
        capacity: for an engine whose lengths are in device memory: nothing then passes through
            the host, and the total, which the operator wants there, is this constant.
    """
    graph = model.graph
    windows = {state.output: state.window for state in spec.states}
    lengths: _Lengths | None = None
    lowered = 0
    for node in [n for n in graph if n.op_type == "Attention" and n.domain == ""]:
        writes = _cache_writes(node)
        if writes is None or _number(node, "softcap") or _number(node, "is_causal"):
            continue
        if lengths is None:
            lengths = _add_lengths(graph) if capacity is None else _stay(graph, capacity)
        key, value = writes
        assert key.present.name is not None
        _replace(graph, node, key, value, lengths, windows[key.present.name])
        lowered += 1
    if lowered:
        model.opset_imports[CONTRIB] = 1
        _sweep(model)
    return lowered


def remove_unused_inputs(model: ir.Model, keep: frozenset[str]) -> None:
    """Drop graph inputs that nothing reads any more, except those in `keep`."""
    for value in list(model.graph.inputs):
        if not value.consumers() and value.name not in keep:
            model.graph.inputs.remove(value)


def stamp_oldest(model: ir.Model) -> None:
    """Declare the oldest operator set the graph is valid under, so that older runtimes open it.

    Opset 24 only added `TensorScatter` and element types to what lowered and sampling graphs use;
    onnxruntime for Python 3.10 (1.23) opens opset 23 and IR version 11 at most.
    """
    newest = {"TensorScatter", "Attention"}
    if not any(node.op_type in newest and node.domain == "" for node in model.graph):
        model.opset_imports[""] = _OLDEST_OPSET
        model.ir_version = min(model.ir_version, _OLDEST_IR)


def pin_dimensions(model: ir.Model, values: dict[str, int]) -> None:
    """Write numbers for symbolic dimensions everywhere in the graph."""
    graph = model.graph
    every = [*graph.inputs, *graph.outputs, *(out for node in graph for out in node.outputs)]
    for value in every:
        if value.shape is not None:
            value.shape = ir.Shape([_pinned(dim, values) for dim in value.shape])


def _pinned(dim: int | ir.SymbolicDim, values: dict[str, int]) -> int | str | None:
    return dim if isinstance(dim, int) else values.get(str(dim.value), dim.value)


def static_dim(value: ir.Value, axis: int) -> int:
    """A dimension of `value` that is a number."""
    dim = None if value.shape is None else value.shape[axis]
    assert isinstance(dim, int), f"{value.name}: dimension {axis} is {dim}"
    return dim


def _number(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 0.0 if attribute is None else float(attribute.value)


def _cache_writes(attention: ir.Node) -> tuple[_Write, _Write] | None:
    """What is behind key and value; None where it is not what the export and `caches` make."""
    key, value = (_cache_write(read) for read in attention.inputs[1:3])
    if key is None or value is None or (key.scale is None) != (value.scale is None):
        return None
    return key, value


def _cache_write(read: ir.Value | None) -> _Write | None:
    node = None if read is None else read.producer()
    if node is None:
        return None
    if node.op_type == "TensorScatter":
        past, rows = node.inputs[:2]
        assert past is not None and rows is not None
        return _Write(past, node.outputs[0], rows, None)
    factor = node.inputs[1] if node.op_type == "Mul" else None
    write = _producer(_producer(node, "DequantizeLinear"), "TensorScatter")
    scaled = _producer(_producer(write, "QuantizeLinear", 1), "Mul")
    if write is None or scaled is None or factor is None or factor.const_value is None:
        return None
    past, rows = write.inputs[0], scaled.inputs[0]
    assert past is not None and rows is not None
    return _Write(past, write.outputs[0], rows, factor.const_value.numpy().reshape(-1))


def _producer(node: ir.Node | None, kind: str, index: int = 0) -> ir.Node | None:
    """The node that makes an input, where it is of a kind."""
    value = None if node is None else node.inputs[index]
    found = None if value is None else value.producer()
    return found if found is not None and found.op_type == kind else None


def _add_lengths(graph: ir.Graph) -> _Lengths:
    """`kv_len + T` and one less, int32, computed once."""
    inputs = {value.name: value for value in graph.inputs}
    shape = ir.node("Shape", [inputs["input_ids"]], attributes={"start": 1, "end": 2})
    total = ir.node("Add", [inputs["kv_len"], shape.outputs[0]])
    one = _initializer(graph, "lowered.one", np.array([1], np.int64))
    last = ir.node("Sub", [total.outputs[0], one])
    casts = [
        ir.node("Cast", [node.outputs[0]], attributes={"to": ir.DataType.INT32.value})
        for node in (last, total)
    ]
    first = next(iter(graph))
    graph.insert_before(first, [shape, total, last, *casts])
    return _Lengths(casts[0].outputs[0], casts[1].outputs[0])


def _stay(graph: ir.Graph, capacity: int) -> _Lengths:
    """The last row from `depth`, not from a shape, and the capacity for the total."""
    inputs = {value.name: value for value in graph.inputs}
    deepest = ir.node("ReduceMax", [inputs["depth"]])  # [1]
    last = ir.node("Add", [inputs["kv_len"], deepest.outputs[0]])
    cast = ir.node("Cast", [last.outputs[0]], attributes={"to": ir.DataType.INT32.value})
    graph.insert_before(next(iter(graph)), [deepest, last, cast])
    total = _initializer(graph, "lowered.total", np.array([capacity], np.int32))
    return _Lengths(cast.outputs[0], total)


def _initializer(graph: ir.Graph, name: str, content: np.ndarray) -> ir.Value:
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(content, name=name)
    value = ir.Value(name=name, shape=ir.Shape(content.shape), type=ir.TensorType(tensor.dtype))
    value.const_value = tensor
    graph.initializers[name] = value
    return value


def _replace(
    graph: ir.Graph,
    attention: ir.Node,
    key: _Write,
    value: _Write,
    lengths: _Lengths,
    window: int | None,
) -> None:
    query, past_key, past_value = attention.inputs[0], key.past, value.past
    assert query is not None and query.shape is not None and past_key.shape is not None
    heads, kv_heads = static_dim(query, 1), static_dim(past_key, 1)
    rows = [_flat(graph, attention, v) for v in (query, key.rows, value.rows)]
    attributes: dict[str, float | int | str] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": _number(attention, "scale"),
        "local_window_size": -1 if window is None else window,
        "do_rotary": 0,
    }
    inputs: list[ir.Value | None] = [*rows, past_key, past_value, lengths.last, lengths.total]
    if key.scale is not None and value.scale is not None:
        by_channel = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        attributes |= by_channel | {"kv_cache_bit_width": 8}
        scales = [
            _initializer(graph, f"lowered.{past.name}.scale", scale)
            for past, scale in ((past_key, key.scale), (past_value, value.scale))
        ]
        inputs += [None] * (_SCALES_AT - len(inputs))
        inputs += scales
    fused = ir.node("GroupQueryAttention", inputs, attributes, domain=CONTRIB, num_outputs=3)
    graph.insert_before(attention, fused)
    for old, new in ((key.present, fused.outputs[1]), (value.present, fused.outputs[2])):
        new.name, old.name = old.name, f"{old.name}.unlowered"
        new.shape, new.type = old.shape, old.type
        for position, output in enumerate(graph.outputs):
            if output is old:
                graph.outputs[position] = new
    _connect_output(graph, attention, fused.outputs[0], heads, static_dim(query, 3))


def _flat(graph: ir.Graph, before: ir.Node, value: ir.Value | None) -> ir.Value:
    """The `[1, T, H*D]` form of a `[1, H, T, D]` value, without a transpose where there was one."""
    assert value is not None and value.shape is not None
    producer = value.producer()
    heads = static_dim(value, 1)
    if producer is not None and producer.op_type == "RotaryEmbedding":
        flat = _flat(graph, before, producer.inputs[0])
        attributes = {name: attr.value for name, attr in producer.attributes.items()}
        attributes["num_heads"] = heads
        rotated = ir.node("RotaryEmbedding", [flat, *producer.inputs[1:]], attributes)
        graph.insert_before(before, rotated)
        return rotated.outputs[0]
    if producer is not None and producer.op_type == "Transpose":
        rows = producer.inputs[0]
        assert rows is not None
        if list(producer.attributes["perm"].value) == _HEADS_BEHIND_ROWS:
            return _merged_heads(graph, before, rows)
    swapped = ir.node("Transpose", [value], attributes={"perm": _HEADS_BEHIND_ROWS})
    graph.insert_before(before, swapped)
    return _merged_heads(graph, before, swapped.outputs[0])


def _merged_heads(graph: ir.Graph, before: ir.Node, rows: ir.Value) -> ir.Value:
    """`[1, T, H, D]` to `[1, T, H*D]`, undoing the reshape that made it if there is one."""
    producer = rows.producer()
    if producer is not None and producer.op_type == "Reshape":
        flat = producer.inputs[0]
        if flat is not None and flat.shape is not None and len(flat.shape) == 3:
            return flat
    merge = _initializer(graph, "lowered.merge_heads", np.array([0, 0, -1], np.int64))
    reshaped = ir.node("Reshape", [rows, merge])
    graph.insert_before(before, reshaped)
    return reshaped.outputs[0]


def _connect_output(
    graph: ir.Graph, attention: ir.Node, flat: ir.Value, heads: int, size: int
) -> None:
    """Feed `[1, T, H*D]` to what read the attention, skipping its transpose and reshape."""
    old = attention.outputs[0]
    merged = _only_reader(old, "Transpose")
    reshaped = _only_reader(merged.outputs[0], "Reshape") if merged is not None else None
    shape = None if reshaped is None else reshaped.outputs[0].shape
    if reshaped is not None and shape is not None and len(shape) == 3:
        flat.shape, flat.type = reshaped.outputs[0].shape, reshaped.outputs[0].type
        reshaped.outputs[0].replace_all_uses_with(flat)
        return
    split = _initializer(
        graph, f"lowered.split_heads_{heads}_{size}", np.array([0, 0, heads, size], np.int64)
    )
    rows = ir.node("Reshape", [flat, split])
    back = ir.node("Transpose", [rows.outputs[0]], attributes={"perm": _HEADS_BEHIND_ROWS})
    graph.insert_before(attention, [rows, back])
    old.replace_all_uses_with(back.outputs[0])


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    readers: Sequence[ir.Node] = tuple(value.consumers())
    return readers[0] if len(readers) == 1 and readers[0].op_type == op_type else None


def _sweep(model: ir.Model) -> None:
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(), common.TopologicalSortPass(), common.NameFixPass()
    )(model)


# --- sampling graphs ------------------------------------------------------------------------------


def lower_sampling(file: Path, pins: Mapping[str, int]) -> onnx.ModelProto:
    """A sampling graph with its symbols pinned, sums in doubles, and the oldest stamps.

    Sixty of them are made for a bundle, hence without a detour over another representation.
    """
    model = onnx.load(file)
    graph = model.graph
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in pins:
                dim.dim_value = pins[dim.dim_param]
    _sum_in_double(graph)
    for opset in model.opset_import:
        opset.version = _OLDEST_OPSET
    model.ir_version = min(model.ir_version, _OLDEST_IR)
    return model


def _sum_in_double(graph: onnx.GraphProto) -> None:
    """Add up whole numbers that are cast to int64 as doubles: `ReduceSum` is 8 times faster there.

    The sums of the sampling graphs stay below 2^51, so every partial sum is exact either way.
    """
    nodes, casts = [], {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    for node in graph.node:
        nodes.append(node)
        cast = casts.get(node.input[0]) if node.op_type == "ReduceSum" else None
        if cast is not None and cast.attribute[0].i == onnx.TensorProto.INT64:
            result, wide = node.output[0], f"{node.output[0]}.wide"
            to_double = onnx.helper.make_node(
                "Cast", [cast.input[0]], [wide], to=onnx.TensorProto.DOUBLE
            )
            nodes.insert(-1, to_double)
            node.input[0], node.output[0] = wide, f"{result}.double"
            nodes.append(
                onnx.helper.make_node("Cast", [node.output[0]], [result], to=onnx.TensorProto.INT64)
            )
    del graph.node[:]
    graph.node.extend(nodes)

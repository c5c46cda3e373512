"""Caches of 8 bits: what is written is rounded, what is read is scaled back, channel by channel.

    new -> Mul(1 / scale) -> QuantizeLinear -> TensorScatter -> DequantizeLinear -> Mul(scale)

A `QuantizeLinear` has scales along one axis, and a cache has channels along two (heads and their
dimensions), hence the products. onnxruntime's processor kernel does all of it inside attention (see
`lower`). TensorRT writes caches of floating types only, which is refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from spec_export.engines.errors import BuildError
from spec_export.engines.graph_edits import add_initializer, insert
from spec_export.engines.graphs import ModelSpec, TensorSpec
from spec_export.engines.weight_files import Pending

_LARGEST = 127
_INT8, _FLOAT = ir.DataType.INT8, ir.DataType.FLOAT
_SMALLEST_SCALE = 1e-8
_UNIT, _ZERO = "cache.unit", "cache.zero"


def quantize_caches(
    graph: ir.Graph, spec: ModelSpec, largest: Mapping[str, np.ndarray]
) -> tuple[dict[str, Pending], ModelSpec]:
    """Make every cache one of 8 bits, in place.

    Args:
        graph: of a float32 model.
        spec: its description.
        largest: magnitude of each channel, `[Hkv, D]`, by the cache's input.

    Returns:
        The weights to write, by initializer, and the new description.

    Raises:
        BuildError: the graph does not write its caches the way the export does.
    """
    add_initializer(graph, _UNIT, _FLOAT, ())
    add_initializer(graph, _ZERO, _INT8, ())
    pending = {_UNIT: Pending.of(np.float32(1)), _ZERO: Pending.of(np.int8(0))}
    inputs = {value.name: value for value in graph.inputs}
    for state in spec.states:
        past = inputs[state.input]
        writes = [node for node in past.consumers() if node.op_type == "TensorScatter"]
        if len(writes) != 1 or state.kind != "self":
            raise BuildError(f"--kv int8: the cache {state.input} is not one of attention")
        scale = np.maximum(largest[state.input] / _LARGEST, _SMALLEST_SCALE).astype(np.float32)
        pending |= _quantize(graph, past, writes[0], scale)
    return pending, _described(spec)


def _quantize(
    graph: ir.Graph, past: ir.Value, write: ir.Node, scale: np.ndarray
) -> dict[str, Pending]:
    shaped = scale[None, :, None, :]  # [1, Hkv, 1, D]
    names = f"{past.name}.scale", f"{past.name}.inverse"
    made = {names[0]: Pending.of(shaped), names[1]: Pending.of(1 / shaped)}
    factor, inverse = (add_initializer(graph, n, _FLOAT, shaped.shape) for n in names)
    unit, zero = graph.initializers[_UNIT], graph.initializers[_ZERO]
    rows, present = write.inputs[1], write.outputs[0]
    assert rows is not None
    scaled = insert(graph, write, "Mul", [rows, inverse], _FLOAT, rows.shape)
    rounded = insert(graph, write, "QuantizeLinear", [scaled, unit, zero], _INT8, rows.shape)
    write.replace_input_with(1, rounded)
    readers = [(use.node, use.idx) for use in present.uses()]
    past.dtype = present.dtype = _INT8
    first = next(node for node in graph if any(node is reader for reader, _ in readers))
    whole = insert(graph, first, "DequantizeLinear", [present, unit, zero], _FLOAT, present.shape)
    read = insert(graph, first, "Mul", [whole, factor], _FLOAT, present.shape)
    for reader, index in readers:
        reader.replace_input_with(index, read)
    return made


def _described(spec: ModelSpec) -> ModelSpec:
    named = {name for state in spec.states for name in (state.input, state.output)}

    def tensor(found: TensorSpec) -> TensorSpec:
        return replace(found, dtype="int8") if found.name in named else found

    return replace(
        spec,
        inputs=tuple(map(tensor, spec.inputs)),
        outputs=tuple(map(tensor, spec.outputs)),
        states=tuple(replace(state, dtype="int8") for state in spec.states),
    )

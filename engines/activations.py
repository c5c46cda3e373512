"""Round what matrices are multiplied by, with scales fixed before anything runs.

One scale for a value, from calibration texts: a row is rounded the same whatever the other rows of
a verify pass hold. A scale taken from the pass itself (`DynamicQuantizeLinear`) would make an
accepted row depend on refused ones, and speculative decoding would not follow the target's law any
more; `check_rounding` refuses such graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from spec_export.engines.errors import BuildError
from spec_export.engines.graph_edits import add_initializer, insert
from spec_export.engines.graphs import Calibrator
from spec_export.engines.products import Product, by_source
from spec_export.engines.ranges import largest_magnitude
from spec_export.engines.weight_files import Pending

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_KINDS = {"int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}
_FLOAT = ir.DataType.FLOAT
_SMALLEST_SCALE = 1e-8
_BY_PASS = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})


def quantize_activations(
    graph: ir.Graph,
    found: Sequence[Product],
    kind: Literal["int8", "fp8"],
    inputs: Mapping[str, np.ndarray],
    calibrator: Calibrator = "minmax",
) -> dict[str, Pending]:
    """Round every value that a matrix of a layer is multiplied by, in place.

    Args:
        graph: of a float32 model.
        found: products by these matrices.
        kind: 8 bits, whole or floating (E4M3).
        inputs: samples of those values, `[rows, K]` float32, by name.
        calibrator: what decides how far a scale reaches.

    Returns:
        The weights to write, by initializer.

    Raises:
        BuildError: a value has no sample.
    """
    small = _KINDS[kind]
    zero = add_initializer(graph, "activations.zero", small, ())
    pending = {"activations.zero": Pending.of(np.zeros((), small.numpy()))}
    for name, group in by_source(found).items():
        if name not in inputs:
            raise BuildError(f"--activations {kind}: there is no sample of {name}")
        largest = largest_magnitude(inputs[name], calibrator)
        scale = np.float32(max(largest / _LARGEST[kind], _SMALLEST_SCALE))
        step = add_initializer(graph, f"{name}.step", _FLOAT, ())
        pending[f"{name}.step"] = Pending.of(scale)
        source, first = group[0].source, group[0].node
        rounded = insert(graph, first, "QuantizeLinear", [source, step, zero], small, source.shape)
        read = insert(
            graph,
            first,
            "DequantizeLinear",
            [rounded, step, zero],
            _FLOAT,
            source.shape,
            name=f"{name}.rounded",
        )
        for product in group:
            product.node.replace_input_with(0, read)
    return pending


def check_rounding(graph: ir.Graph) -> None:
    """Refuse a graph that takes the scale of a value from the pass it is in.

    Raises:
        BuildError: names the node.
    """
    for node in graph.all_nodes():
        if node.op_type in _BY_PASS or _has_own_scale(node):
            raise BuildError(
                f"{node.name or node.outputs[0].name} ({node.op_type}) rounds the rows of a pass "
                "by a scale taken from them: an accepted token would depend on refused drafts. "
                "Export the model again with scales that are fixed, or in float32, for "
                "`spec-export quantize`"
            )


def _has_own_scale(node: ir.Node) -> bool:
    """Whether a `QuantizeLinear` is given a scale that is computed."""
    scale = node.inputs[1] if node.op_type == "QuantizeLinear" else None
    if scale is None or scale.is_initializer():
        return False
    producer = scale.producer()
    return producer is None or producer.op_type != "Constant"

"""Activation-aware scales: give the rows of a matrix that large inputs meet more of its numbers.

Row k of every matrix that reads a value is multiplied by `scales[k]`, and the value divided by it,
which changes nothing before the matrices are rounded and much after. Source: AWQ (Lin et al.,
arXiv 2306.00978, section 3.2), where `scales = mean|x| ** alpha` and alpha is searched for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from spec_export.engines.graph_edits import add_initializer, insert
from spec_export.engines.products import Product, by_source
from spec_export.engines.rounding import Grid, round_matrix
from spec_export.engines.weight_files import Pending

_FLOAT = ir.DataType.FLOAT
_EXPONENTS = tuple(i / 10 for i in range(10))
_MOST_ROWS = 512  # of the samples, to compare on
_SMALLEST_INPUT = 1e-4  # of the mean size of an input, lest a silent one has a scale of 0


def input_scales(weights: Sequence[np.ndarray], grid: Grid, inputs: np.ndarray) -> np.ndarray:
    """The scales with which the products of rounded matrices come nearest to the exact ones.

    Args:
        weights: `[K, N]` float32 each, all of which read the same value.
        grid: they are rounded to, to nearest.
        inputs: `[rows, K]` float32, samples of that value.

    Returns:
        `[K]` float32, above zero; all 1 where nothing is gained.
    """
    seen = inputs[:: max(1, len(inputs) // _MOST_ROWS)][:_MOST_ROWS]
    sizes = np.abs(inputs).mean(axis=0, dtype=np.float64)
    floor = max(float(sizes.mean()) * _SMALLEST_INPUT, np.finfo(np.float32).tiny)
    sizes = np.maximum(sizes, floor)
    tried = [_normalized(sizes**exponent) for exponent in _EXPONENTS]
    errors = [sum(_error(weight, grid, seen, scales) for weight in weights) for scales in tried]
    return tried[int(np.argmin(errors))]


def _normalized(scales: np.ndarray) -> np.ndarray:
    """Around 1, so that neither the value nor the matrices leave their range."""
    centred = scales / np.sqrt(scales.max() * scales.min())
    return np.asarray(centred, np.float32)


def _error(weight: np.ndarray, grid: Grid, inputs: np.ndarray, scales: np.ndarray) -> float:
    rounded = round_matrix("rtn", weight * scales[:, None], grid).values() / scales[:, None]
    return float(np.square(inputs @ (rounded - weight)).sum(dtype=np.float64))


def divide(
    graph: ir.Graph,
    found: Sequence[Product],
    scales: Mapping[str, np.ndarray],
    originals: Mapping[str, ir.TensorProtocol],
) -> dict[str, Pending]:
    """Divide every scaled value: inside the norm that makes it, or else by a product.

    Args:
        graph: changed in place.
        found: products by scaled matrices.
        scales: by the name of the value.
        originals: values of the graph's initializers.

    Returns:
        The weights to write, by initializer.
    """
    readers = by_source(found)
    made: dict[str, Pending] = {}
    for name, factor in scales.items():
        group, inverse = readers[name], np.asarray(1 / factor, np.float32)
        norm = _norm_weight(group, originals)
        if norm is not None:
            made[norm] = Pending.of(originals[norm].numpy().astype(np.float32) * inverse)
            continue
        made[f"{name}.inverse"] = Pending.of(inverse)
        _multiply(graph, group, add_initializer(graph, f"{name}.inverse", _FLOAT, inverse.shape))
    return made


def _norm_weight(
    group: Sequence[Product], originals: Mapping[str, ir.TensorProtocol]
) -> str | None:
    """The weight of the norm whose result nothing but the group reads."""
    source = group[0].source
    norm = source.producer()
    if norm is None or norm.op_type != "RMSNormalization":
        return None
    weight = norm.inputs[1]
    if weight is None or weight.name not in originals or len(weight.consumers()) != 1:
        return None
    is_alone = set(source.consumers()) == {product.node for product in group}
    return weight.name if is_alone else None


def _multiply(graph: ir.Graph, group: Sequence[Product], factor: ir.Value) -> None:
    source, name = group[0].source, f"{group[0].source.name}.divided"
    result = insert(graph, group[0].node, "Mul", [source, factor], _FLOAT, source.shape, name=name)
    for product in group:
        product.node.replace_input_with(0, result)

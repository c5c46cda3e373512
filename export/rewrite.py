"""Turn a freshly traced graph into the portable form that `graphs.json` describes.

Every pass takes and returns an `onnx_ir` model with opset 24 standard operators only. While they
run, weights are graph inputs, so that no pass can look at a value that is not there yet; the
constants the tracer made (rope frequencies, shapes) are real and are folded.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
import onnxscript.rewriter
from onnxscript.rewriter.rules.fusion import _rms_normalization, _rotary_embedding

from spec_export.engines.errors import ExportError

STANDARD_DOMAINS = frozenset({"", "ai.onnx"})


@dataclass(frozen=True)
class PortableGraph:
    """A rewritten graph and what to fill into it.

    Attributes:
        model: the graph; weights are initializers without a value.
        weights: name of every parameter the graph reads, and whether it is stored transposed.
    """

    model: ir.Model
    weights: dict[str, bool]


def make_portable(model: ir.Model, layers: int, parameters: dict[str, str]) -> PortableGraph:
    """Rename, fold, fuse and clean a traced graph.

    Args:
        model: as traced; weights are initializers called `model.<parameter name>`.
        layers: number of decoder layers, each with a key and a value cache.
        parameters: every parameter name to the one its value is read under (tied ones share it).
    """
    graph = model.graph
    _name_interface(graph, layers)
    held = _hold_back_weights(graph, parameters)
    onnxscript.optimizer.optimize_ir(model, onnx_shape_inference=True)
    rules = [*_rms_normalization.rms_normalization_rules, *_rotary_embedding.rotary_embedding_rules]
    onnxscript.rewriter.rewrite(model, pattern_rewrite_rules=rules)
    _normalize_in_scale_type(graph)
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
    )(model)
    weights = _store_transposed(graph, held)
    _restore_weights(graph, weights)
    common.TopologicalSortPass()(model)
    _check_standard(model)
    return PortableGraph(model, weights)


def _name_interface(graph: ir.Graph, layers: int) -> None:
    """Give inputs, outputs and symbolic dimensions the names of `graphs.json`."""
    names = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    fixed = ["input_ids", "kv_len", "depth", "tree_mask", "logit_rows"]
    assert len(graph.inputs) == len(fixed) + len(names), [i.name for i in graph.inputs]
    caches = graph.inputs[len(fixed) :]
    symbols = {
        str(_dim(graph.inputs[0], 1)): "T",
        str(_dim(graph.inputs[4], 0)): "R",
        str(_dim(caches[0], 2)): "C",
    }
    for value, name in zip(graph.inputs, fixed, strict=False):
        value.name = name
    for value, name in zip(caches, names, strict=True):
        value.name = f"past_key_values.{name}"
    for value, name in zip(
        graph.outputs, ["logits", *(f"present.{n}" for n in names)], strict=True
    ):
        value.name = name
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(d, symbols) for d in value.shape])


def _dim(value: ir.Value, axis: int) -> int | ir.SymbolicDim:
    assert value.shape is not None
    return value.shape[axis]


def _renamed(dim: int | ir.SymbolicDim, symbols: dict[str, str]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    return symbols.get(str(dim), dim.value)


def _values(graph: ir.Graph) -> list[ir.Value]:
    outputs = [output for node in graph for output in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *outputs]


def _hold_back_weights(graph: ir.Graph, parameters: dict[str, str]) -> set[str]:
    """Make every weight a graph input called by the name its value is read under."""
    held: set[str] = set()
    for name, value in list(graph.initializers.items()):
        parameter = parameters.get(name.removeprefix("model."))
        if parameter is None:
            continue
        assert parameter not in held, f"{parameter} is an initializer twice"
        del graph.initializers[name]
        value.const_value = None
        value.name = parameter
        graph.inputs.append(value)
        held.add(parameter)
    return held


def _normalize_in_scale_type(graph: ir.Graph) -> None:
    """Cast the input of `RMSNormalization` to the type of its scale where they differ.

    ONNX allows two types (Gemma normalises half-precision rows with a float32 scale); engines have
    kernels for one.
    """
    for node in list(graph):
        if node.op_type != "RMSNormalization":
            continue
        rows, scale = node.inputs[0], node.inputs[1]
        assert rows is not None and scale is not None
        if rows.dtype == scale.dtype or scale.dtype is None:
            continue
        cast = ir.node("Cast", [rows], attributes={"to": scale.dtype.value})
        cast.outputs[0].dtype, cast.outputs[0].shape = scale.dtype, rows.shape
        graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])


def _store_transposed(graph: ir.Graph, held: set[str]) -> dict[str, bool]:
    """Drop `Transpose` of a weight where nothing else reads that weight."""
    weights = {value.name: False for value in graph.inputs if value.name in held}
    for value in list(graph.inputs):
        if value.name not in held or value.shape is None or len(value.shape) != 2:
            continue
        readers = value.consumers()
        if not readers or any(node.op_type != "Transpose" for node in readers):
            continue
        value.shape = ir.Shape(list(reversed(list(value.shape))))
        for node in readers:
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)
        assert value.name is not None
        weights[value.name] = True
    return weights


def _restore_weights(graph: ir.Graph, weights: dict[str, bool]) -> None:
    for value in [v for v in graph.inputs if v.name in weights]:
        graph.inputs.remove(value)
        assert value.name is not None
        if value.consumers():
            graph.initializers[value.name] = value
        else:
            del weights[value.name]


def _check_standard(model: ir.Model) -> None:
    foreign = sorted({node.domain for node in model.graph if node.domain not in STANDARD_DOMAINS})
    if foreign or model.functions:
        raise ExportError(f"the traced graph uses operators outside ONNX: {', '.join(foreign)}")

"""Scaling a value and its matrices against one another changes nothing before they are rounded.

Held on the tiny draft with its matrices left in float32: inside norms, and by products of their own
where no norm makes the value (attention and the gated product).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from spec_export.engines import awq
from spec_export.engines.build import read_exported
from spec_export.engines.passes import whole_pass
from spec_export.engines.products import products
from spec_export.engines.weight_files import Pending, write_model

TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 1031, 40)]


def logits(graph: Path, spec) -> np.ndarray:
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    given = whole_pass(spec, TEXT) | {"logit_rows": np.arange(len(TEXT))}
    return session.run(["logits"], given)[0]


@pytest.fixture(scope="module")
def draft(tiny_pair_exported):
    """Graph and description of the tiny draft."""
    spec = read_exported(tiny_pair_exported).models["draft"]
    return tiny_pair_exported / spec.file, spec


def scaled(draft, out: Path, *, divided: bool) -> ir.Model:
    """The draft with scales in its matrices and, unless left out, in their inputs."""
    graph, _ = draft
    model, rng = ir.load(graph), np.random.default_rng(1)
    originals = {n: v.const_value for n, v in model.graph.initializers.items() if v.const_value}
    found = products(model.graph, head=False)
    shapes = {str(product.source.name): product.shape[0] for product in found}
    scales = {n: rng.uniform(0.5, 2, size).astype(np.float32) for n, size in shapes.items()}
    pending = {}
    for product in found:
        name, factor = str(product.weight.name), scales[str(product.source.name)]
        content = originals[name].numpy() * factor[:, None]
        pending[name] = Pending(ir.DataType.FLOAT, content.shape, lambda c=content: iter((c,)))
    if divided:
        pending |= awq.divide(model.graph, found, scales, originals)
    write_model(model, pending, out)
    return ir.load(out)


def test_the_model_computes_what_it_did(draft, tmp_path):
    """To float32: a handful of roundings of 2^-24 of numbers near the largest."""
    graph, spec = draft
    model = scaled(draft, tmp_path / "model.onnx", divided=True)
    expected, found = logits(graph, spec), logits(tmp_path / "model.onnx", spec)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    # q, k, v and gate, up read a norm; o and down read what no norm makes: once a layer each.
    factors = [name for name in model.graph.initializers if name.endswith(".inverse")]
    assert len(factors) == 2 * spec.layers
    multiplied = [n for n in model.graph if n.op_type == "Mul" and n.inputs[1].name in factors]
    assert len(multiplied) == len(factors)


def test_matrices_alone_would_compute_something_else(draft, tmp_path):
    """Negative control: the comparison above sees the scales."""
    graph, spec = draft
    scaled(draft, tmp_path / "model.onnx", divided=False)
    expected, found = logits(graph, spec), logits(tmp_path / "model.onnx", spec)
    assert np.abs(found - expected).max() > 1e-2 * np.abs(expected).max()


def test_a_norm_that_others_read_too_keeps_its_weight(draft, tmp_path):
    """Then the value is divided by a product, and the other reader gets what it got."""
    graph, _ = draft
    model = ir.load(graph)
    originals = {n: v.const_value for n, v in model.graph.initializers.items() if v.const_value}
    found = products(model.graph, head=False)
    group = [product for product in found if product.source is found[0].source]
    source = found[0].source
    assert source.producer().op_type == "RMSNormalization" and source.producer() is not None
    left_out, kept = group[0], group[1:]
    scales = {str(source.name): np.full(left_out.shape[0], 2, np.float32)}
    made = awq.divide(model.graph, kept, scales, originals)
    assert list(made) == [f"{source.name}.inverse"]
    assert left_out.node.inputs[0] is source
    assert all(product.node.inputs[0] is not source for product in kept)

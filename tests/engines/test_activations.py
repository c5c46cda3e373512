"""No scale is taken from a pass: an accepted row would depend on the refused rows after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from spec_export.engines import ort as backend
from spec_export.engines.activations import check_rounding
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.errors import BuildError
from tests.exported import redescribe

ROWS, K, N, BLOCK = 5, 64, 48, 32


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(0).integers(-100, 100, (K, N)).astype(np.int8)


def session(nodes, weights, opset=21, options=None) -> ort.InferenceSession:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "T", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "T", N])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def per_tensor(weight: np.ndarray, fused: bool) -> ort.InferenceSession:
    """onnxruntime's dynamic quantization: one scale for all rows of a pass."""
    weights = {"w": weight, "step": np.float32([0.01]), "zero": np.int8([0])}
    if fused:
        made = [
            helper.make_node(
                "DynamicQuantizeMatMul", ["x", "w", "step", "zero"], ["y"], domain="com.microsoft"
            )
        ]
        return session(made, weights)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "zero"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["wide", "s"], ["scaled"]),
        helper.make_node("Mul", ["scaled", "step"], ["y"]),
    ]
    return session(nodes, weights)


def by_row(weight: np.ndarray, accuracy: str) -> ort.InferenceSession:
    """What this project writes, opened with the option it opens it with."""
    steps = np.full((K // BLOCK, N), 0.01, np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "step"], ["read"], axis=0, block_size=BLOCK),
        helper.make_node("MatMul", ["x", "read"], ["y"]),
    ]
    options = ort.SessionOptions()
    options.add_session_config_entry(backend._ACCURACY, accuracy)
    return session(nodes, {"w": weight, "step": steps}, options=options)


def first_row(opened: ort.InferenceSession, later: float) -> bytes:
    """The first row of a product whose last row is `later` times as large."""
    x = np.random.default_rng(1).normal(size=(1, ROWS, K)).astype(np.float32)
    x[0, -1] *= later
    return opened.run(None, {"x": x})[0][0, 0].tobytes()


@pytest.mark.parametrize("fused", [False, True])
def test_by_one_scale_for_a_pass_a_refused_row_changes_an_accepted_one(weight, fused):
    """Why it is banned: the operators themselves, in onnxruntime."""
    opened = per_tensor(weight, fused)
    assert first_row(opened, 1) == first_row(opened, 1)
    assert first_row(opened, 1) != first_row(opened, 30)


def test_row_by_row_a_later_row_changes_nothing(weight):
    """And it is in 8 bits: the same graph in float32 has other bits."""
    small, exact = by_row(weight, backend._IN_INT8), by_row(weight, backend._IN_FLOAT)
    assert first_row(small, 1) == first_row(small, 30) == first_row(small, 1e6)
    assert first_row(small, 1) != first_row(exact, 1)


# --- refused -------------------------------------------------------------------------------------


def rounded_by_pass(model: ir.Model, kind: str) -> None:
    """Put a rounding by the scale of a pass in front of the first product."""
    graph = model.graph
    product = next(node for node in graph if node.op_type == "MatMul")
    source = product.inputs[0]
    assert source is not None
    taken = ir.node("DynamicQuantizeLinear", [source], num_outputs=3)
    numbers, scale, zero = taken.outputs
    nodes = [taken]
    if kind == "QuantizeLinear":
        again = ir.node("QuantizeLinear", [source, scale, zero], name="again")
        nodes.append(again)
        numbers = again.outputs[0]
    read = ir.node("DequantizeLinear", [numbers, scale, zero])
    graph.insert_before(product, [*nodes, read])
    product.replace_input_with(0, read.outputs[0])


@pytest.fixture
def by_pass(tiny_exported, tmp_path) -> Path:
    """The tiny target with such a rounding, described as if it was exported so."""
    exported = shutil.copytree(tiny_exported("none"), tmp_path / "exported")
    file = exported / "target" / "model.onnx"
    model = ir.load(file)
    rounded_by_pass(model, "DynamicQuantizeLinear")
    ir.save(model, file)
    redescribe(exported)
    return exported


def test_a_build_refuses_a_graph_that_takes_scales_from_a_pass(by_pass, tmp_path):
    out, options = tmp_path / "bundle", BuildOptions(gamma=2, max_len=64, chunk=16)
    with pytest.raises(BuildError, match="DynamicQuantizeLinear") as caught:
        build_bundle(by_pass, out, backend.OrtBackend(), options)
    for word in ("an accepted token would depend on refused drafts", "scales that are fixed"):
        assert word in str(caught.value)
    assert not out.exists()


def test_so_does_tensorrt(by_pass, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is for x86-64 Linux")
    from spec_export.engines.trt import TrtBackend

    out, options = tmp_path / "bundle", BuildOptions(gamma=2, max_len=64, chunk=16)
    with pytest.raises(BuildError, match=r"DynamicQuantizeLinear.*refused drafts"):
        build_bundle(by_pass, out, TrtBackend("tensorrt-rtx"), options)
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("s = ReduceMax<keepdims = 0> (x) q = QuantizeLinear (x, s)", "QuantizeLinear"),
        ("q, s, z = DynamicQuantizeLinear (x)", "DynamicQuantizeLinear"),
        ("q = QuantizeLinear (x, given)", "QuantizeLinear"),
        ("q = QuantizeLinear (x, fixed)", None),
        ("s = Constant<value_float = 0.5> () q = QuantizeLinear (x, s)", None),
        (
            "q = If (is) <then_branch = then () => (uint8[T] a) {a = QuantizeLinear (x, given)}, "
            "else_branch = other () => (uint8[T] b) {b = QuantizeLinear (x, fixed)}>",
            "QuantizeLinear",
        ),
    ],
)
def test_scales_have_to_be_constants_wherever_they_stand(text, named):
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[T] x, float given, bool is) => (uint8[T] q) <float fixed = {{0.5}}> {{ {text} }}
        """
    )
    graph = ir.from_proto(model).graph
    if named is None:
        check_rounding(graph)
        return
    with pytest.raises(BuildError, match=named):
        check_rounding(graph)

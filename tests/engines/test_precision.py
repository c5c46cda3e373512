"""A float32 export in half precision and with small weights computes what it did, nearly.

Tolerances are of the largest logit or cache entry. Half precision rounds every activation to
2^-11 (float16) or 2^-8 (bfloat16); over four layers with a handful of roundings each the errors
add up to a few of those. int8 rounds weights to 2^-8 of a column's largest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from spec_export.engines.build import BuildOptions, build_bundle, read_exported
from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import QuantizationSpec
from spec_export.engines.ort import OrtBackend
from spec_export.engines.prepare import retype_exported
from spec_export.engines.retype import retype
from spec_export.engines.weight_blocks import quantize_weights
from spec_export.engines.weight_files import write_model
from tests.precisions import derive

ROWS, CAPACITY = 9, 64


@pytest.fixture(scope="module")
def prepared(tiny_pair_exported, tmp_path_factory):
    made: dict[tuple[str, str | None], Path] = {}

    def prepare(dtype: str, weights: str | None = None) -> Path:
        if (dtype, weights) not in made:
            out = tmp_path_factory.mktemp("prepared")
            made[dtype, weights] = derive(tiny_pair_exported, out, dtype, weights=weights)  # type: ignore[arg-type]
        return made[dtype, weights]

    return prepare


def outputs(graph: Path, dtype: np.dtype) -> list[np.ndarray]:
    """Logits and caches of one pass over an empty cache, as float32, in onnxruntime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    made = session.run(None, feeds(graph, dtype))
    return [np.asarray(array, np.float32) for array in made]


def feeds(graph: Path, dtype: np.dtype) -> dict[str, np.ndarray]:
    inputs = onnx.load(str(graph), load_external_data=False).graph.input
    given = {
        "input_ids": np.random.default_rng(0).integers(0, 1031, (1, ROWS)),
        "kv_len": np.zeros(1, np.int64),
        "depth": np.arange(ROWS),
        "tree_mask": np.tril(np.ones((ROWS, ROWS), bool)),
        "logit_rows": np.arange(ROWS),
    }
    for value in inputs:
        if value.name.startswith("past"):
            dims = [d.dim_value or CAPACITY for d in value.type.tensor_type.shape.dim]
            given[value.name] = np.zeros(dims, dtype)
    return given


def worst(mine: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Largest difference, of the largest value of the output it is in."""
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(mine, other, strict=True)
    )


@pytest.mark.parametrize("model", ["target", "draft"])
def test_float16_computes_what_float32_does(prepared, tiny_pair_exported, model):
    exact = outputs(tiny_pair_exported / model / "model.onnx", np.dtype(np.float32))
    half = outputs(prepared("float16") / model / "model.onnx", np.dtype(np.float16))
    assert 0 < worst(half, exact) < 8 * 2**-11


def test_bfloat16_computes_what_float32_does(prepared, tiny_pair_exported):
    """onnxruntime has no such kernels on a CPU; ONNX's own evaluator does."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from onnx.reference import ReferenceEvaluator

    graph = prepared("bfloat16") / "draft" / "model.onnx"
    dtype = np.dtype(ml_dtypes.bfloat16)
    made = ReferenceEvaluator(str(graph)).run(None, feeds(graph, dtype))
    half = [np.asarray(array).astype(np.float32) for array in made]
    exact = outputs(tiny_pair_exported / "draft" / "model.onnx", np.dtype(np.float32))
    assert 0 < worst(half, exact) < 8 * 2**-8


def test_what_would_lose_more_stays_float32(prepared):
    model = ir.load(prepared("float16") / "target" / "model.onnx")
    trigonometry = [node for node in model.graph if node.op_type in ("Sin", "Cos")]
    assert len(trigonometry) == 2
    for node in trigonometry:
        angle = node.inputs[0]
        assert angle is not None and angle.dtype == ir.DataType.FLOAT
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    assert norms and all(node.attributes["stash_type"].value == 1 for node in norms)


def test_sums_that_are_spelled_out_stay_float32():
    """Squares of float16 leave its range at 256."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 11, opset_import: ["" : 23]>
        spelled (float[1, T, 8] past) => (float[1, T, 8] normed)
        <float[8] scale = {1, 1, 1, 1, 1, 1, 1, 1}, float epsilon = {0.00001}, int64[1] last = {2}>
        {
            square = Mul (past, past)
            mean = ReduceMean (square, last)
            biased = Add (mean, epsilon)
            root = Sqrt (biased)
            inverse = Reciprocal (root)
            small = Mul (past, inverse)
            normed = Mul (small, scale)
        }
        """
    )
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    pending = retype(graph, "float16")
    types = {node.op_type: node.outputs[0].dtype for node in graph.graph}
    assert types["ReduceMean"] == types["Sqrt"] == types["Reciprocal"] == ir.DataType.FLOAT
    assert graph.graph.outputs[0].dtype == ir.DataType.FLOAT16
    assert list(pending) == ["scale.half"]


def test_a_weight_beyond_float16_is_named(tiny_pair_exported, tmp_path):
    model = ir.load(tiny_pair_exported / "draft" / "model.onnx")
    name = "model.layers.0.mlp.up_proj.weight"
    value = model.graph.initializers[name]
    assert value.const_value is not None
    huge = value.const_value.numpy().copy()
    huge[3, 3] = 1e6
    value.const_value = ir.tensor(huge, name=name)
    with pytest.raises(BuildError, match=rf"{name} overflows float16.*--dtype bfloat16"):
        write_model(model, retype(model, "float16"), tmp_path / "model.onnx")


def test_only_float32_is_retyped(prepared, tmp_path):
    with pytest.raises(BuildError, match="exported as float16, and only float32 is retyped"):
        retype_exported(prepared("float16"), tmp_path, "bfloat16")


def test_the_description_follows(prepared, tiny_pair_exported):
    before, after = read_exported(tiny_pair_exported), read_exported(prepared("float16"))
    for name, spec in after.models.items():
        assert spec.dtype == "float16" and {s.dtype for s in spec.states} == {"float16"}
        assert {t.name: t.dtype for t in spec.outputs}["logits"] == "float32"
        assert spec.parameters_bytes < before.models[name].parameters_bytes * 0.51


def test_weights_start_at_pages_and_lie_beside_their_graph(prepared):
    model = ir.load(prepared("float16") / "target" / "model.onnx")
    external = [
        value.const_value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    assert len(external) > 20
    assert {tensor.location for tensor in external} == {"model.onnx.data"}
    assert all((tensor.offset or 0) % 4096 == 0 for tensor in external)


# --- small weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "allowed"),
    # Of the largest logit: half a step of 1/127, 1/7 and 2^-4, over 14 products.
    [("int8", 0.02), ("int4", 0.3), ("fp8", 0.1)],
)
def test_onnxruntime_reads_the_same_graph(tiny_pair_exported, tmp_path, weights, allowed):
    exact = outputs(tiny_pair_exported / "draft" / "model.onnx", np.dtype(np.float32))
    quantized_draft(tiny_pair_exported, weights, tmp_path / "model.onnx")
    found = outputs(tmp_path / "model.onnx", np.dtype(np.float32))
    assert 0 < worst(found[:1], exact[:1]) < allowed


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_rounded_activations_are_near_what_they_were(tiny_pair_exported, tmp_path, weights):
    """By fixed scales, in onnxruntime: 8 bits of the largest sample, over 14 products."""
    asked = {"draft_weights": weights, "activations": weights}
    derived = derive(tiny_pair_exported, tmp_path, **asked)
    exact = outputs(tiny_pair_exported / "draft" / "model.onnx", np.dtype(np.float32))
    found = outputs(derived / "draft" / "model.onnx", np.dtype(np.float32))
    assert 0 < worst(found[:1], exact[:1]) < 0.1


def quantized_draft(exported: Path, weights: str, out: Path) -> ir.Model:
    """The draft's graph with small weights in `out`; int4 has no blocks for the target's rows."""
    model = ir.load(exported / "draft" / "model.onnx")
    originals = {n: v.const_value for n, v in model.graph.initializers.items() if v.const_value}
    wanted = QuantizationSpec(weights, block=128 if weights == "int4" else 0)  # type: ignore[arg-type]
    write_model(model, quantize_weights(model, originals, wanted), out)
    return ir.load(out)


def test_the_head_and_the_embedding_are_not_quantized(prepared):
    model = ir.load(prepared("float16", "int8") / "target" / "model.onnx")
    kinds = {
        name: value.dtype.name for name, value in model.graph.initializers.items() if value.dtype
    }
    assert kinds["model.embed_tokens.weight"] == "FLOAT16"
    quantized = [name for name, kind in kinds.items() if kind == "INT8"]
    assert len(quantized) == 7 * 4  # q, k, v, o, gate, up, down of four layers


@pytest.mark.parametrize(
    ("weights", "part", "block", "largest"),
    [("int8", "up", 64, 128), ("int4", "up", 64, 8), ("int4", "down", 128, 8)],
)
def test_a_block_is_rounded_to_its_own_scale(
    tiny_pair_exported, tmp_path, weights, part, block, largest
):
    """Every weight is within half a step of what it was; int8's block is the whole column.

    A scale is 2 / 15 or 2 / 255 of the largest, so that all numbers are used: -8 to 7, -128 to 127.
    """
    name = f"model.layers.0.mlp.{part}_proj.weight"
    original = ir.load(tiny_pair_exported / "draft" / "model.onnx").graph.initializers[name]
    assert original.const_value is not None
    exact = original.const_value.numpy()
    made = quantized_draft(tiny_pair_exported, weights, tmp_path / "model.onnx").graph.initializers
    numbers, scales = (made[f"{name}.{weights}{part}"].const_value for part in ("", ".scale"))
    assert numbers is not None and scales is not None
    found = numbers.numpy().astype(np.float32)
    steps = np.repeat(scales.numpy().reshape(-1, exact.shape[1]), block, axis=0)
    assert (np.abs(found * steps - exact) <= steps * 0.5001).all()
    assert np.abs(found).max() == largest


def test_int4_has_blocks_of_128_and_of_64_where_128_do_not_divide(tiny_pair_exported, tmp_path):
    """Those TensorRT takes; it refuses 32. The draft has matrices of 64, 128 and 256 rows."""
    model = quantized_draft(tiny_pair_exported, "int4", tmp_path / "model.onnx")
    blocks = {}
    for node in model.graph:
        if node.op_type == "DequantizeLinear":
            matrix = node.inputs[0]
            assert matrix is not None and matrix.shape is not None
            blocks[int(matrix.shape.numpy()[0])] = node.attributes["block_size"].value
    assert blocks == {64: 64, 256: 128}


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_int8_and_fp8_have_a_scale_for_each_column(tiny_pair_exported, tmp_path, weights):
    """TensorRT takes blocks for int4 alone."""
    model = quantized_draft(tiny_pair_exported, weights, tmp_path / "model.onnx")
    reads = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert reads
    for node in reads:
        assert "block_size" not in node.attributes and node.attributes["axis"].value == 1


def test_rows_that_blocks_do_not_divide_are_refused(tiny_pair_exported, tmp_path):
    """The target has 160 rows, which are five times 32."""
    with pytest.raises(BuildError, match=r"160 rows.*blocks of 64 do not divide.*--weights int8"):
        derive(tiny_pair_exported, tmp_path, weights="int4", quantizer="rtn")


def test_a_half_precision_directory_builds_for_the_cpu_too(prepared, tmp_path):
    """The derived directory is an exported directory like any other."""
    options = BuildOptions(gamma=2, max_len=64, chunk=16)
    built = build_bundle(prepared("float16"), tmp_path / "bundle", OrtBackend(), options)
    assert built.manifest.models["target"].dtype == "float16"
    assert built.manifest.exactness.kind != "unprobed"

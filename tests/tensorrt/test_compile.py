"""Every graph of a bundle becomes a TensorRT engine, by way of the product's own backend.

tensorrt_rtx parses and builds without a GPU. What the parser made of the graphs is looked at as
well: its own operators for a cache and for attention, one layer of ours to one of theirs, so that
nothing fell back to a decomposition that would copy caches or spell attention out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from spec_export.engines.backend import Compiled
from spec_export.engines.build import BuildOptions, build_bundle, pinned_models, read_exported
from spec_export.engines.bundle import Bundle
from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import ModelSpec
from spec_export.engines.sampling_names import needed_sampling
from spec_export.engines.trt import TrtBackend
from spec_export.engines.trt_build import Network, TimingCache, TrtOptions, compile_engine
from spec_export.engines.trt_prepare import read_pinned
from spec_export.engines.trt_profiles import profile_shapes, role_profiles

pytestmark = pytest.mark.usefixtures("api")
OPTIONS = BuildOptions(gamma=4, max_len=1024, chunk=128)
SERVED = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
BFLOAT16 = SERVED[1:]  # GPUs that compute in it


# --- the tiny pair: a whole bundle ---------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(prepared, tmp_path_factory) -> Bundle:
    """The tiny pair, drafts of 2 and 4, built ahead of time for every GPU there is."""
    out = tmp_path_factory.mktemp("rtx") / "bundle"
    options = BuildOptions(gamma=4, max_len=128, chunk=32, narrower=(2,))
    backend = TrtBackend("tensorrt-rtx")
    if backend.can_run:
        pytest.skip("what is built ahead of time is looked at where it cannot run")
    return build_bundle(prepared(), out, backend, options)


def test_every_role_has_a_profile(bundle):
    engines = bundle.manifest.engines
    roles = {"prefill": 0, "verify": 1, "verify_2": 2, "decode": 3, "exact_decode": 4}
    assert engines["target"].profiles == roles
    assert engines["draft"].profiles == {"prefill": 0, "catch_up": 1, "step": 2}


def test_attention_is_fused_and_caches_are_written_in_place(bundle):
    for name, spec in bundle.manifest.models.items():
        engine = bundle.manifest.engines[name]
        assert engine.attentions == spec.layers
        assert engine.cache_updates == 2 * spec.layers
        assert engine.precision == spec.dtype == "float16"


def test_every_sampling_graph_is_there(bundle):
    needed = needed_sampling("model", (2, 4))
    assert set(bundle.manifest.sampling) == needed
    for spec in bundle.manifest.sampling.values():
        assert bundle.file(spec.file).suffix == ".engine"


def test_one_engine_serves_every_gpu_that_has_the_arithmetic(bundle):
    compiler = bundle.manifest.compiler
    assert compiler is not None and compiler.compute_capabilities == SERVED


def test_what_was_not_probed_says_so(bundle):
    assert bundle.manifest.exactness.kind == "unprobed"
    assert bundle.manifest.device.gpu is None


def test_no_graph_and_no_weights_are_carried(bundle, prepared):
    assert not [name for name in bundle.manifest.files if ".onnx" in name]
    exported = read_exported(prepared())
    assert {spec.file for spec in exported.models.values()} < set(bundle.manifest.onnx)
    assert "target/model.onnx.data" in bundle.manifest.onnx


# --- what the parser made of a model -------------------------------------------------------------


def compiled(graph: Path, spec: ModelSpec, out: Path, api, options=OPTIONS) -> Network:
    """Compile a model for all its roles, and look at the network."""
    capacity = int(spec.states[0].dims[2])
    model = read_pinned(graph, {"C": capacity}).SerializeToString()
    profiles = profile_shapes(spec, capacity)
    times = TimingCache(api)
    return compile_engine(
        api, model, graph, profiles, TrtOptions(), BFLOAT16, times, out / "model.engine"
    )


def test_the_network_has_the_declared_tensors(prepared, tmp_path, api):
    exported = prepared("bfloat16")
    for spec in pinned_models(read_exported(exported), OPTIONS).values():
        network = compiled(exported / spec.file, spec, tmp_path, api)
        assert network.layers["KV_CACHE_UPDATE"] == 2 * spec.layers
        assert network.layers["ATTENTION_INPUT"] == network.layers["ATTENTION_OUTPUT"]
        assert network.layers["ATTENTION_INPUT"] == spec.layers
        assert network.layers["SOFTMAX"] == 0
        assert network.aliases == {state.output: state.input for state in spec.states}
        assert network.inputs["input_ids"] == ("int64", (1, -1))
        assert network.outputs["logits"] == ("float32", (1, -1, spec.vocabulary))
        for state in spec.states:
            assert network.inputs[state.input] == ("bfloat16", state.dims)
            assert network.outputs[state.output] == ("bfloat16", state.dims)


def test_roles_of_one_shape_share_a_profile(prepared):
    spec = pinned_models(read_exported(prepared()), replace(OPTIONS, gamma=1))["target"]
    profiles = role_profiles(spec)
    assert profiles["verify"] == profiles["exact_decode"] != profiles["decode"]
    shapes = profile_shapes(spec, int(spec.states[0].dims[2]))
    assert [shape["input_ids"] for shape in shapes] == [(1, 128), (1, 2), (1, 1)]
    assert shapes[1]["tree_mask"] == (2, 2) and shapes[0]["logit_rows"] == (2,)


@pytest.mark.parametrize(
    ("dtype", "weights", "asked"),
    [
        ("float16", "int8", {"quantizer": "rtn"}),
        ("float16", "int8", {"quantizer": "gptq"}),
        ("float16", "int8", {"activations": "int8"}),
        ("bfloat16", "int8", {"activations": "int8"}),
        ("float16", "int4", {"quantizer": "rtn"}),
        ("float16", "int4", {"quantizer": "gptq", "block": 64}),
        ("bfloat16", "int4", {"quantizer": "awq"}),
        ("float16", "fp8", {}),
        ("float16", "fp8", {"activations": "fp8"}),
        ("bfloat16", "fp8", {"activations": "fp8"}),
        ("float16", "nvfp4", {}),
        ("bfloat16", "nvfp4", {}),
    ],
)
def test_every_format_compiles_with_its_attention_fused(
    dtype, weights, asked, prepared_draft, tmp_path
):
    """Attention and cache updates are the library's own operators, whatever the matrices are."""
    graph, spec = prepared_draft(dtype, weights, **asked)
    backend = TrtBackend("tensorrt-rtx", TrtOptions(compute_capabilities=("12.0",)))
    found = backend.compile_model(graph, spec, 80, tmp_path / "out", False)
    engine = found.engine
    assert engine is not None
    assert (engine.precision, engine.weights) == (f"{dtype}, weights {weights}", weights)
    assert (engine.attentions, engine.cache_updates) == (spec.layers, 2 * spec.layers)
    read = read_pinned(graph, {}).graph
    stored = {tensor.data_type for tensor in read.initializer}
    assert {"int8": 3, "int4": 22, "fp8": 17, "nvfp4": 23}[weights] in stored
    rounded = [node for node in read.node if node.op_type == "QuantizeLinear"]
    assert len(rounded) == ("activations" in asked) * 4 * spec.layers  # two norms, o, down


def test_a_gpu_without_the_arithmetic_is_named(prepared_draft, tmp_path):
    graph, spec = prepared_draft("float16", "nvfp4")
    backend = TrtBackend("tensorrt-rtx", TrtOptions(compute_capabilities=("8.9",)))
    with pytest.raises(BuildError, match=r"8\.9: nvfp4 weights.*--weights"):
        backend.compile_model(graph, spec, 80, tmp_path / "out", False)


def compile_model(backend: TrtBackend, exported: Path, spec: ModelSpec, out: Path) -> Compiled:
    portable = read_exported(exported).models["target"]
    capacity = int(spec.states[0].dims[2])
    described = replace(portable, roles=spec.roles)
    return backend.compile_model(exported / portable.file, described, capacity, out, False)


@pytest.mark.model
def test_smollm2_compiles_for_all_its_roles(smollm2_half, tmp_path):
    spec = pinned_models(read_exported(smollm2_half), replace(OPTIONS, narrower=(2,)))["target"]
    assert (spec.layers, spec.vocabulary, spec.dtype) == (30, 49152, "float16")
    made = compile_model(TrtBackend("tensorrt-rtx"), smollm2_half, spec, tmp_path)
    assert made.engine is not None and made.engine.attentions == 30
    assert made.engine.cache_updates == 60
    assert len(set(made.engine.profiles.values())) == 3  # of one row and no drafts: method none
    assert (tmp_path / made.file).stat().st_size > spec.parameters_bytes


# --- negative controls ---------------------------------------------------------------------------


def test_a_graph_that_spells_attention_out_is_refused(prepared, tmp_path):
    import onnx_ir as ir

    exported = prepared()
    spec = pinned_models(read_exported(exported), OPTIONS)["target"]
    model = ir.load(exported / spec.file)
    node = next(node for node in model.graph if node.op_type == "Attention")
    same = ir.node("Identity", [node.inputs[0]])
    model.graph.insert_before(node, same)
    node.outputs[0].replace_all_uses_with(same.outputs[0])
    model.graph.remove(node, safe=True)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "model.onnx.data").symlink_to(exported / "target" / "model.onnx.data")
    ir.save(model, tmp_path / spec.file)
    with pytest.raises(BuildError, match="3 ATTENTION_INPUT for 4 layers") as caught:
        TrtBackend("tensorrt-rtx").compile_model(
            tmp_path / spec.file, spec, int(spec.states[0].dims[2]), tmp_path, False
        )
    assert "TensorScatter" in str(caught.value) and "export" in str(caught.value)


def test_a_graph_tensorrt_cannot_read_is_named_with_its_operator(tmp_path):
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("NoSuchOperator", ["x"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [result]))
    onnx.save(model, tmp_path / "graph.onnx")
    with pytest.raises(BuildError, match="NoSuchOperator"):
        TrtBackend("tensorrt-rtx").compile_sampling(
            tmp_path / "graph.onnx", {}, tmp_path / "graph.engine"
        )

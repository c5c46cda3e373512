"""Lowered attention computes what the standard graph computes, for every family, layer by layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir
import pytest

from spec_export.engines import lower
from spec_export.engines.build import (
    BuildOptions,
    build_bundle,
    read_exported,
)
from spec_export.engines.bundle import open_bundle
from spec_export.engines.errors import BuildError
from spec_export.engines.ort import OrtBackend
from spec_export.engines.standard import STANDARD_GRAPH, compare_with_standard
from tests.exported import redescribe
from tests.tiny_models import FAMILIES, POSITIONS, WINDOW

OPTIONS = BuildOptions(gamma=8, max_len=POSITIONS, chunk=20)  # as `build_family` has them


def lowered_nodes(graph: Path) -> list[ir.Node]:
    return [node for node in ir.load(graph).graph if node.op_type == "GroupQueryAttention"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_lowered_and_computes_the_same(family, build_family):
    """1e-5 of the largest logit: two float32 kernels that add in another order (1e-6 measured)."""
    bundle = open_bundle(build_family(family))
    manifest = bundle.manifest
    assert manifest.lowered["target"] == ("GroupQueryAttention: 2 of 2 layers",)
    spec = manifest.models["target"]
    found = compare_with_standard(OrtBackend(), bundle.path, spec, manifest.max_len)
    assert found.agrees and found.touched is None
    assert found.worst_logit < found.tolerance / 10  # which is 1e-4 of the largest logit
    assert found.argmax_agreement == 1
    assert found.passes >= 3 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lowered_graph_opens_in_older_runtimes(family, build_family):
    """onnxruntime for Python 3.10 reads opset 23 and IR version 11 at most."""
    bundle = build_family(family)
    for graph in [bundle / "target" / "model.onnx", *(bundle / "sampling").glob("*.onnx")]:
        model = ir.load(graph)
        assert model.opset_imports[""] == 23, graph.name
        assert model.ir_version <= 11
        newer = {"TensorScatter", "Attention"}
        assert not newer & {node.op_type for node in model.graph if node.domain == ""}
    assert ir.load(bundle / "target" / STANDARD_GRAPH).opset_imports[""] == 24


def test_windows_are_kept_per_layer(build_family):
    def windows(family: str) -> list[int]:
        nodes = lowered_nodes(build_family(family) / "target" / "model.onnx")
        return [node.attributes["local_window_size"].value for node in nodes]

    assert windows("mistral") == [WINDOW, WINDOW]
    assert windows("gemma3_text") == [WINDOW, -1]
    assert windows("llama") == [-1, -1]


def test_the_mask_is_gone_and_the_capacity_is_pinned(build_family):
    bundle = build_family("llama")
    model = ir.load(bundle / "target" / "model.onnx")
    capacity = open_bundle(bundle).manifest.capacity
    assert capacity == 128  # 96 positions and 20 rows of a chunk, in whole 16s
    names = [value.name for value in model.graph.inputs]
    assert "tree_mask" not in names
    caches = [value for value in model.graph.inputs if value.name.startswith("past")]
    assert all(value.shape[2] == capacity for value in caches)


# --- what cannot be lowered, and what is lowered wrongly -----------------------------------------


def changed_export(export_family, family: str, out: Path, change) -> Path:
    """A family's export with a change in its graph."""
    exported = Path(shutil.copytree(export_family(family), out))
    graph = exported / "target" / "model.onnx"
    model = ir.load(graph)
    change(model)
    ir.save(model, graph)
    redescribe(exported)
    return exported


def cap_the_first_layer(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "Attention")
    node.attributes["softcap"] = ir.AttrFloat32("softcap", 3.0)


def test_a_layer_that_does_not_match_stays_as_it_is(export_family, tmp_path):
    """A soft cap has no place in the lowered operator: that layer stays, the other is lowered."""
    exported = changed_export(export_family, "llama", tmp_path / "exported", cap_the_first_layer)
    bundle = build_bundle(exported, tmp_path / "bundle", OrtBackend(), OPTIONS)
    assert bundle.manifest.lowered["target"] == ("GroupQueryAttention: 1 of 2 layers",)
    model = ir.load(bundle.path / "target" / "model.onnx")
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("Attention"), kinds.count("TensorScatter")) == (1, 2)
    assert kinds.count("GroupQueryAttention") == 1
    assert model.opset_imports[""] == 24


def wrong_window(node: ir.Node) -> None:
    node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", WINDOW - 1)


def no_window(node: ir.Node) -> None:
    node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", -1)


def wrong_scale(node: ir.Node) -> None:
    node.attributes["scale"] = ir.AttrFloat32("scale", 0.3)


def key_for_value(node: ir.Node) -> None:
    node.replace_input_with(2, node.inputs[1])


@pytest.mark.parametrize("fault", [wrong_window, no_window, wrong_scale, key_for_value])
def test_a_lowering_that_goes_wrong_is_refused(fault, export_family, tmp_path, monkeypatch):
    """The build compares before it writes; the message says where."""
    replace_attention = lower._replace

    def wrong(graph, attention, *args):
        replace_attention(graph, attention, *args)
        fused = [node for node in graph if node.op_type == "GroupQueryAttention"]
        fault(fused[-1])

    monkeypatch.setattr(lower, "_replace", wrong)
    with pytest.raises(
        BuildError, match="compiled target does not compute its graph: logits differ"
    ):
        build_bundle(export_family("mistral"), tmp_path / "bundle", OrtBackend(), OPTIONS)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_writes_elsewhere_is_refused(export_family, tmp_path, monkeypatch):
    """As onnxruntime-genai 1604: caches not written in place. Logits alone may not show it."""
    from spec_export.engines.ort import OrtCall

    enqueue = OrtCall.enqueue

    def spilling(self) -> None:
        enqueue(self)
        self._keep["present.0.key"].host[:, :, -1, 0] += 1

    monkeypatch.setattr(OrtCall, "enqueue", spilling)
    with pytest.raises(BuildError, match="wrote cache rows outside its own"):
        build_bundle(export_family("llama"), tmp_path / "bundle", OrtBackend(), OPTIONS)


def test_lowering_twice_changes_nothing(export_family):
    exported = export_family("llama")
    model = ir.load(exported / "target" / "model.onnx")
    spec = read_exported(exported).models["target"]
    assert lower.lower_attention(model, spec) == 2
    before = [node.op_type for node in model.graph]
    assert lower.lower_attention(model, spec) == 0
    assert [node.op_type for node in model.graph] == before

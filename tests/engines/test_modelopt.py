"""nvidia-modelopt as a quantizer. It is an optional extra: where it is missing a stand-in is asked.

The stand-in has its one function; what is tested with it is what is handed over and taken back.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import onnx
import onnx_ir as ir
import pytest

from spec_export.calibration.observe import observe
from spec_export.engines.build import read_exported
from spec_export.engines.errors import BuildError, MissingExtra
from spec_export.engines.extras import _installed
from spec_export.engines.graphs import BY_ROW, QuantizationSpec
from spec_export.engines.modelopt import equal_texts, quantized_by_modelopt
from spec_export.engines.passes import whole_pass
from spec_export.engines.quantize import quantize_exported

TEXTS = [list(range(1, 150)), list(range(200, 400))]
HAS_MODELOPT = _installed("modelopt") and _installed("onnx_graphsurgeon")


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a function in the place of the library's."""

    def put(quantize) -> None:
        for name in ("modelopt", "modelopt.onnx", "modelopt.onnx.quantization"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        int4 = ModuleType("modelopt.onnx.quantization.int4")
        int4.quantize = quantize  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, int4.__name__, int4)
        monkeypatch.setattr(sys.modules["modelopt.onnx.quantization"], "int4", int4, raising=False)
        monkeypatch.setattr("spec_export.engines.modelopt.require", lambda *_: None)

    return put


def draft_of(exported: Path) -> tuple[Path, dict]:
    spec = read_exported(exported).models["draft"]
    return exported / spec.file, whole_pass(spec, TEXTS[0][:128])


def test_without_the_library_the_extra_is_named(tiny_pair_exported):
    if HAS_MODELOPT:
        pytest.skip("it is installed")
    graph, given = draft_of(tiny_pair_exported)
    with pytest.raises(MissingExtra, match=r"\[modelopt\]"):
        quantized_by_modelopt(graph, [given], 32)


def test_it_reads_every_pass_again_after_the_last_and_leaves_the_head(tiny_pair_exported, stand_in):
    graph, given = draft_of(tiny_pair_exported)
    seen = {}

    def quantize(path: str, **options) -> onnx.ModelProto:
        reader = options["calibration_data_reader"]
        seen["first"] = [reader.get_next() for _ in range(3)]
        reader.rewind()
        seen["again"] = [reader.get_next() for _ in range(3)]
        seen["heads"], seen["block"] = options["nodes_to_exclude"], options["block_size"]
        return onnx.load(path)

    stand_in(quantize)
    quantized_by_modelopt(graph, [given, given], 32)
    assert [found is None for found in seen["first"]] == [False, False, True]
    assert set(seen["first"][0]) == {value.name for value in ir.load(graph).graph.inputs}
    assert [found is None for found in seen["again"]] == [False, False, True]
    (head,) = seen["heads"]
    found = {node.name: node for node in ir.load(graph).graph}
    assert found[head].outputs[0].name == "logits" and seen["block"] == 32


def test_another_graph_than_was_given_is_refused(tiny_pair_exported, stand_in):
    graph, given = draft_of(tiny_pair_exported)

    def quantize(path: str, **_) -> onnx.ModelProto:
        model = onnx.load(path)
        del model.graph.input[-1]
        return model

    stand_in(quantize)
    with pytest.raises(BuildError, match="changed the inputs of"):
        quantized_by_modelopt(graph, [given], 32)


def test_its_failure_is_one_sentence(tiny_pair_exported, stand_in):
    graph, given = draft_of(tiny_pair_exported)

    def quantize(path: str, **_) -> None:
        raise ZeroDivisionError("float division by zero")

    stand_in(quantize)
    with pytest.raises(BuildError, match="nvidia-modelopt failed: ZeroDivisionError"):
        quantized_by_modelopt(graph, [given], 32)


def test_texts_are_cut_to_one_length():
    found = equal_texts(TEXTS)
    assert [len(text) for text in found] == [128, 128]
    assert found[0] + found[1] == (TEXTS[0] + TEXTS[1])[:256]
    with pytest.raises(BuildError, match="takes 128 or more"):
        equal_texts([[1, 2, 3]])


@pytest.mark.skipif(not HAS_MODELOPT, reason="needs nvidia-modelopt: pip install '.[modelopt]'")
def test_the_real_library_makes_a_directory_that_any_backend_builds(tiny_pair_exported, tmp_path):
    graphs = read_exported(tiny_pair_exported)
    spec = QuantizationSpec("int4", "modelopt", 32, False, None, None, BY_ROW)

    def observed(name: str):
        described = graphs.models[name]
        return observe(tiny_pair_exported / described.file, described, TEXTS, 1)

    quantize_exported(tiny_pair_exported, tmp_path, {"draft": spec}, observed)
    made = read_exported(tmp_path).models["draft"]
    assert made.quantization == spec
    model = ir.load(tmp_path / made.file)
    reads = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert len(reads) == 7 * made.layers
    assert {node.attributes["block_size"].value for node in reads} == {32}

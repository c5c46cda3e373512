"""The directories tests put together are those `export_pair` writes, byte for byte."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from tests.exported import with_draft, with_method


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_target_with_look_up(export_family, tmp_path):
    exported = export_family("llama")
    assert contents(with_method(exported, "ngram", tmp_path / "out")) == contents(exported)


def test_a_target_with_a_model_as_its_draft(tiny_pair_exported, tmp_path):
    again = with_draft(tiny_pair_exported, tiny_pair_exported, "draft", tmp_path / "out")
    assert contents(again) == contents(tiny_pair_exported)


@pytest.mark.parametrize("model", ["target", "draft"])
def test_weights_lie_in_the_order_of_the_graph(tiny_pair_exported, model):
    """So two exports are the same bytes: a set of names has another order in every process."""
    graph = tiny_pair_exported / model / "model.onnx"
    weights = ir.load(graph).graph.initializers.values()
    placed = [w.const_value.offset for w in weights if isinstance(w.const_value, ir.ExternalTensor)]
    assert len(placed) > 10 and placed == sorted(placed)

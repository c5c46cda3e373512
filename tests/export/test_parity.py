"""A graph that does not compute what torch computes is refused, whatever is wrong with it.

Faults are put into copies of a good export: into its weights, its mask, its positions, its caches.
Each of them leaves some passes right, and is found by another one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from spec_export.engines.build import read_exported
from spec_export.engines.errors import ParityError
from spec_export.engines.graphs import GRAPHS_FILE

torch = pytest.importorskip("torch")


def reference(exported: Path, **changes: object):
    """The checkpoint's own torch model, its configuration changed where asked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = exported.parent / "checkpoint"
    config = AutoConfig.from_pretrained(checkpoint)
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()


def check(exported: Path, target: Path, **changes: object):
    from spec_export.export.parity import check_parity

    spec = read_exported(exported).models["target"]
    return check_parity(reference(exported, **changes), target / "model.onnx", spec)


@pytest.fixture
def copied(export_family, tmp_path):
    """The llama export's target, free to be broken."""
    return shutil.copytree(export_family("llama") / "target", tmp_path / "target")


def attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Attention"]


def mask_lets_everything_through(model: ir.Model) -> None:
    mask = attentions(model)[0].inputs[3]
    inverse = ir.node("Not", [mask])
    every = ir.node("Or", [mask, inverse.outputs[0]])
    for node in attentions(model):
        node.replace_input_with(3, every.outputs[0])
    model.graph.insert_before(attentions(model)[0], [inverse, every])


def causal_flag_instead_of_the_mask(model: ir.Model) -> None:
    """onnxruntime 29020: in the first pass this is the same mask, in no later one."""
    for node in attentions(model):
        node.replace_input_with(3, None)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


def positions_start_anew_in_every_pass(model: ir.Model) -> None:
    inputs = {value.name: value for value in model.graph.inputs}
    adds = [node for node in model.graph if node.op_type == "Add"]
    sums = [node for node in adds if set(node.inputs) == {inputs["kv_len"], inputs["depth"]}]
    clamps = [
        user
        for node in sums
        for user in node.outputs[0].consumers()
        if user.op_type in ("Clip", "Min")
    ]
    assert clamps
    for node in clamps:
        at = next(i for i, value in enumerate(node.inputs) if value is sums[0].outputs[0])
        node.replace_input_with(at, inputs["depth"])


def caches_are_written_from_the_start(model: ir.Model) -> None:
    kv_len = next(value for value in model.graph.inputs if value.name == "kv_len")
    zero = ir.node("Sub", [kv_len, kv_len])
    writes = [node for node in model.graph if node.op_type == "TensorScatter"]
    model.graph.insert_before(writes[0], zero)
    for node in writes:
        node.replace_input_with(2, zero.outputs[0])


def logits_of_the_first_row_only(model: ir.Model) -> None:
    """Right in passes of one row."""
    rows = next(value for value in model.graph.inputs if value.name == "logit_rows")
    zero = ir.node("Sub", [rows, rows])
    rows.replace_all_uses_with(zero.outputs[0])
    zero.replace_input_with(0, rows)
    zero.replace_input_with(1, rows)
    model.graph.insert_before(next(iter(model.graph)), zero)


def a_cache_is_read_as_it_was(model: ir.Model) -> None:
    """The rows of a pass do not see one another's values."""
    node = attentions(model)[1]
    write = node.inputs[2].producer()
    node.replace_input_with(2, write.inputs[0])


FAULTS = [
    mask_lets_everything_through,
    causal_flag_instead_of_the_mask,
    positions_start_anew_in_every_pass,
    caches_are_written_from_the_start,
    logits_of_the_first_row_only,
    a_cache_is_read_as_it_was,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_graph_with_a_fault_is_refused(fault, export_family, copied):
    model = ir.load(copied / "model.onnx")
    fault(model)
    ir.save(model, copied / "model.onnx")
    with pytest.raises(ParityError, match=r"LlamaForCausalLM: .*T=\d+ rows at kv_len=\d+.*torch"):
        check(export_family("llama"), copied)


def test_an_untouched_copy_passes(export_family, copied):
    """Negative control: loading and saving breaks nothing."""
    ir.save(ir.load(copied / "model.onnx"), copied / "model.onnx")
    found = check(export_family("llama"), copied)
    assert found.worst_logit <= found.tolerance


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_changed_weight_is_refused(value, export_family, copied):
    """One element of one matrix."""
    model = ir.load(copied / "model.onnx")
    name = next(name for name in model.graph.initializers if "q_proj" in name)
    tensor = model.graph.initializers[name].const_value
    weights = np.fromfile(copied / "model.onnx.data", np.float32)
    weights[tensor.offset // 4 + 7] += value
    weights.tofile(copied / "model.onnx.data")
    with pytest.raises(ParityError):
        check(export_family("llama"), copied)


def test_a_window_that_got_lost_is_refused(export_family):
    """Right for the first 16 tokens (the kind of transformers 48280)."""
    exported = export_family("mistral")
    assert check(exported, exported / "target").worst_logit < 1e-3
    with pytest.raises(ParityError, match=r"T=\d+ rows at kv_len=\d\d"):
        check(exported, exported / "target", sliding_window=None)


def test_a_refused_export_writes_nothing_and_keeps_what_was_there(
    export_family, tmp_path, monkeypatch
):
    from spec_export.export import exporter

    checkpoint = export_family("llama").parent / "checkpoint"
    portable = exporter.make_portable

    def broken(*args):
        made = portable(*args)
        caches_are_written_from_the_start(made.model)
        return made

    monkeypatch.setattr(exporter, "make_portable", broken)
    old = tmp_path / "old"
    old.mkdir()
    kept = '{"schema": 1, "producer": {}, "models": {}}'
    (old / GRAPHS_FILE).write_text(kept)
    with pytest.raises(ParityError, match="nothing was written"):
        exporter.export_pair(str(checkpoint), "none", old)
    assert [path.name for path in tmp_path.rglob("*")] == ["old", GRAPHS_FILE]
    assert (old / GRAPHS_FILE).read_text() == kept

"""Every family an export is verified on, held against transformers by another way than the export.

The export's own parity check compares pass by pass, from caches that torch filled. Here the graph
fills its caches itself, through passes of many widths and a padded chunk, up to the last position,
and torch sees the whole sequence at once, without any cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from spec_export.engines.build import read_exported
from spec_export.engines.graphs import ModelSpec
from tests.tiny_models import FAMILIES, POSITIONS, WINDOW

torch = pytest.importorskip("torch")

CAPACITY = POSITIONS + 32
# Valid rows and rows of consecutive passes: a padded chunk, steps, a verify pass of gamma 8 and 4.
PASSES = [(21, 24), (1, 1), (2, 2), (9, 9), (1, 1), (5, 5), (30, 32), (9, 9), (2, 2), (9, 9)]
PASSES += [(5, 5), (2, 9)]
assert sum(valid for valid, _ in PASSES) == POSITIONS
# Of the largest logit: float32 by summation order, fifty times what is measured (up to 8e-7 on
# these models); half precision by ten times its epsilon of 1e-3 (1.5e-3 measured).
TOLERANCE = {"float32": 5e-5, "float16": 1e-2}


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(3, 259, POSITIONS)


def graph_logits(exported: Path, spec: ModelSpec) -> np.ndarray:
    """Logits of every position, `[POSITIONS, V]`; a pass is asked for its last row first.

    There is junk in the padding and in the caches past the lengths.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        str(exported / spec.file), options, providers=["CPUExecutionProvider"]
    )
    caches = {
        state.input: np.full(
            [CAPACITY if dim == "C" else dim for dim in state.dims], 1e3, np.dtype(state.dtype)
        )
        for state in spec.states
    }
    rows, kv_len = [], 0
    for valid, width in PASSES:
        padded = np.full(width, 5)
        padded[:valid] = tokens()[kv_len : kv_len + valid]
        feeds = {
            "input_ids": padded[None],
            "kv_len": np.array([kv_len]),
            "depth": np.arange(width),
            "tree_mask": np.tril(np.ones((width, width), bool)),
            "logit_rows": np.arange(valid)[::-1],
        }
        logits, *present = session.run(None, feeds | caches)
        caches = dict(zip(caches, present, strict=True))
        rows.append(logits[0, ::-1])
        kv_len += valid
    return np.concatenate(rows)


def torch_logits(checkpoint: Path, dtype: str) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens())[None]).logits[0].float().numpy()


def assert_equals_torch(exported: Path, dtype: str) -> None:
    spec = read_exported(exported).models["target"]
    expected = torch_logits(exported.parent / "checkpoint", dtype)
    found = graph_logits(exported, spec)
    worst = np.abs(found - expected).max(-1) / np.abs(expected).max()
    assert worst.max() < TOLERANCE[dtype], f"position {worst.argmax()}: {worst.max():.3g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_equals_torch_to_the_last_position(family, export_family):
    """optimum 1924, 1668: other text, or one token at a time only; OPT among them."""
    assert_equals_torch(export_family(family), "float32")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_half_precision_equals_torch_in_half_precision(family, export_family):
    assert_equals_torch(export_family(family, "float16"), "float16")


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_was_checked_to_the_end_of_the_context(family, export_family):
    found = read_exported(export_family(family)).parity["target"]
    assert found.positions == POSITIONS
    assert found.cases >= 16 + 3  # 4 widths at 4 lengths, 3 padded chunks
    assert 0 < found.worst_logit <= found.tolerance
    assert found.argmax_agreement == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_description_is_what_the_runtime_needs(family, export_family):
    graphs = read_exported(export_family(family))
    spec = graphs.models["target"]
    assert graphs.opset == 24
    assert (spec.layers, spec.max_position, spec.dtype) == (2, POSITIONS, "float32")
    windows = {"mistral": [WINDOW, WINDOW], "gemma3_text": [WINDOW, None]}
    expected = windows.get(family, [None, None])
    assert [state.window for state in spec.states[::2]] == expected
    assert all(state.aliased and state.dims[2] == "C" for state in spec.states)
    names = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert [state.input for state in spec.states] == [f"past_key_values.{n}" for n in names]
    assert [state.output for state in spec.states] == [f"present.{n}" for n in names]
    fixed = ["input_ids", "kv_len", "depth", "tree_mask", "logit_rows"]
    assert [tensor.name for tensor in spec.inputs][:5] == fixed
    assert spec.outputs[0].dims == (1, "R", spec.vocabulary)
    assert [role.name for role in spec.roles] == ["prefill", "verify", "decode", "exact_decode"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_portable(family, export_family):
    """onnxruntime 29020, onnx 8068: engines align a causal flag differently.

    So every attention has an explicit mask and no flag, and only standard operators are used.
    """
    import onnx_ir as ir

    exported = export_family(family)
    model = ir.load(exported / "target" / "model.onnx")
    assert model.opset_imports == {"": 24}
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    writes = [node for node in model.graph if node.op_type == "TensorScatter"]
    assert (len(attentions), len(writes)) == (2, 4)
    for node in attentions:
        assert node.inputs[3] is not None and node.inputs[3].dtype == ir.DataType.BOOL
        assert "is_causal" not in node.attributes or node.attributes["is_causal"].value == 0
    assert {node.domain for node in model.graph} == {""}

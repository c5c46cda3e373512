"""What quantizers go by is what the matrices of the model are really multiplied by."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from spec_export.calibration.observe import observe
from spec_export.calibration.texts import token_texts
from spec_export.engines.build import read_exported
from spec_export.engines.errors import RequestError
from spec_export.engines.passes import whole_pass
from spec_export.engines.products import products, sample_names

TEXTS = [[5, 17, 900, 3, 44, 1000, 2, 8, 9, 10], [700, 6, 30, 31, 32, 33, 600]]


@pytest.fixture(scope="module")
def draft(tiny_pair_exported):
    """Graph and description of the tiny draft."""
    spec = read_exported(tiny_pair_exported).models["draft"]
    return tiny_pair_exported / spec.file, spec


def test_samples_of_the_first_matrices_are_those_of_numpy(draft):
    """The embedding of every token, its root mean square taken out, times the norm's weight."""
    file, spec = draft
    graph = ir.load(file).graph
    product = products(graph, head=False)[0]
    norm = product.source.producer()
    assert norm is not None and norm.op_type == "RMSNormalization"
    weights = {n: v.const_value.numpy() for n, v in graph.initializers.items() if v.const_value}
    rows = weights["model.embed_tokens.weight"][np.concatenate(TEXTS)].astype(np.float64)
    rows /= np.sqrt(np.square(rows).mean(-1, keepdims=True) + norm.attributes["epsilon"].value)
    expected = rows * weights[norm.inputs[1].name]
    found = observe(file, spec, TEXTS, 1).inputs[product.source.name]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_matrix_inside_the_layers_has_samples_of_its_rows(draft):
    file, spec = draft
    graph = ir.load(file).graph
    found = observe(file, spec, TEXTS, 1)
    assert set(found.inputs) == set(sample_names(graph))
    for product in products(graph, head=False):
        assert found.inputs[product.source.name].shape == (17, product.shape[0])


def test_the_largest_of_each_channel_of_a_cache(draft):
    """Over rows of all texts that were written, and no others."""
    file, spec = draft
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    found = observe(file, spec, TEXTS, 1).largest
    for state in spec.states:
        caches = [session.run([state.output], whole_pass(spec, text))[0][0] for text in TEXTS]
        expected = np.maximum(*(np.abs(cache).max(axis=1) for cache in caches))
        assert found[state.input].shape == (state.dims[1], state.dims[3])
        np.testing.assert_allclose(found[state.input], expected, rtol=1e-5)


@pytest.mark.parametrize("rows", [5, 16, 17, 100])
def test_samples_are_spread_over_all_texts(draft, rows):
    """Every n-th token of all of them, as though they were one text."""
    file, spec = draft
    name = products(ir.load(file).graph, head=False)[0].source.name
    whole = observe(file, spec, TEXTS, 1).inputs[name]
    found = observe(file, spec, TEXTS, 1, rows=rows).inputs[name]
    every = -(-17 // min(rows, 17))
    np.testing.assert_allclose(found, whole[::every], rtol=1e-5, atol=1e-6)
    assert len(found) <= rows


def test_a_text_longer_than_the_context_is_cut(draft):
    file, spec = draft
    text = [int(t) for t in np.random.default_rng(0).integers(0, 1031, spec.max_position + 40)]
    mine = observe(file, spec, [text], 1, rows=10**6)
    other = observe(file, spec, [text[: spec.max_position]], 1, rows=10**6)
    for name, rows in mine.inputs.items():
        assert len(rows) == spec.max_position
        np.testing.assert_array_equal(rows, other.inputs[name])


@pytest.mark.parametrize("texts", [[], [[]], [[1, 2, 3]]])
def test_texts_that_tell_nothing_are_refused(draft, texts):
    file, spec = draft
    with pytest.raises(RequestError, match="at least 8 are needed: give more texts"):
        observe(file, spec, texts, 1)


# --- texts ---------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tiny_pair_exported):
    return tiny_pair_exported / read_exported(tiny_pair_exported).text.tokenizer


def test_files_of_every_kind_give_the_same_ids(tokenizer, tmp_path):
    texts = ["In the beginning", "And the king said unto"]
    lines, objects, arrays = (tmp_path / f"t.{kind}" for kind in ("txt", "jsonl", "npz"))
    lines.write_text("\n".join(texts))
    objects.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    found = token_texts(tokenizer, lines)
    assert found == token_texts(tokenizer, objects) and len(found) == 2
    ids = np.array([found[0][:2], found[1][:2]], np.int32)
    np.savez(arrays, input_ids=ids)
    assert token_texts(tokenizer, arrays) == ids.tolist()
    np.savez(arrays, input_ids=ids[:, None])  # batches of one, as some readers have them
    assert token_texts(tokenizer, arrays) == ids.tolist()


def test_of_a_long_text_the_beginning_is_looked_at(tokenizer, tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("word " * 2000)
    (found,) = token_texts(tokenizer, file)
    assert len(found) == 512
    np.savez(tmp_path / "t.npz", input_ids=np.ones((1, 2000), np.uint16))
    assert token_texts(tokenizer, tmp_path / "t.npz") == [[1] * 512]


def test_the_default_texts_are_of_several_kinds(tokenizer):
    """They have to determine second moments of a few hundred dimensions."""
    found = token_texts(tokenizer, None)
    assert len(found) >= 8 and sum(map(len, found)) > 1000

"""Penalties, n-grams, bias, end tokens and masks against plain loops, on every row of a pass."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from spec_export.engines.graphs import NGRAM_LIMIT, padded_vocabulary
from tests import weighing
from tests.sampling_run import (
    KEYS,
    Arrays,
    accept,
    edit_feeds,
    floats,
    ids,
    padded,
    refer,
    round_feeds,
    run,
)
from tests.weighing import Edits

EVERYTHING = Edits(1.3, 0.7, 0.4, 2, {3: 5.0, 4: -100.0, 9: -np.inf}, (5, 6), 30)


def expected(
    logits: NDArray, prompt: list[int], output: list[int], drafts: list[int], edits: Edits
) -> NDArray:
    """Row r sees the drafts before it."""
    rows = [
        weighing.edited(row, prompt, [*output, *drafts[:r]], edits)
        for r, row in enumerate(logits[0])
    ]
    return padded(np.array(rows), -np.inf)


def check(logits, prompt, output, drafts, edits) -> None:
    V, rows = logits.shape[2], logits.shape[1]
    said = expected(logits, prompt, output, drafts, edits)
    feeds = edit_feeds(V, prompt, output, drafts, edits) | {"logits": logits}
    made = run("scores+edits", V, feeds)["scores"]
    np.testing.assert_allclose(made, said, rtol=1e-5, atol=1e-5)
    for row in range(rows):  # as `propose` and `sample` do it: one row, which says where it stands
        alone = np.ascontiguousarray(logits[:, row : row + 1])
        feeds |= {"logits": alone, "row0": ids(row)}
        one = run("scores+edits", V, feeds)["scores"]
        assert one.tobytes() == made[row : row + 1].tobytes()


@pytest.mark.parametrize("V", [3, 12, 70, 1031])
@pytest.mark.parametrize(
    "edits",
    [
        Edits(),
        Edits(repetition=1.3),
        Edits(repetition=0.8),
        Edits(presence=0.7),
        Edits(frequency=-0.4),
        *(Edits(ngram=n) for n in range(1, NGRAM_LIMIT + 1)),
        Edits(bias={2: -100.0, 0: 3.5}),
        Edits(bias={2: -np.inf}),
        Edits(end_ids=(1, 2), end_from=23),
        EVERYTHING,
    ],
    ids=str,
)
def test_every_edit_is_its_definition_on_every_row(V: int, edits: Edits) -> None:
    rng = np.random.default_rng(V)
    if edits is EVERYTHING and V < 12:
        return
    for few in (2, 4, V):  # few different tokens: n-grams come again
        prompt, output = (rng.integers(min(few, V), size=n).tolist() for n in (12, 9))
        drafts = rng.integers(min(few, V), size=4).tolist()
        logits = rng.normal(size=(1, 5, V)).astype(np.float32) * 3
        logits[0, :, rng.integers(V)] = -np.inf
        check(logits, prompt, output, drafts, edits)


@pytest.mark.parametrize(("prompt", "output"), [([1], []), ([0, 2], [1]), ([1] * 20, [2] * 23)])
def test_short_and_full_histories(prompt: list[int], output: list[int]) -> None:
    """One token, and a history whose drafts reach the last of its places."""
    logits = np.random.default_rng(0).normal(size=(1, 5, 12)).astype(np.float32)
    drafts = [1, 2, 1, 1]
    edits = Edits(1.2, 0.5, 0.25, 2, {1: -1.0}, (7,), 46)
    check(logits, prompt, output, drafts, edits)


def test_edits_are_the_usual_ones() -> None:
    """What transformers' processors make of the same text."""
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(2)
    for _ in range(10):
        text = rng.integers(8, size=20).tolist()
        row = rng.normal(size=12).astype(np.float32)
        for processor, edits in (
            (processors.RepetitionPenaltyLogitsProcessor(1.4), Edits(repetition=1.4)),
            (processors.NoRepeatNGramLogitsProcessor(1), Edits(ngram=1)),
            (processors.NoRepeatNGramLogitsProcessor(3), Edits(ngram=3)),
        ):
            theirs = processor(torch.tensor([text]), torch.tensor(row[None].copy()))[0].numpy()
            np.testing.assert_allclose(weighing.edited(row, text, [], edits), theirs, rtol=1e-6)


@pytest.mark.parametrize(("frequency", "emitted"), [(1.5, [1, 15]), (0.7, [1, 1, 15])])
def test_a_penalty_counts_the_drafts_before_its_row(frequency: float, emitted: list[int]) -> None:
    """vllm 18902: output so far [2], drafts [1, 1, 1]."""
    V, drafts = 16, [1, 1, 1]
    logits = np.zeros((1, 4, V), np.float32)
    logits[..., 1], logits[..., 15] = 100, 99
    edits = edit_feeds(V, [0], [2], drafts, Edits(frequency=frequency)) | {"logits": logits}
    feeds = round_feeds(np.random.default_rng(0), 3, V) | edits
    feeds["scores"] = run("scores+edits", V, edits)["scores"]
    made = accept("edited", V, feeds)
    assert made["tokens"][: int(made["n_accepted"][0]) + 1].tolist() == emitted


def test_a_forbidden_token_is_emitted_from_no_row() -> None:
    """vllm 42744, 31982: bias and filters acted on the last row only."""
    V, drafts = 16, [3, 3, 3]
    logits = np.zeros((1, 4, V), np.float32)
    logits[..., 3] = 50
    for bias in (-100.0, -np.inf):
        edits = edit_feeds(V, [0], [], drafts, Edits(bias={3: bias})) | {"logits": logits}
        feeds = round_feeds(np.random.default_rng(0), 3, V) | edits
        feeds |= {"draft_tokens": ids(*drafts), "temperature": floats(1)}
        feeds["scores"] = run("scores+edits", V, edits)["scores"]
        feeds["p"] = run("distribution+edits", V, feeds)["p"]
        assert not (feeds["p"][:, 3] > 1e-20).any()
        for rule in ("edited", "one_hot", "dense", "block", "invariant"):
            for _ in range(5):
                feeds["race"] = np.random.default_rng(1).standard_exponential(
                    feeds["race"].shape, np.float32
                )
                made = accept(rule, V, feeds)
                assert made["n_accepted"].tolist() == [0]
                assert made["tokens"][0] != 3


def test_end_tokens_are_held_back_up_to_their_place() -> None:
    """vllm 41768, TensorRT-LLM 12358: off by one."""
    V, prompt, min_tokens = 12, [1, 2, 3], 6
    logits = np.zeros((1, 5, V), np.float32)
    edits = Edits(end_ids=(4, 7), end_from=len(prompt) + min_tokens)
    for produced in range(9):
        output, drafts = [5] * produced, [6, 6, 6, 6]
        feeds = edit_feeds(V, prompt, output, drafts, edits) | {"logits": logits}
        scores = run("scores+edits", V, feeds)["scores"]
        held = np.isneginf(scores[:, :V])
        for row in range(5):
            wanted = [4, 7] if produced + row < min_tokens else []
            assert np.flatnonzero(held[row]).tolist() == wanted


# --- masks ----------------------------------------------------------------------------------------


def mask_feeds(rng: np.random.Generator, V: int, rows: int = 3) -> tuple[Arrays, NDArray]:
    bits = rng.random((rows, padded_vocabulary(V))) < 0.3
    bits[:, rng.integers(V)] = True
    logits = rng.normal(size=(1, rows, V)).astype(np.float32)
    feeds = {"logits": logits, "allowed": np.packbits(bits, axis=1, bitorder="little")}
    return feeds, bits[:, :V]


@pytest.mark.parametrize("V", [3, 64, 1031, 50257])
def test_a_mask_leaves_what_it_allows(V: int) -> None:
    """vllm 34650, 31858: every row has its own. Bits beyond the vocabulary are idle."""
    feeds, bits = mask_feeds(np.random.default_rng(V), V)
    scores = run("scores+mask", V, feeds)["scores"]
    assert (np.isneginf(scores[:, :V]) == ~bits).all()
    assert np.isneginf(scores[:, V:]).all()
    assert (scores[:, :V][bits] == feeds["logits"][0][bits]).all()
    p = run("distribution+mask", V, feeds | {"temperature": floats(0.7)})["p"]
    assert ((p[:, :V] > 0) == bits).all()
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-5)


def test_where_nothing_may_come_there_is_no_distribution() -> None:
    """And no graph passes a token off as drawn: its logprob is -inf, in that row alone."""
    V = 70
    feeds = round_feeds(np.random.default_rng(0), 2, V) | {"temperature": floats(1)}
    feeds["allowed"] = np.full((3, padded_vocabulary(V) // 8), 255, np.uint8)
    feeds["allowed"][1] = 0
    p = run("distribution+mask", V, feeds)["p"]
    assert not np.nan_to_num(p[1]).any()
    scores = run("scores+mask", V, feeds)["scores"]
    feeds |= {"p": p, "scores": scores, "uniform": floats(0, 0)}
    feeds["draft_tokens"][0] = scores[0].argmax()
    for rule in ("edited", "one_hot", "dense", "block", "invariant"):
        if rule == "invariant":
            feeds["draft_tokens"][0] = accept(rule, V, feeds | {"n_draft": ids(0)})["tokens"][0]
        feeds["q"][:] = 1 / V
        made = accept(rule, V, feeds)
        assert made["n_accepted"].tolist() == [1], rule
        assert np.isfinite(made["logprob"][0])
        assert np.isneginf(made["logprob"][1])
        assert 0 <= made["tokens"][1] < V


def test_groups_act_in_their_order() -> None:
    """Edits, mask, temperature: a graph with all of them is the graphs one by one."""
    V, rng = 70, np.random.default_rng(4)
    masked, _ = mask_feeds(rng, V, rows=5)
    prompt, drafts = rng.integers(V, size=20).tolist(), [1, 2, 3, 4]
    feeds = edit_feeds(V, prompt, [2, 2], drafts, EVERYTHING) | masked
    feeds["temperature"] = floats(0.6)
    said = run("scores+edits+mask", V, feeds)["scores"]
    edited = run("scores+edits", V, feeds)["scores"][None, :, :V]
    assert run("scores+mask", V, feeds | {"logits": edited})["scores"].tobytes() == said.tobytes()
    scores = {"logits": np.ascontiguousarray(said[None, :, :V])}
    whole = run("distribution+edits+mask", V, feeds)["p"]
    assert whole.tobytes() == run("distribution", V, feeds | scores)["p"].tobytes()


def test_the_reference_evaluator_agrees() -> None:
    V, rng = 70, np.random.default_rng(5)
    masked, _ = mask_feeds(rng, V, rows=5)
    feeds = edit_feeds(V, rng.integers(8, size=20).tolist(), [2, 2], [1, 2, 3, 4], EVERYTHING)
    feeds |= masked | {"temperature": floats(0.6)}
    for name, key in KEYS.items():
        if (key.edits or key.mask) and key.model == "target":
            made, said = run(name, V, feeds), refer(name, V, feeds)
            out = "p" if key.is_drawn else "scores"
            np.testing.assert_allclose(made[out], said[out], atol=1e-5, err_msg=name)


def test_a_broken_row_stays_one() -> None:
    """NaN and +inf reach the distribution's row, whatever is forbidden there, and no other row."""
    V, rng = 70, np.random.default_rng(6)
    for bad in (np.nan, np.inf):
        feeds, _ = mask_feeds(rng, V, rows=5)
        feeds |= edit_feeds(V, [1, 2], [3], [1, 2, 3, 4], EVERYTHING)
        feeds["temperature"] = floats(1)
        clean = run("distribution+edits+mask", V, feeds)["p"]
        feeds["logits"][0, 2] = bad
        made = run("distribution+edits+mask", V, feeds)["p"]
        kept = [0, 1, 3, 4]
        assert made[kept].tobytes() == clean[kept].tobytes()

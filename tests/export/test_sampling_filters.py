"""Top-k, top-p, min-p and typical-p against their definition, and against one another.

A kept token's probability is compared in every bit: the sums behind it are whole numbers.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spec_export.engines.graphs import LISTED
from spec_export.engines.lower import lower_sampling
from tests import weighing
from tests.sampling_run import (
    distribution,
    filter_feeds,
    model,
    open_graph,
    refer,
    run,
    run_session,
)
from tests.weighing import Filters

WAYS = ("top", "nucleus", "any", "typical")
SMALL = (3, 70, 257, 300, 1031)


def defined(logits: NDArray, filters: Filters, temperature: float = 1.0) -> NDArray:
    return np.stack([weighing.filtered(p, filters) for p in distribution(logits, temperature)])


def ways_for(filters: Filters) -> list[str]:
    """The graphs that serve these values; a listing one may still refuse them."""
    if filters.typical_p < 1:
        return ["typical"]
    ways = ["any"]
    ways += ["top"] if filters.top_k < LISTED else []
    return ways + (["nucleus"] if not filters.top_k else [])


def check(logits: NDArray, filters: Filters, temperature: float = 1.0) -> dict[str, bool]:
    """Every way against the definition, row by row; returns which of them found every cut."""
    expected = defined(logits, filters, temperature)
    feeds, found = filter_feeds(logits, filters, temperature), {}
    for way in ways_for(filters):
        made = run(f"distribution+{way}", logits.shape[2], feeds)
        is_found = made.get("overflow", np.zeros(len(expected), np.int64)) == 0
        found[way] = bool(is_found.all())
        rows = made["p"][is_found], expected[is_found]
        np.testing.assert_array_equal(*rows, err_msg=f"{way} {filters}")
    return found


def random_logits(rng: np.random.Generator, V: int, kind: str, rows: int = 2) -> NDArray:
    x = rng.normal(size=(1, rows, V)).astype(np.float32)
    if kind == "tied":
        return np.round(x * 2) / 2
    if kind == "banned":
        x[rng.random(x.shape) < 0.5] = -np.inf
        x[..., rng.integers(V)] = 0
    return x * np.float32({"flat": 0.1, "wide": 3, "peaked": 12, "equal": 0}.get(kind, 1))


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(SMALL),
    st.sampled_from(["flat", "wide", "peaked", "tied", "banned", "equal"]),
    st.integers(0, 2**32),
    st.builds(
        Filters,
        st.sampled_from([0, 1, 2, 50, 255]),
        st.sampled_from([0, 1e-9, 0.1, 0.5, 0.9, 0.99999, 1]),
        st.sampled_from([0, 0.02, 0.3, 1]),
        st.just(1.0),
    ),
    st.sampled_from([1e-6, 0.7, 1, 100]),
)
def test_every_way_is_the_definition_bit_by_bit(V, kind, seed, filters, temperature) -> None:
    filters = Filters(filters.top_k % V, filters.top_p, filters.min_p)
    logits = random_logits(np.random.default_rng(seed), V, kind)
    found = check(logits, filters, temperature)
    assert found["any"]
    p = distribution(logits, temperature)
    if p.shape[1] <= LISTED:
        assert all(found.values()), "a list of everything has every cut"
    else:  # `top` finds exactly what lies among the listed ones
        cuts = [(np.sort(row)[-LISTED], *weighing.thresholds(row, filters)) for row in p]
        listed = [last < max(t) and (last < t[0] or not filters.top_k) for last, *t in cuts]
        assert found.get("top", True) == all(listed)


@pytest.mark.parametrize("V", [50257, 151_936])
def test_every_way_on_large_vocabularies(V: int) -> None:
    """A peaked row, and one whose nucleus has tens of thousands of tokens."""
    rng = np.random.default_rng(V)
    logits = random_logits(rng, V, "")
    logits[0, 0] *= 4
    for filters in (
        Filters(50, 0.9, 0.05),
        Filters(0, 0.99999),
        Filters(0, 0.3),
        Filters(5000, 0.8),
    ):
        found = check(logits, filters)
        assert found["any"]
        # Close to 1 the rough sums that `nucleus` begins with may miss the cut; it says so.
        assert found.get("nucleus", True) or filters.top_p > 0.9999
    assert check(logits, Filters(50))["top"]
    assert not check(logits, Filters(0, 0.9))["top"]


@pytest.mark.parametrize("typical_p", [0.0, 0.2, 0.5, 0.9, 0.99999])
@pytest.mark.parametrize("V", SMALL)
def test_typical_keeps_what_is_closest_to_the_entropy(V: int, typical_p: float) -> None:
    rng = np.random.default_rng(V)
    for kind in ("flat", "wide", "tied", "banned"):
        logits = random_logits(rng, V, kind)
        for filters in (Filters(), Filters(20 % V, 0.9, 0.01)):
            check(logits, Filters(filters.top_k, filters.top_p, filters.min_p, typical_p))


def test_typical_may_drop_the_most_probable_token() -> None:
    """arXiv 2202.00666: where one token is far likelier than typical, it is not drawn."""
    p = np.array([0.5, 0.125, 0.125, 0.125, 0.125])
    logits = np.log(p)[None, None].astype(np.float32)  # entropy 2 bits; surprises 1, 3 bits
    kept = run("distribution+typical", 5, filter_feeds(logits, Filters(typical_p=0.4)))["p"]
    assert (kept[0, :5] > 0).tolist() == [True] * 5, "1 and 3 bits are equally far: a tie"
    logits[0, 0, 0] -= 0.01  # still four times as likely as any other
    kept = run("distribution+typical", 5, filter_feeds(logits, Filters(typical_p=0.4)))["p"]
    assert (kept[0, :5] > 0).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("filters", [Filters(3), Filters(0, 0.5), Filters(0, 1, 0.4)])
def test_ties_at_the_threshold_are_all_kept(filters: Filters) -> None:
    """Whatever their ids: three tokens of 1/4 and four of 1/16."""
    p = np.array([4, 1, 4, 1, 1, 4, 1]) / 16
    logits = np.log(p)[None, None].astype(np.float32)
    for way in ways_for(filters):
        kept = run(f"distribution+{way}", 7, filter_feeds(logits, filters))["p"][0, :7]
        np.testing.assert_allclose(kept, (p > 0.1) / 3, rtol=1e-6)


def test_the_ends_of_each_value() -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 1031, "wide")
    p = distribution(logits)
    best = p == p.max(axis=1, keepdims=True)
    for filters in (Filters(1), Filters(0, 0.0), Filters(0, 1, 1.0)):
        assert ((defined(logits, filters) > 0) == best).all()
        assert check(logits, filters)["top"]
    for way in ("any", "nucleus"):  # everything off: nothing is lost but the sum's last bits
        made = run(f"distribution+{way}", 1031, filter_feeds(logits, Filters()))
        if way == "any":
            np.testing.assert_allclose(made["p"], p, rtol=1e-6)
        else:
            assert made["overflow"].tolist() == [1, 1]


def test_filters_are_the_usual_ones() -> None:
    """Without ties, and away from the last bit of a sum, what transformers keeps is kept."""
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(3)
    for V, T in itertools.product((70, 1031), (0.7, 1.5)):
        logits = random_logits(rng, V, "wide")
        for filters in (Filters(9, 0.8, 0.02), Filters(0, 0.95), Filters(0, 1, 0.1), Filters(40)):
            scores = torch.tensor(logits[0]) / T
            for on, warper, value in (
                (filters.top_k, warpers.TopKLogitsWarper, filters.top_k),
                (filters.top_p < 1, warpers.TopPLogitsWarper, filters.top_p),
                (filters.min_p, warpers.MinPLogitsWarper, filters.min_p),
            ):
                scores = warper(value)(None, scores) if on else scores
            theirs = torch.softmax(scores, -1).numpy()
            np.testing.assert_allclose(defined(logits, filters, T)[:, :V], theirs, atol=1e-6)
        scores = warpers.TypicalLogitsWarper(0.7)(None, torch.tensor(logits[0]) / T)
        theirs, filters = torch.softmax(scores, -1).numpy(), Filters(typical_p=0.7)
        np.testing.assert_allclose(defined(logits, filters, T)[:, :V], theirs, atol=1e-6)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    """Rule `invariant` rests on it: a token drawn in a plain step is drawn in a round too."""
    rng = np.random.default_rng(6)
    for V in (1031, 50257):
        logits = random_logits(rng, V, "wide", rows=5)
        filters = Filters(0, 0.9, 0.001, 0.8)
        feeds = filter_feeds(logits, filters)
        for way in ("none", *WAYS):
            name = "distribution" if way == "none" else f"distribution+{way}"
            whole = run(name, V, feeds)["p"]
            for row in range(5):
                one = np.ascontiguousarray(logits[:, row : row + 1])
                alone = run(name, V, feeds | {"logits": one})["p"]
                assert alone.tobytes() == whole[row : row + 1].tobytes(), (name, row)


def test_lowered_sums_are_the_same_ones(tmp_path) -> None:
    """Doubles in place of int64 change no bit; `top` is left alone, it sums short lists."""
    rng = np.random.default_rng(7)
    logits = random_logits(rng, 1031, "wide")
    feeds = filter_feeds(logits, Filters(0, 0.9, 0.001, 0.8))
    for way in WAYS:
        onnx.save(model(f"filter_{way}", 1031), tmp_path / "graph.onnx")
        lowered = lower_sampling(tmp_path / "graph.onnx", {"R": 2})
        onnx.checker.check_model(lowered, full_check=True)
        feeds["p"] = distribution(logits)
        made, plain = run_session(open_graph(lowered), feeds), run(f"filter_{way}", 1031, feeds)
        assert made["kept"].tobytes() == plain["kept"].tobytes()
        doubles = [n for n in lowered.graph.node if n.op_type == "Cast" and n.attribute[0].i == 11]
        assert bool(doubles) == (way != "top")


def test_the_reference_evaluator_agrees() -> None:
    rng = np.random.default_rng(8)
    logits = random_logits(rng, 70, "wide")
    feeds = filter_feeds(logits, Filters(0, 0.8, 0.01, 0.8))
    for way in WAYS:
        made, said = (ask(f"distribution+{way}", 70, feeds)["p"] for ask in (run, refer))
        np.testing.assert_allclose(made, said, atol=1e-6, err_msg=way)


@pytest.mark.parametrize("way", ["none", *WAYS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_harms_no_other(way: str, bad: float) -> None:
    name = "distribution" if way == "none" else f"distribution+{way}"
    logits = random_logits(np.random.default_rng(9), 1031, "wide", rows=3)
    feeds = filter_feeds(logits, Filters(20 if way != "nucleus" else 0, 0.9, 0.01, 0.9))
    clean = run(name, 1031, feeds)["p"]
    feeds["logits"] = logits.copy()
    feeds["logits"][0, 1, 500] = bad
    made = run(name, 1031, feeds)["p"]
    assert made[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


def test_a_draft_of_another_vocabulary_is_cut_or_filled_before_the_softmax() -> None:
    """vllm 7252: padded vocabularies of one family; the larger one's extra ids must not appear."""
    logits = np.zeros((1, 1, 128), np.float32)
    logits[..., 100:] = 50  # the draft likes only ids the target lacks
    feeds = filter_feeds(logits, Filters(3))
    cut = run("draft_distribution", 100, feeds, 128)["p"]
    np.testing.assert_allclose(cut[0], [0.01] * 100 + [0] * 28, rtol=1e-6)
    filled = run("draft_distribution", 100, filter_feeds(logits[..., :66], Filters()), 66)["p"]
    np.testing.assert_allclose(filled[0], [1 / 66] * 66 + [0] * 62, rtol=1e-6)
    rising = np.arange(66, dtype=np.float32)[None, None]
    kept = run("draft_distribution+top", 100, filter_feeds(rising, Filters(3)), 66)
    assert np.flatnonzero(kept["p"][0]).tolist() == [63, 64, 65]

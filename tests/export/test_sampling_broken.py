"""NaN, infinity, empty rows and the ends of float32: never a wrong token, never without a word."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from spec_export.runtime.noise import Noise
from tests import algorithm1
from tests.chi_square import fit
from tests.sampling_rounds import RATIO_RULES, SAMPLED, spoil_unused, steer
from tests.sampling_run import (
    BELOW_ONE,
    RULES,
    Bound,
    accept,
    distribution,
    model,
    padded,
    round_feeds,
    sample,
)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("V", [5, 65, 1031])
def test_a_target_row_that_is_not_finite_shows_in_its_logprob(
    V: int, rule: str, bad: float
) -> None:
    for broken, row in itertools.product([0, V // 2, V - 1], range(3)):
        feeds = round_feeds(np.random.default_rng(broken), 2, V)
        steer(feeds, rule, 2, 2)
        clean = accept(rule, V, feeds)
        feeds["logits"][0, row, broken] = bad
        feeds["logits"][0, row, 1] = -np.inf  # a banned token must not hide it
        feeds["p"] = distribution(feeds["logits"], 0.8)
        made = accept(rule, V, feeds)
        n = int(made["n_accepted"][0])
        assert all(0 <= t < V for t in made["tokens"])
        if (
            rule == "block" and n < row
        ):  # the longest prefix looks ahead: another token came instead
            assert np.isfinite(made["logprob"][: n + 1]).all()
            continue
        assert row <= n, "the row before it was accepted"
        assert not np.isfinite(made["logprob"][row])
        assert np.array_equal(made["logprob"][:row], clean["logprob"][:row])


def test_rows_of_nothing_but_nan_or_banned_tokens_stay_inside_the_vocabulary() -> None:
    for V, value in itertools.product([3, 65, 1031], [np.nan, np.inf, -np.inf]):
        feeds = round_feeds(np.random.default_rng(0), 1, V)
        feeds["logits"][...] = value
        feeds["p"], feeds["scores"] = distribution(feeds["logits"]), padded(feeds["logits"][0])
        for rule in (*RULES, "edited"):
            made = accept(rule, V, feeds)
            assert all(0 <= t < V for t in made["tokens"])
            assert not np.isfinite(made["logprob"][0])
        for variant in ("greedy", "edited", "drawn"):
            made = sample(variant, V, feeds)
            assert 0 <= made["tokens"][0] < V
            assert not np.isfinite(made["logprob"][0])


def test_noise_of_nan_stays_inside_the_vocabulary() -> None:
    for V in (3, 65, 1031):
        feeds = round_feeds(np.random.default_rng(0), 1, V)
        feeds["race"][:] = feeds["uniform"][:] = np.nan
        for rule in SAMPLED:
            assert 0 <= accept(rule, V, feeds)["tokens"][0] < V
        assert 0 <= sample("drawn", V, feeds)["tokens"][0] < V


def test_a_logprob_is_nan_even_where_a_softmax_kernel_hides_it() -> None:
    """Some vector kernels clamp their argument, and a clamp by minimum and maximum drops NaN."""

    class LogSoftmax(OpRun):
        def _run(self, x: NDArray, axis: int | None = None) -> tuple[NDArray]:
            x = np.nan_to_num(x, nan=-88.0, posinf=88.0, neginf=-88.0)
            return (np.log(algorithm1.softmax(x)).astype(np.float32),)

    evaluator = ReferenceEvaluator(model("accept_greedy", 5), new_ops=[LogSoftmax])
    place = evaluator.output_names.index("logprob")
    for bad in (np.nan, np.inf):
        feeds = round_feeds(np.random.default_rng(0), 1, 5)
        feeds["logits"][0, 0, [1, 3]] = -np.inf, bad
        with np.errstate(all="ignore"):
            made = evaluator.run(None, {k: feeds[k] for k in evaluator.input_names})
        assert np.isnan(made[place][0])


def test_what_rounding_leaves_of_a_row_is_not_drawn_from() -> None:
    """A residual of 1e-38: its token has no weight in p, and the host would take it for forbidden.

    p = q but for the last bit, so that a uniform next to 1 refuses; then the row draws from p.
    """
    feeds = round_feeds(np.random.default_rng(0), 1, 130)
    feeds["p"][...] = 0
    feeds["p"][0, [0, 70]] = [1, 1.6e-38]
    feeds["q"][...] = 0
    feeds["q"][0, 0] = 1 + 2.0**-22  # a softmax may sum to this
    feeds["draft_tokens"][:], feeds["uniform"][:] = 0, BELOW_ONE
    feeds["race"][:] = 30  # divided by 1e-38 it is infinite in float32
    for rule in RATIO_RULES:
        made = accept(rule, 130, feeds)
        assert made["n_accepted"].tolist() == [0]
        assert made["tokens"].tolist() == [0, 0]
        assert np.isfinite(made["logprob"]).all()


def test_a_residue_of_a_softmax_kernel_counts_as_nothing() -> None:
    """Some leave e^-87 where the exponential of -inf is 0: a draft there is refused at u = 0."""
    feeds = round_feeds(np.random.default_rng(0), 1, 5)
    feeds["p"][0, :5] = [1.0 - 1e-7, 1.6e-38, 1e-8, 1e-8, 1e-8]
    feeds["uniform"][:], feeds["draft_tokens"][:] = 0, 1
    feeds["q"][0, :5] = [0, 1e-30, 0, 0, 1]
    for rule in ("one_hot", "dense"):
        assert accept(rule, 5, feeds)["n_accepted"].tolist() == [0]


@pytest.mark.parametrize("broken", [np.nan, 0.0])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_without_a_distribution_leaves_the_law_alone(rule: str, broken: float) -> None:
    """It is refused in every row, and the row draws from p.

    NaN: the drafting model breaks down. Empty: it has no token that may come, as where only ids may
    that it has never heard of; what `propose` then leaves was accepted however rare it is in p.
    """
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.2, 0.4])
    noise, counts = Noise(5), np.zeros(3)
    judge = Bound(f"accept_{rule}", 3, G=2, M=3)
    judge.x["logits"][:] = np.log(p)
    judge.x["p"][:, :3] = p
    judge.x["n_draft"][:] = 2
    judge.x["q"][0] = broken
    judge.x["q"][1, :3] = q
    for start in range(3_000):
        judge.x["draft_tokens"][:] = start % 3, start // 3 % 3
        noise.uniform(judge.x["uniform"], start, 0)
        noise.exponential(judge.x["race"], start, 0)
        judge()
        assert judge.y["n_accepted"][0] == 0
        counts[judge.y["tokens"][0]] += 1
    result = fit(counts, p)
    assert result.ok, result


def test_what_lies_beyond_the_emitted_rows_changes_no_bit() -> None:
    """A later draft, or a shorter round, must not move an earlier row (greedy output would).

    Not so by blocks, which look at all drafts; there `n_draft` is part of the rule.
    """
    V = 1031
    for rule in ("greedy", "one_hot", "dense", "invariant"):
        feeds = round_feeds(np.random.default_rng(1), 4, V)
        steer(feeds, rule, 4, 2)
        full = accept(rule, V, feeds)
        spoil_unused(feeds, 3)
        feeds["n_draft"][0] = 3
        cut = accept(rule, V, feeds)
        for name, value in full.items():
            assert np.array_equal(value, cut[name]), name

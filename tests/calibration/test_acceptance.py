"""Acceptance of distributions, chains and trees."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_export.calibration import theory
from spec_export.calibration.acceptance import (
    chain_tokens,
    least_spread_rates,
    lenient_greedy_overlap,
    lenient_overlap,
    naive_overlap,
    overlap,
    tree_tokens,
)
from spec_export.calibration.spread import law_of_rates, round_spread
from spec_export.calibration.theory import Costs
from spec_export.engines.errors import RequestError

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.2, 0.4])
# EAGLE (arXiv 2401.15077), chains on MT-bench: n-alphas of Vicuna 7B at temperature 0.
N_ALPHA = (0.79, 0.74, 0.72, 0.73, 0.67)


def test_beta_of_two_distributions():
    assert overlap(P, Q) == pytest.approx(4 / 5)
    assert naive_overlap(P, Q) == pytest.approx(2 / 3)
    assert overlap(P, np.array([0.0, 1.0, 0.0])) == pytest.approx(0.3), "a draft without q"
    assert overlap(np.stack([P, P]), np.stack([Q, P])) == pytest.approx([0.8, 1.0])


def test_beta_is_the_share_of_drafts_that_the_rule_accepts():
    """Draw x from q and accept with min(1, p/q), 200,000 times; bounds of 5 standard errors."""
    generator, n = np.random.default_rng(0), 200_000
    x = generator.choice(3, n, p=Q)
    accepted = generator.random(n) * Q[x] < P[x]
    error = math.sqrt(0.8 * 0.2 / n)
    assert abs(accepted.mean() - overlap(P, Q)) < 5 * error
    wrong = (generator.random(n) < P[x]).mean()  # accepting with p in place of p/q: 0.34
    assert abs(wrong - 0.34) < 5 * error
    assert abs(wrong - overlap(P, Q)) > 5 * error


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=20))
def test_beta_bounds_what_naive_rejection_accepts(weights):
    p, q = np.array(weights, float).T
    if p.sum() and q.sum():
        p, q = p / p.sum(), q / q.sum()
        assert naive_overlap(p, q) <= overlap(p, q) + 1e-12
        assert overlap(p, q) == pytest.approx(overlap(q, p)), "p and q play the same part"


@pytest.mark.parametrize(
    ("lenience", "alpha", "speed"),
    [(1, 0.75, 3.3033), (0.5, 0.75, 3.3033), (0.3, 0.8, 3.8651), (0.1, 0.87, 4.9070)],
)
def test_lenience_table_at_temperature_0(lenience, alpha, speed):
    """Leviathan et al., section A.5: gamma 8, c 0.015; the alpha are the printed ones."""
    assert theory.speedup(alpha, 8, Costs(0.015)) == pytest.approx(speed, abs=5e-5)


def test_lenience_only_adds_acceptance_and_1_is_none():
    assert lenient_overlap(P, Q, 1) == pytest.approx(overlap(P, Q))
    grid = [float(lenient_overlap(P, Q, lenience)) for lenience in (1, 0.5, 0.3, 0.1, 0)]
    assert grid == sorted(grid)
    assert lenient_overlap(P, Q, 0.5) == pytest.approx(1.0)
    assert lenient_overlap(np.array([1.0, 0.0]), np.array([0.25, 0.75]), 0) == pytest.approx(0.25)


def test_lenience_at_temperature_0_takes_what_is_close_to_the_best():
    assert lenient_greedy_overlap(P, Q, 1) == pytest.approx(0.4)
    assert lenient_greedy_overlap(P, Q, 0.6) == pytest.approx(0.6)
    assert lenient_greedy_overlap(P, Q, 0.4) == pytest.approx(1.0)


def test_a_chain_with_rates_by_position():
    """EAGLE reports 3.20 for chains of a length it does not give; the two nearest enclose it."""
    assert chain_tokens(N_ALPHA[:4]) == pytest.approx(3.10, abs=5e-3)
    assert chain_tokens(N_ALPHA) == pytest.approx(3.31, abs=5e-3)


@pytest.mark.parametrize(
    ("unconditional", "length"),
    [
        ((0.7296, 0.5208, 0.3545), 2.60),
        ((0.6541, 0.3993, 0.2020), 2.26),
        ((0.7165, 0.5120, 0.3337), 2.56),
    ],
)
def test_mean_length_of_published_heads(unconditional, length):
    """Shares of rounds that reach a position, and the mean length reported with them."""
    before = (1.0, *unconditional[:-1])
    rates = [now / then for now, then in zip(unconditional, before, strict=True)]
    assert chain_tokens(rates) == pytest.approx(length, abs=6e-3)


@given(st.floats(0, 1), st.integers(0, 12))
def test_a_chain_of_equal_rates_is_equation_1(alpha, gamma):
    wanted = theory.expected_tokens(alpha, gamma)
    assert chain_tokens([alpha] * gamma) == pytest.approx(wanted)
    assert tree_tokens(range(-1, gamma - 1), [alpha] * gamma) == pytest.approx(wanted)


def test_a_tree_by_hand():
    parents, rates = (-1, -1, 0, 0, 1), (0.6, 0.3, 0.5, 0.4, 0.9)
    assert tree_tokens(parents, rates) == pytest.approx(1 + 0.6 + 0.3 + 0.3 + 0.24 + 0.27)


def test_a_tree_by_simulation():
    """Walk down 200,000 times, choosing at most one child; bounds of 5 standard errors."""
    parents, rates, n = (-1, -1, 0, 0, 1), (0.6, 0.3, 0.5, 0.4, 0.9), 200_000
    generator, depths = np.random.default_rng(1), np.zeros(n)
    at = np.full(n, -1)
    for _ in range(3):
        u, moved = generator.random(n), np.zeros(n, bool)
        for node, (parent, rate) in enumerate(zip(parents, rates, strict=True)):
            here = (at == parent) & ~moved
            below = sum(r for k, r in enumerate(rates[:node]) if parents[k] == parent)
            hit = here & (u >= below) & (u < below + rate)
            at, moved = np.where(hit, node, at), moved | hit
        at = np.where(moved, at, -2)
        depths += moved
    error = depths.std() / math.sqrt(n)
    assert abs(1 + depths.mean() - tree_tokens(parents, rates)) < 5 * error


@pytest.mark.parametrize(
    ("parents", "rates"),
    [((0,), (0.5,)), ((-1, 5), (0.5, 0.5)), ((-1,), ()), ((-1, -1), (0.6, 0.5)), ((-1,), (1.5,))],
)
def test_what_is_no_tree_is_refused(parents, rates):
    with pytest.raises(RequestError):
        tree_tokens(parents, rates)


@given(st.integers(1, 8), st.floats(0, 1))
def test_the_least_spread_schedule_has_its_mean_and_the_least_variance(gamma, share):
    accepted = share * gamma
    spread = round_spread(law_of_rates(least_spread_rates(accepted, gamma)))
    fraction = accepted - math.floor(accepted)
    assert spread.mean == pytest.approx(1 + accepted)
    assert spread.deviation**2 == pytest.approx(fraction * (1 - fraction), abs=1e-9)


def test_no_other_schedule_with_that_mean_varies_less():
    """All laws on a grid of twentieths over 0 to 3 accepted drafts with a mean of 1.5."""
    least = round_spread(law_of_rates(least_spread_rates(1.5, 3))).deviation
    grid = itertools.product(range(21), repeat=3)
    laws = [(20 - a - b - c, a, b, c) for a, b, c in grid if a + b + c <= 20]
    spreads = [round_spread([x / 20 for x in law]) for law in laws]
    same = [s.deviation for s in spreads if abs(s.mean - 2.5) < 1e-9]
    assert len(same) > 20 and min(same) == pytest.approx(least)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (P, Q[:2]),
        (P, Q * 2),
        (np.array([1.5, -0.5]), np.array([0.5, 0.5])),
        (np.array([np.nan, 1.0]), np.array([0.5, 0.5])),
        (np.array(1.0), np.array(1.0)),
        (np.zeros((2, 0)), np.zeros((2, 0))),
    ],
)
def test_what_is_no_distribution_is_refused(p, q):
    with pytest.raises(RequestError):
        overlap(p, q)

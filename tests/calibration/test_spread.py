"""How much rounds and times vary."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spec_export.calibration.spread import (
    accepted_law,
    latency_spread,
    round_spread,
    rounds_spread,
)
from spec_export.calibration.theory import Costs, expected_tokens
from spec_export.engines.errors import RequestError

TEXTS = 20_000


def test_the_law_of_accepted_drafts():
    law = accepted_law(0.8, 4)
    assert law == pytest.approx((0.2, 0.16, 0.128, 0.1024, 0.4096))
    mean = sum(n * p for n, p in enumerate(law))
    assert mean == pytest.approx(2.3616)
    assert round_spread(law).mean == pytest.approx(3.3616) == expected_tokens(0.8, 4)
    assert mean / 4 == pytest.approx(0.5904), "accepted over proposed is not alpha"


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
def test_the_variance_of_a_round_grows_with_gamma(alpha):
    """Chen et al., arXiv 2302.01318."""
    deviations = [round_spread(accepted_law(alpha, gamma)).deviation for gamma in range(12)]
    assert deviations == sorted(deviations)
    assert deviations[0] == 0


def _simulated(alpha: float, gamma: int, tokens: int) -> np.ndarray:
    accepted = np.random.default_rng(3).random((TEXTS, tokens, gamma)) < alpha
    emitted = (1 + np.cumprod(accepted, axis=2).sum(axis=2)).cumsum(axis=1)
    return np.asarray((emitted < tokens).sum(axis=1) + 1)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 2), (0.8, 4)])
def test_rounds_of_a_text_by_simulation(alpha, gamma):
    """Bounds of 5 standard errors; that of a deviation is about deviation / sqrt(2 n)."""
    rounds, found = _simulated(alpha, gamma, 64), rounds_spread(accepted_law(alpha, gamma), 64)
    error = rounds.std() / math.sqrt(TEXTS)
    assert abs(rounds.mean() - found.mean) < 5 * error
    assert abs(rounds.std() - found.deviation) < 5 * rounds.std() / math.sqrt(2 * TEXTS)
    assert abs(rounds.mean() - 64 / expected_tokens(alpha, gamma)) > 5 * error, (
        "the last overshoots"
    )


def test_latency_is_that_of_its_rounds():
    costs = Costs(0.1, lambda rows: 1 + 0.05 * rows)
    rounds = rounds_spread(accepted_law(0.7, 3), 100)
    found = latency_spread(0.7, 3, costs, 100)
    assert found.mean == pytest.approx(rounds.mean * costs.round_cost(3))
    assert found.deviation == pytest.approx(rounds.deviation * costs.round_cost(3))


def test_plain_decoding_and_a_perfect_draft_do_not_vary():
    assert latency_spread(0.7, 0, Costs(0.1), 50) == latency_spread(0.1, 0, Costs(3.0), 50)
    assert latency_spread(0.7, 0, Costs(0.1), 50).deviation == 0
    perfect = rounds_spread(accepted_law(1.0, 4), 52)
    assert (perfect.mean, perfect.deviation) == (11, 0)


def test_a_text_of_no_tokens_is_refused():
    with pytest.raises(RequestError, match="tokens"):
        rounds_spread(accepted_law(0.5, 2), 0)

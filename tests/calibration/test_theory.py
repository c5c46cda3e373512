"""The formulas against the tables of the papers, against one another and against simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_export.calibration import theory
from spec_export.calibration.theory import Costs
from spec_export.engines.errors import RequestError

# Leviathan et al., Table 1, with c = c-hat = 0: alpha, gamma, operations, speed.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# Table 4: gamma, alpha, c, printed speed; then S, E, the best gamma and its S by the formulas.
TABLE_4 = [
    (7, 0.75, 0.02, 3.2, 3.1575, 3.5995, 9, 3.1989),
    (7, 0.80, 0.04, 3.3, 3.2509, 4.1611, 9, 3.2817),
    (7, 0.82, 0.11, 2.5, 2.4971, 4.4199, 6, 2.5124),
    (7, 0.62, 0.02, 2.3, 2.2580, 2.5741, 6, 2.2669),
    (5, 0.68, 0.04, 2.4, 2.3467, 2.8160, 6, 2.3507),
    (3, 0.71, 0.11, 2.0, 1.9338, 2.5720, 4, 1.9626),
    (5, 0.65, 0.02, 2.4, 2.4015, 2.6417, 7, 2.4264),
    (5, 0.73, 0.04, 2.6, 2.6193, 3.1432, 7, 2.6602),
    (3, 0.74, 0.11, 2.0, 2.0247, 2.6928, 4, 2.0783),
    (5, 0.53, 0.02, 1.9, 1.8914, 2.0805, 5, 1.8914),
    (3, 0.55, 0.04, 1.8, 1.8026, 2.0189, 4, 1.8193),
    (3, 0.56, 0.11, 1.6, 1.5408, 2.0492, 3, 1.5408),
]
BEST_GAMMAS = {
    0.01: (5, 7, 9, 14, 24, 40),
    0.02: (4, 6, 8, 11, 19, 31),
    0.05: (3, 4, 6, 8, 13, 21),
    0.1: (2, 3, 4, 6, 10, 15),
    0.2: (1, 2, 3, 4, 7, 10),
    0.3: (1, 1, 2, 3, 5, 8),
    0.5: (0, 1, 1, 2, 3, 5),
}
BEST_SPEEDUPS = {
    0.1: (1.458, 1.674, 1.981, 2.470, 3.431, 4.479),
    0.2: (1.25, 1.40, 1.583, 1.868, 2.373, 2.875),
}
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# A measured cost of one pass over m rows per token (quantized weights on a CPU), and v from it.
PER_ROW = (1, 0.605, 0.473, 0.408, 0.374, 0.351, 0.334, 0.32)

alphas = st.floats(0, 1)
gammas = st.integers(0, 40)
ratios = st.floats(0, 5)


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert round(theory.operations(alpha, gamma, 0), 2) == operations
    assert round(theory.speedup(alpha, gamma, Costs(0)), 2) == speed


@pytest.mark.parametrize(
    ("gamma", "alpha", "ratio", "printed", "speed", "tokens", "best", "best_speed"), TABLE_4
)
def test_table_4(gamma, alpha, ratio, printed, speed, tokens, best, best_speed):
    costs = Costs(ratio)
    assert theory.speedup(alpha, gamma, costs) == pytest.approx(speed, abs=5e-5)
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=5e-5)
    assert theory.best_gamma(alpha, costs, 32) == best
    assert theory.speedup(alpha, best, costs) == pytest.approx(best_speed, abs=5e-5)


@pytest.mark.parametrize("row", TABLE_4)
def test_the_printed_speed_is_possible_within_the_rounding_of_alpha_and_c(row):
    """Three rows do not round to what is printed, from the alpha and c that are printed.

    S grows with alpha and falls with c, so its range over the two half digits has its ends at two
    corners; the printed value is itself within half a digit.
    """
    gamma, alpha, ratio, printed = row[:4]
    low = theory.speedup(alpha - 0.005, gamma, Costs(ratio + 0.005))
    high = theory.speedup(alpha + 0.005, gamma, Costs(ratio - 0.005))
    assert low - 0.05 <= printed <= high + 0.05
    assert high - low < 0.1 * printed, "the range is narrow enough to mean something"


def test_exactly_three_rows_of_table_4_fit_only_so():
    off = [row for row in TABLE_4 if round(row[4], 1) != row[3]]
    assert [row[4] for row in off] == [2.3467, 1.9338, 1.5408]


def test_a_bigram_draft():
    assert theory.speedup(0.2, 3, Costs(0)) == pytest.approx(1.248)
    assert theory.most_tokens(0.2) == 1.25


@pytest.mark.parametrize("ratio", BEST_GAMMAS)
def test_best_gammas(ratio):
    found = tuple(theory.best_gamma(alpha, Costs(ratio), 64) for alpha in ALPHAS)
    assert found == BEST_GAMMAS[ratio]


@pytest.mark.parametrize("ratio", BEST_SPEEDUPS)
def test_best_speedups(ratio):
    for alpha, gamma, wanted in zip(ALPHAS, BEST_GAMMAS[ratio], BEST_SPEEDUPS[ratio], strict=True):
        assert theory.speedup(alpha, gamma, Costs(ratio)) == pytest.approx(wanted, abs=5e-4)


def test_chen_table_1_implies_these_tokens_a_loop():
    """Chinchilla: 14.1 ms a step, draft 1.8 ms, K = 4; ms per token of three tasks."""
    costs = Costs(1.8 / 14.1)
    assert costs.round_cost(4) * 14.1 == pytest.approx(21.3)
    for ms, tokens in ((7.52, 2.83), (7.00, 3.04), (5.73, 3.72)):
        implied = 21.3 / ms
        assert implied == pytest.approx(tokens, abs=5e-3)
        speed = implied / costs.round_cost(4)
        assert speed == pytest.approx(14.1 / ms)


@given(alphas, ratios)
def test_one_draft_gains_exactly_where_alpha_is_more_than_c(alpha, ratio):
    """Corollary 3.9, and that it is Theorem 3.8 at gamma 1."""
    one = theory.speedup_of_one_draft(alpha, ratio)
    assert one == pytest.approx(theory.speedup(alpha, 1, Costs(ratio)), rel=1e-12)
    assert (one > 1) == (1 + alpha > 1 + ratio)


@given(alphas, st.floats(0, 2))
def test_some_gamma_gains_exactly_where_alpha_is_more_than_c(alpha, ratio):
    """Corollary 3.9: if gamma drafts gain, one draft does. Near equality rounding decides."""
    if abs(alpha - ratio) > 1e-9:
        assert (theory.best_gamma(alpha, Costs(ratio), 40) > 0) == (alpha > ratio)


@given(alphas, gammas)
def test_expected_tokens_is_equation_1(alpha, gamma):
    found = theory.expected_tokens(alpha, gamma)
    assert 1 <= found <= min(gamma + 1, theory.most_tokens(alpha)) * (1 + 1e-12)
    if alpha < 0.999:  # the quotient cancels digits where alpha is close to 1
        assert found == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-12)


@given(alphas, st.integers(1, 40), ratios)
def test_operations_and_reads(alpha, gamma, ratio):
    found = theory.operations(alpha, gamma, ratio)
    assert found * theory.expected_tokens(alpha, gamma) == pytest.approx(gamma * ratio + gamma + 1)
    assert theory.memory_reads(alpha, gamma) <= 1


@given(alphas, st.integers(1, 40), st.floats(0, 1), st.floats(0, 0.3))
def test_break_even_is_where_nothing_is_gained(alpha, gamma, step, overhead):
    costs = Costs(0, lambda rows: 1 + step * (rows - 1), overhead)
    ratio = theory.break_even_cost_ratio(alpha, gamma, costs)
    if ratio >= 0:
        at = Costs(ratio, costs.verify_cost, overhead)
        assert theory.speedup(alpha, gamma, at) == pytest.approx(1, rel=1e-9)


@given(st.floats(0.01, 0.99))
def test_break_even_over_gammas_is_alpha_where_verifying_is_free(alpha):
    assert theory.break_even_over_gammas(alpha, Costs(0), 32) == pytest.approx(alpha, rel=1e-12)
    assert theory.break_even_alpha(Costs(alpha), 32) == pytest.approx(alpha, abs=1e-9)


def test_no_acceptance_is_enough_for_a_draft_as_slow_as_its_target():
    assert theory.break_even_alpha(Costs(1.0), 32) is None
    assert theory.break_even_alpha(Costs(0.5), 32) == pytest.approx(0.5)


def test_break_even_alpha_parts_gains_from_losses_with_a_measured_cost():
    costs = Costs(0.1, lambda rows: 1 + 0.2 * (rows - 1), 0.05)
    alpha = theory.break_even_alpha(costs, 16)
    assert alpha is not None
    assert theory.best_gamma(alpha - 1e-6, costs, 16) == 0
    assert theory.best_gamma(alpha + 1e-6, costs, 16) > 0


def test_verifying_that_costs_chooses_fewer_drafts():
    v = [cost * rows for rows, cost in enumerate(PER_ROW, start=1)]
    assert v == pytest.approx([1, 1.21, 1.42, 1.63, 1.87, 2.11, 2.34, 2.56], abs=0.01)
    costs = Costs(0.1, lambda rows: v[rows - 1])
    best = theory.best_gamma(0.8, costs, 7)
    assert best < theory.best_gamma(0.8, Costs(0.1), 7)
    gains = [theory.speedup(0.8, gamma, costs) for gamma in range(8)]
    assert gains[best] == max(gains)


def test_the_choice_steps_back_from_a_cliff():
    """int4 kernels: two rows cost little more than one, three cost several times as much."""
    v = {1: 1.0, 2: 1.3, 3: 4.0, 4: 4.1, 5: 4.2}
    assert theory.best_gamma(0.8, Costs(0.01, v.__getitem__), 4) == 1
    assert theory.best_gamma(0.8, Costs(0.01), 4) == 4, "without the cliff"


def test_a_draft_that_is_too_slow_or_too_wrong_is_not_used():
    """An 8B draft for a 70B target where a step of it takes half a step."""
    assert theory.best_gamma(0.5, Costs(0.5), 32) == 0
    assert theory.best_gamma(0.0, Costs(0.0), 32) == 0, "equal is no gain"
    assert theory.speedup(0.5, 4, Costs(0.5)) < 1


def test_a_batch_uses_up_the_free_rows():
    def cost(rows: int) -> float:
        return max(1.0, rows / 16)  # 16 rows cost what one does

    alone = Costs(0.05, theory.batched(cost, 1))
    many = Costs(0.05, theory.batched(cost, 32))
    assert theory.speedup(0.8, 4, alone) == pytest.approx(theory.speedup(0.8, 4, Costs(0.05)))
    assert theory.speedup(0.8, 4, many) == pytest.approx(3.3616 / (0.2 + 5))
    assert theory.best_gamma(0.8, many, 8) == 0


# Enough for the standard error of a mean of rounds to be small; bounds are 5 of them, which a right
# formula misses in 6 of ten million cases.
ROUNDS = 200_000


@pytest.mark.parametrize(("alpha", "gamma"), [*itertools.product((0.3, 0.8), (1, 4, 9))])
def test_expected_tokens_by_simulation(alpha, gamma):
    accepted = np.random.default_rng(gamma).random((ROUNDS, gamma)) < alpha
    emitted = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    error = emitted.std() / math.sqrt(ROUNDS)
    assert abs(emitted.mean() - theory.expected_tokens(alpha, gamma)) < 5 * error
    wrong = alpha * gamma + 1  # a draft after a rejected one is not emitted
    assert gamma == 1 or abs(emitted.mean() - wrong) > 5 * error


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.expected_tokens(1.01, 4),
        lambda: theory.expected_tokens(math.nan, 4),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.expected_tokens(0.5, 2.5),
        lambda: theory.expected_tokens(0.5, True),
        lambda: theory.best_gamma(0.5, Costs(0.1), 10**9),
        lambda: Costs(-0.1),
        lambda: Costs(math.inf),
        lambda: Costs(0.1, overhead=math.nan),
        lambda: theory.break_even_cost_ratio(0.5, 0, Costs(0)),
        lambda: theory.operations(0.5, 3, -1),
        lambda: theory.batched(theory.free_verify, 0),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call):
    with pytest.raises(RequestError, match="expected"):
        call()

"""From evidence of made-up devices to what is known of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spec_export.calibration import theory
from spec_export.calibration.estimate import RecordedRound
from spec_export.calibration.evidence import TimedRound, Times, _scaled, replay, times_of
from spec_export.calibration.forecast import (
    break_even_alpha,
    choose,
    forecast,
    host_times,
    jackknife,
    leave_some_out,
    round_costs,
)
from spec_export.calibration.theory import Costs
from tests.calibration.simulated import MadeUp

FLAT = {1: 20.0, 2: 20.5, 3: 21.0, 5: 22.0}
CLIFF = {1: 10.0, 2: 12.0, 3: 30.0, 5: 32.0}  # kernels that are fast for two rows and no more


def truth(made: MadeUp, gamma: int) -> float:
    """The speed-up of Theorem 3.8 with this device's costs, every pass with drafts."""
    rows = next(g for g in made.gammas if g >= gamma) + 1
    ms = gamma * made.step + made.target[rows] + made.host
    return theory.expected_tokens(made.alpha, gamma) / ms * (made.target[1] + made.plain_host)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("target", "step"), [(FLAT, 1.0), (FLAT, 8.0), (CLIFF, 1.0)])
def test_predictions_are_those_of_the_theory(alpha, target, step):
    """Exact times, simulated acceptance of 3,000 tokens in 750 rounds and more.

    A round's tokens deviate by 1.7 at most (alpha 0.6, gamma 4, E 2.3), so their mean by 0.05 or
    2 %; 5 of these are 10 %.
    """
    made = MadeUp(alpha, target, step, host=0.5, plain_host=0.3)
    for found in forecast(made.texts(), made.widths):
        assert found.speedup.value == pytest.approx(truth(made, found.gamma), rel=0.1)
        assert found.speedup.low <= found.speedup.value <= found.speedup.high


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(
    ("target", "step"), [(FLAT, 1.0), (FLAT, 10.0), (CLIFF, 0.5), (CLIFF, 6.0)]
)
def test_the_choice_is_the_oracles(alpha, target, step):
    """A draft with a set acceptance on a device with set costs: gamma 0 exactly where S < 1.

    Where two gammas are within 2 % of one another either is right.
    """
    made = MadeUp(alpha, target, step, host=0.2, plain_host=0.2)
    chosen = choose(forecast(made.texts(40), made.widths))
    speeds = [1.0, *(truth(made, gamma) for gamma in range(1, 5))]
    assert speeds[chosen] > 0.98 * max(speeds)


def test_the_cliff_is_avoided():
    made = MadeUp(0.8, CLIFF, 0.5)
    assert choose(forecast(made.texts(), made.widths)) == 1
    assert choose(forecast(MadeUp(0.8, FLAT, 0.5).texts(), made.widths)) == 4


def test_a_large_draft_gains_nothing():
    """An 8B draft for a 70B target on one device: a step of it takes a third of a target step."""
    made = MadeUp(0.55, {1: 30.0, 2: 33.0, 3: 36.0, 5: 42.0}, step=10.0)
    found = forecast(made.texts(), made.widths)
    assert choose(found) in (0, 1)
    assert all(f.speedup.value < 1.2 for f in found)
    assert choose(forecast(MadeUp(0.3, made.target, 10.0).texts(), made.widths)) == 0


def test_look_up_that_seldom_finds_drafts_is_weighed_as_it_is():
    """With drafts in a third of the passes the rest are exact plain steps of two rows."""
    made = MadeUp(0.7, FLAT, found=1 / 3)
    best = next(f for f in forecast(made.texts(), made.widths) if f.gamma == 4)
    passes = [r.n_draft > 0 for text in made.texts() for r in replay(text.rounds, 4)]
    drafted = sum(passes) / len(passes)
    assert drafted == pytest.approx(1 / 3, abs=0.06), "5 errors of a share of 1,900 passes"
    tokens = drafted * theory.expected_tokens(0.7, 4) + (1 - drafted)
    ms = drafted * 22.0 + (1 - drafted) * 20.5
    assert best.tokens_a_pass == pytest.approx(tokens, rel=0.05)
    assert best.pass_ms == pytest.approx(ms, rel=1e-6)


def test_what_parts_do_not_explain_is_the_hosts():
    made = MadeUp(0.5, FLAT, step=2.0, host=3.0, plain_host=1.0)
    costs = round_costs(made.texts(4), made.widths)
    assert costs.round(3) == pytest.approx(3 * 2.0 + 22.0 + 3.0)
    assert costs.explained(3) == pytest.approx(3 * 2.0 + 22.0)
    found = host_times(made.texts(4), made.widths)
    assert found is not None and found.median == pytest.approx(3.0)


def test_rounds_count_as_they_were_timed_and_not_as_the_sum_of_their_parts():
    """Parts may take longer alone than in a round, where memory is warm from the one before."""
    made = MadeUp(0.6, FLAT, step=2.0, host=-1.5, plain_host=-1.0)
    for found in forecast(made.texts(), made.widths):
        rows = made.widths.rows(found.gamma)
        assert found.pass_ms == pytest.approx(found.gamma * 2.0 + FLAT[rows] - 1.5)
    rest = host_times(made.texts(4), made.widths)
    assert rest is not None and rest.median == 0


def test_a_round_that_was_seldom_timed_is_made_of_its_parts():
    made = MadeUp(0.6, FLAT, step=2.0, host=2.0)
    texts = [replace(text, shorter=text.shorter[:1]) for text in made.texts(4)]
    costs = round_costs(texts, made.widths)
    assert set(costs.rounds) == {4}
    assert costs.round(4) == pytest.approx(32.0)
    assert costs.round(2) == pytest.approx((4.0 + 21.0) * 32.0 / 30.0)


def test_break_even_alpha_is_where_the_theory_puts_it():
    made = MadeUp(0.5, FLAT, step=5.0, host=1.0)
    wanted = theory.break_even_alpha(
        Costs(0.25, lambda rows: FLAT[next(g for g in (1, 2, 4) if g >= rows - 1) + 1] / 20, 0.05),
        4,
    )
    assert break_even_alpha(made.texts(4), made.widths) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("found", [0.2, 0.4, 0.8])
def test_break_even_alpha_counts_the_passes_without_drafts(found):
    """Look-up finds drafts here and there; a pass without costs more than a plain step."""
    slow = {1: 20.0, 2: 23.0, 3: 26.0, 5: 30.0}
    least = break_even_alpha(
        MadeUp(0.5, slow, host=0.5, found=found).texts(40), MadeUp(0.5, slow).widths
    )
    assert least is not None

    def best(alpha: float) -> float:
        made = MadeUp(alpha, slow, host=0.5, found=found)
        return max(f.speedup.value for f in forecast(made.texts(60), made.widths))

    assert best(least + 0.06) > 1 > best(least - 0.06)


def test_a_text_is_replayed_with_any_gamma():
    """By hand: 4 drafts each, of which these are accepted; the last token of the second ends it."""
    rounds = [TimedRound(4, n, n + 1, 1.0) for n in (4, 3, 2, 1, 0)]
    assert replay(rounds, 4) == [RecordedRound(4, 4, 5)]
    assert replay(rounds, 2) == [RecordedRound(2, 2, 3), RecordedRound(2, 1, 2)]
    assert replay(rounds, 1) == [RecordedRound(1, 1, 2)] * 2 + [RecordedRound(1, 0, 1)]
    cut = [TimedRound(4, 3, 2, 1.0), TimedRound(0, 0, 1, 1.0)]
    assert replay(cut, 4) == [RecordedRound(4, 3, 2)]
    assert not replay(cut, 4)[0].is_rejected
    assert replay(cut, 1) == [RecordedRound(1, 1, 2)]


def test_passages_that_are_copied_are_no_geometric_law():
    """Half the tokens in runs where every draft is right, half where none is.

    A small gamma spends more passes inside the runs, and a prediction from acceptance by position
    at gamma 4 would give gamma 1 far too little.
    """
    rounds = []
    for token in range(400):
        left = 19 - token % 20 if token % 40 < 20 else 0
        rounds.append(TimedRound(4, min(4, left), min(4, left) + 1, 25.0))
    tokens = {g: 400 / len(replay(rounds, g)) for g in (1, 4)}
    assert tokens[4] == pytest.approx(40 / (20 / 5 + 20), rel=0.02)
    assert tokens[1] == pytest.approx(40 / (20 / 2 + 20), rel=0.02)
    first = [r.n_accepted > 0 for r in replay(rounds, 4)]
    assert 1 + sum(first) / len(first) < 0.9 * tokens[1], "what position 1 at gamma 4 would say"


def test_a_machine_that_changes_from_text_to_text_drops_out():
    """Three times as slow in some minutes as in others: neither predictions nor intervals move."""
    made, generator = MadeUp(0.6, FLAT, 1.0, host=0.5, plain_host=0.5), np.random.default_rng(2)
    texts = [
        _scaled(made.text(seed, noise=0.02), float(generator.uniform(1, 3))) for seed in range(14)
    ]
    steady = forecast([made.text(seed, noise=0.02) for seed in range(14)], made.widths)
    for found, wanted in zip(forecast(texts, made.widths), steady, strict=True):
        assert found.speedup.value == pytest.approx(wanted.speedup.value, rel=0.02)
        assert found.speedup.high == pytest.approx(wanted.speedup.high, rel=0.03)


def test_drift_of_the_whole_machine_cancels():
    """Texts measured while everything takes twice as long change no ratio."""
    made, slow = MadeUp(0.6, FLAT, 1.0), {m: 2 * ms for m, ms in FLAT.items()}
    halves = [*made.texts(10), *MadeUp(0.6, slow, 2.0).texts(10)]
    for found, wanted in zip(
        forecast(halves, made.widths), forecast(made.texts(10), made.widths), strict=True
    ):
        assert found.speedup.value == pytest.approx(wanted.speedup.value, rel=1e-6)


@pytest.mark.parametrize("count", [6, 30])
def test_the_interval_holds_as_often_as_it_says(count):
    """A ratio of noisy sums, 1,000 times; the standard error of a share of 95 % is 0.7 %.

    The jackknife of a smooth ratio is near its nominal coverage: 4 errors and 1 % for few texts.
    """
    generator, held = np.random.default_rng(count), 0
    for _ in range(1000):
        pairs = [
            (3.0 + 0.6 * generator.standard_normal(), 2.0 + 0.3 * generator.standard_normal())
            for _ in range(count)
        ]
        ratios = [
            sum(a for a, _ in used) / sum(b for _, b in used)
            for used in [pairs, *leave_some_out(pairs)]
        ]
        found = jackknife(ratios[0], ratios[1:])
        held += found.low <= 1.5 <= found.high
    assert abs(held / 1000 - 0.95) < 0.04


def test_many_texts_are_left_out_in_groups():
    """So that a thousand of them are no thousand forecasts; each is left out exactly once."""
    groups = leave_some_out(range(1000))
    assert len(groups) == 20
    assert sorted(n for group in groups for n in set(range(1000)) - set(group)) == list(range(1000))
    assert leave_some_out([1, 2, 3]) == [[2, 3], [1, 3], [1, 2]]


def test_times_are_medians_and_quartiles():
    assert times_of([1.0, 2.0, 3.0, 4.0, 100.0]) == Times(3.0, 2.0, 4.0, 5)
    assert times_of([7.0]) == Times(7.0, 7.0, 7.0, 1)

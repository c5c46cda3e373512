"""Speculation at set acceptances: what made-up laps say, and what real ones are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from spec_export.calibration import evidence, synthetic, theory
from spec_export.calibration.estimate import Trials
from spec_export.calibration.forecast import Widths
from spec_export.calibration.measure import Race, Task
from spec_export.calibration.prompts import Prompt, encode_prompts
from spec_export.calibration.synthetic import (
    Lap,
    SyntheticEvidence,
    check_task,
    measure_synthetic,
    parse_alphas,
)
from spec_export.calibration.synthetic_report import as_json, remarks, terminal_lines, verdict
from spec_export.calibration.synthetic_result import SyntheticResult, synthetic_result
from spec_export.engines.errors import RequestError
from spec_export.engines.manifest import DeviceSpec
from spec_export.runtime import Sampling

DEVICE = DeviceSpec("onnxruntime", "1.32.0", "A processor", "x86_64", 2)
GAMMAS, ALPHAS = (1, 2, 4), (0.1, 0.5, 0.95)
# Milliseconds. A cliff at three rows; what judging takes, and what a round does besides.
TARGET, ACCEPT, REST = {1: 10.0, 2: 11.0, 3: 19.0, 5: 20.0}, 0.25, 0.5
PLAIN = 10.5


def round_ms(gamma: int) -> float:
    return TARGET[gamma + 1] + ACCEPT + REST


def made_up(passes: int = 1000, widths: Widths | None = None) -> SyntheticEvidence:
    """Laps of a device on which everything is exactly as the theory has it."""
    laps = []
    for alpha in ALPHAS:
        for gamma in GAMMAS:
            tokens = round(theory.expected_tokens(alpha, gamma) * passes)
            accepted = tokens - passes
            trials = Trials(accepted, round(accepted * (1 - alpha) / alpha))
            race = Race(tokens, passes * round_ms(gamma), tokens * PLAIN)
            laps += [Lap(alpha, gamma, race, passes, passes * gamma, trials, False)] * 2
    parts = {evidence.target_pass(rows): ms for rows, ms in TARGET.items()}
    parts |= {evidence.accept(gamma + 1): ACCEPT for gamma in GAMMAS}
    return SyntheticEvidence(tuple(laps), parts, GAMMAS, widths or Widths(GAMMAS, 2))


def costs(ratio: float = 0.0) -> theory.Costs:
    """Of the same device, in plain steps."""
    rounds = {gamma + 1: round_ms(gamma) / PLAIN for gamma in GAMMAS} | {4: round_ms(4) / PLAIN}
    return theory.Costs(ratio * TARGET[1] / PLAIN, rounds.__getitem__)


def task(**sampling: object) -> Task:
    prompts = tuple(Prompt("all", text) for text in ("a", "b"))
    return Task(prompts, ((1,), (2,)), 64, Sampling(**sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [None, 0.0, 0.3])
def test_a_device_that_is_as_the_theory_has_it_is_predicted(ratio):
    """Every speed-up, the best gamma, and where it begins to pay; what a draft takes is added."""
    result, expected = synthetic_result(made_up(), ratio), costs(ratio or 0.0)
    assert [(s.alpha, s.gamma) for s in result.speeds] == [(a, g) for a in ALPHAS for g in GAMMAS]
    for speed in result.speeds:
        wanted = theory.speedup(speed.alpha, speed.gamma, expected)
        assert speed.predicted == pytest.approx(wanted, rel=1e-9)
        assert speed.speedup == pytest.approx(wanted, rel=2e-3), "whole tokens"
        assert speed.measured.value == pytest.approx(
            theory.speedup(speed.alpha, speed.gamma, costs()), rel=2e-3
        )
        assert speed.accepted is not None
        assert speed.accepted.low <= speed.alpha <= speed.accepted.high
        assert speed.tokens_a_pass == pytest.approx(speed.expected_tokens, rel=2e-3)
        assert (speed.computed is None) == (ratio is None)
    for best in result.best:
        oracle = theory.best_gamma(best.alpha, expected, 4)
        assert best.measured_gamma == best.predicted_gamma == oracle
    assert result.break_even_alpha == theory.break_even_alpha(expected, 4)


def test_the_best_gamma_goes_from_none_over_one_to_many():
    """The made-up device is of some use: no gamma is best everywhere."""
    assert [best.measured_gamma for best in synthetic_result(made_up()).best] == [0, 1, 4]


def test_costs_of_passes_are_shown_by_gamma():
    found = synthetic_result(made_up()).passes
    assert [(p.gamma, p.rows, p.target_ms) for p in found] == [(1, 2, 11), (2, 3, 19), (4, 5, 20)]
    assert [p.verify_cost for p in found] == pytest.approx([1.1, 1.9, 2.0])
    assert [p.round_cost for p in found] == pytest.approx([round_ms(g) / PLAIN for g in GAMMAS])


def test_where_all_rounds_take_the_widest_pass_they_cost_as_much():
    """An engine whose rows have the same bits at one width alone."""
    found = synthetic_result(made_up(widths=Widths((4,), 5))).passes
    assert [(p.gamma, p.rows, p.target_ms) for p in found] == [(1, 5, 20), (2, 5, 20), (4, 5, 20)]


def test_a_device_on_which_nothing_pays_is_told_so():
    slow = made_up()
    laps = tuple(
        replace(lap, race=replace(lap.race, speculative_ms=lap.race.speculative_ms * 9))
        for lap in slow.laps
    )
    result = synthetic_result(replace(slow, laps=laps))
    assert result.break_even_alpha is None
    assert {best.measured_gamma for best in result.best} == {0}
    assert verdict(result).startswith("no acceptance makes speculation pay here")


@pytest.mark.parametrize("ratio", [None, 0.3])
def test_the_report_fits_a_terminal_and_says_what_is_computed(ratio):
    result = synthetic_result(made_up(), ratio)
    lines = terminal_lines(result, DEVICE, task())
    assert lines[0] == verdict(result)
    drawn = lines[1 : next(n for n, line in enumerate(lines) if line.startswith("- "))]
    assert max(map(len, drawn)) < 80
    assert sum(line.startswith("->") for line in drawn) == sum(
        b.measured_gamma > 0 for b in result.best
    )
    said = " ".join(remarks(result, DEVICE, task()))
    assert ("computed, not measured" in said) == (ratio is not None)
    assert ("give --cost-ratio" in said) == (ratio is None)
    assert "at alpha 0.1: do not speculate, as predicted" in said
    found = as_json(result, DEVICE, task())
    assert len(found["speeds"]) == 9 and found["verdict"] == verdict(result)


def test_texts_that_took_another_turn_are_counted():
    found = made_up()
    laps = (replace(found.laps[0], has_departed=True), *found.laps[1:])
    said = remarks(synthetic_result(replace(found, laps=laps)), DEVICE, task())
    assert any("1 of 18 texts took another turn" in line for line in said)


@pytest.mark.parametrize("laps", [0, 1])
def test_too_few_texts_are_refused(laps):
    found = made_up()
    with pytest.raises(RequestError, match="give other prompts"):
        synthetic_result(replace(found, laps=found.laps[:laps]))


def test_shares_as_typed():
    assert parse_alphas("0.8,0.2, 1,0") == (0.0, 0.2, 0.8, 1.0)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "with commas between"),
        ("0.2,", "with commas between"),
        ("0.2;0.5", "with commas between"),
        ("0.2,x", "with commas between"),
        ("1.5", "alpha is 1.5"),
        ("-0.1", "alpha is -0.1"),
        ("0.2,nan", "alpha is nan"),
        ("inf", "alpha is inf"),
        ("1e999", "alpha is inf"),
        ("0.2,0.20", "each once"),
        (",".join(f"0.{n:03}" for n in range(21)), "up to 20"),
    ],
)
def test_shares_that_are_none_are_refused(text, word):
    with pytest.raises(RequestError, match=word):
        parse_alphas(text)


def test_a_rule_under_which_texts_depend_on_drafts_is_refused():
    for rule in ("reject", "block"):
        with pytest.raises(RequestError, match=f"under rule {rule} they do"):
            check_task(task(temperature=0.5, seed=1, rule=rule))
    check_task(task(temperature=0.5, seed=1, rule="invariant"))
    check_task(task())


# --- on the tiny pair -----------------------------------------------------------------------------


def real(opened, alphas=(0.3, 0.9), **sampling: object) -> tuple[SyntheticEvidence, Task]:
    texts = ("In the beginning", "And it came to pass", "The king said unto")
    prompts = [Prompt("all", text) for text in texts]
    ids = tuple(map(tuple, encode_prompts(opened, prompts)))
    asked = Task(tuple(prompts), ids, 60, Sampling(**sampling))  # type: ignore[arg-type]
    return measure_synthetic(opened, asked, alphas), asked


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3, "rule": "invariant"}])
@pytest.mark.parametrize("draft", ["pair", "ngram"])
def test_laps_have_the_acceptance_that_was_set(open_once, build_tiny, draft, sampling):
    """Whatever the bundle's own draft; every text is as long as was asked for."""
    found, asked = real(open_once(build_tiny(draft)), **sampling)
    assert [(lap.alpha, lap.gamma) for lap in found.laps] == [(0.3, 4), (0.9, 4)] * 3
    assert all(lap.race.tokens == asked.tokens - 1 for lap in found.laps)
    assert not any(lap.has_departed for lap in found.laps)
    assert all(min(lap.race.speculative_ms, lap.race.plain_ms) > 0 for lap in found.laps)
    result = synthetic_result(found)
    assert isinstance(result, SyntheticResult)
    for speed in result.speeds:
        trials = sum((lap.trials for lap in found.laps if lap.alpha == speed.alpha), Trials(0, 0))
        reach = 4.9 * math.sqrt(trials.tested * speed.alpha * (1 - speed.alpha))  # 1e-6
        assert abs(trials.accepted - speed.alpha * trials.tested) <= reach
    low, high = result.speeds
    assert high.tokens_a_pass > 2 * low.tokens_a_pass


def test_a_text_that_takes_another_turn_is_timed_up_to_there(open_once, tiny_bundle, monkeypatch):
    """As on an engine whose bits depend on the width of a pass."""
    right = synthetic.record_text

    def turned(session, prompt, request):
        text = right(session, prompt, request)
        text[len(prompt) + 20] = (text[len(prompt) + 20] + 1) % 900
        return text

    monkeypatch.setattr(synthetic, "record_text", turned)
    found, asked = real(open_once(tiny_bundle))
    assert all(lap.has_departed and 20 <= lap.race.tokens <= 24 for lap in found.laps)
    result = synthetic_result(found)
    assert (result.departed, result.texts) == (6, 6)
    assert any("6 of 6 texts took another turn" in r for r in remarks(result, DEVICE, asked))


def test_drafts_right_at_a_low_acceptance_are_right_at_a_high_one(open_once, tiny_bundle):
    """So that alphas are compared on the same draws: no more passes at the higher one."""
    found, _ = real(open_once(tiny_bundle), tuple(np.linspace(0, 1, 6)))
    for start in range(0, len(found.laps), 6):
        passes = [lap.passes for lap in found.laps[start : start + 6]]
        assert passes == sorted(passes, reverse=True)
        assert passes[0] == 59 and passes[-1] == 12

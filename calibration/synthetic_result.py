"""What laps with synthetic drafts say: speed-up by acceptance and gamma, measured and predicted.

Beside what was measured stands what Theorem 3.8 of arXiv 2211.17192 says,

    S = E / (gamma c + v(gamma+1) + overhead)

with v from times of target passes by themselves, as overhead what rounds take besides, and c = 0
unless a cost of the draft is given. That one is not measured: its time is added to the speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from spec_export.calibration import evidence, theory
from spec_export.calibration.calibrate import measured_speedup
from spec_export.calibration.estimate import Interval, Trials, wilson
from spec_export.calibration.synthetic import Lap, SyntheticEvidence
from spec_export.calibration.theory import Costs
from spec_export.engines.errors import RequestError


@dataclass(frozen=True)
class PassCost:
    """What a round of `gamma` drafts takes, with drafts that cost nothing.

    Attributes:
        gamma: drafts.
        rows: of the pass that verifies them.
        target_ms: T(rows), of that pass by itself.
        verify_cost: v, over T of the fastest plain step.
        round_cost: of the whole round, over the whole of a plain step.
    """

    gamma: int
    rows: int
    target_ms: float
    verify_cost: float
    round_cost: float


@dataclass(frozen=True)
class SyntheticSpeed:
    """One alpha with one gamma.

    Attributes:
        alpha: that was set.
        gamma: drafts a round.
        accepted: share of tested drafts that were accepted; None where none was tested.
        expected_tokens: E, tokens a round by Equation 1.
        tokens_a_pass: as counted; the last rounds of a text are shorter.
        measured: speed-up over the fastest plain decoding.
        predicted: the same by theory; the draft's time is in it where one was given.
        computed: measured, with the time of a draft added; None without a cost ratio.
    """

    alpha: float
    gamma: int
    accepted: Interval | None
    expected_tokens: float
    tokens_a_pass: float
    measured: Interval
    predicted: float
    computed: float | None

    @property
    def speedup(self) -> float:
        """By which gammas are compared: measured, a draft's time included where one was given."""
        return self.measured.value if self.computed is None else self.computed


@dataclass(frozen=True)
class Best:
    """The gamma to take at an alpha; 0: do not speculate."""

    alpha: float
    measured_gamma: int
    predicted_gamma: int


@dataclass(frozen=True)
class SyntheticResult:
    """The whole answer.

    Attributes:
        cost_ratio: time of a draft step over that of a target step that was supposed; None: free.
        plain_ms: of a plain step, with all that belongs to it.
        target_ms: T(1), of its pass by itself.
        passes: cost of rounds by gamma.
        speeds: by alpha and gamma.
        best: by alpha.
        break_even_alpha: speculation pays above, as predicted; None where it never does.
        departed: texts that turned out another than the recorded one, of all that were decoded.
        texts: all that were decoded with drafts.
    """

    cost_ratio: float | None
    plain_ms: float
    target_ms: float
    passes: tuple[PassCost, ...]
    speeds: tuple[SyntheticSpeed, ...]
    best: tuple[Best, ...]
    break_even_alpha: float | None
    departed: int
    texts: int


def synthetic_result(found: SyntheticEvidence, cost_ratio: float | None = None) -> SyntheticResult:
    """What the measurement says.

    Args:
        found: measured.
        cost_ratio: c, time of a draft step over T(1); None: drafts cost nothing.

    Raises:
        RequestError: fewer than two texts had tokens to time.
    """
    laps, gammas, widths = found.laps, found.gammas, found.widths
    if not laps:
        raise RequestError("no text went on past its first token: give other prompts")
    plain_ms = statistics.median([lap.race.plain_ms / lap.race.tokens for lap in laps])
    single_ms = found.parts_ms[evidence.target_pass(widths.fastest_rows)]
    round_ms = _round_ms(found)
    draft_ms = (cost_ratio or 0.0) * single_ms
    costs = Costs(
        draft_ms / plain_ms, lambda rows: round_ms[found.widths.rows(rows - 1)] / plain_ms
    )
    speeds = []
    for alpha in sorted({lap.alpha for lap in laps}):
        for gamma in gammas:
            these = [lap for lap in laps if (lap.alpha, lap.gamma) == (alpha, gamma)]
            added = None if cost_ratio is None else draft_ms
            speeds.append(_speed(alpha, gamma, these, costs, added))
    return SyntheticResult(
        cost_ratio=cost_ratio,
        plain_ms=plain_ms,
        target_ms=single_ms,
        passes=tuple(
            PassCost(
                gamma=gamma,
                rows=widths.rows(gamma),
                target_ms=_target_ms(found, gamma),
                verify_cost=_target_ms(found, gamma) / single_ms,
                round_cost=round_ms[widths.rows(gamma)] / plain_ms,
            )
            for gamma in gammas
        ),
        speeds=tuple(speeds),
        best=tuple(_best(speeds, alpha) for alpha in sorted({s.alpha for s in speeds})),
        break_even_alpha=theory.break_even_alpha(costs, gammas[-1]),
        departed=sum(lap.has_departed for lap in laps),
        texts=len(laps),
    )


def _target_ms(found: SyntheticEvidence, gamma: int) -> float:
    """T of the pass that verifies so many drafts."""
    return found.parts_ms[evidence.target_pass(found.widths.rows(gamma))]


def _round_ms(found: SyntheticEvidence) -> dict[int, float]:
    """Time of a round by the rows of its pass: its parts, and what is left of rounds on average.

    What is left is one number for all: of whole texts of every alpha and gamma, so that nothing
    here was fitted to a single one of them.
    """
    parts = {}
    for gamma in found.widths.gammas:
        accept = found.parts_ms.get(evidence.accept(gamma + 1), 0.0)
        parts[gamma + 1] = _target_ms(found, gamma) + accept
    rests = [
        lap.race.speculative_ms / lap.passes - parts[found.widths.rows(lap.gamma)]
        for lap in found.laps
    ]
    rest = max(0.0, statistics.median(rests))
    return {rows: ms + rest for rows, ms in parts.items()}


def _with_draft(laps: Sequence[Lap], draft_ms: float) -> float:
    """Speed-up with so much time for every draft added to what was measured."""
    speculative = sum(lap.race.speculative_ms + lap.drafted * draft_ms for lap in laps)
    return sum(lap.race.plain_ms for lap in laps) / speculative


def _speed(
    alpha: float, gamma: int, laps: Sequence[Lap], costs: Costs, draft_ms: float | None
) -> SyntheticSpeed:
    trials = sum((lap.trials for lap in laps), Trials(0, 0))
    measured = measured_speedup([lap.race for lap in laps])
    return SyntheticSpeed(
        alpha=alpha,
        gamma=gamma,
        accepted=wilson(trials.accepted, trials.tested) if trials.tested else None,
        expected_tokens=theory.expected_tokens(alpha, gamma),
        tokens_a_pass=sum(lap.race.tokens for lap in laps) / sum(lap.passes for lap in laps),
        measured=measured,
        predicted=theory.speedup(alpha, gamma, costs),
        computed=None if draft_ms is None else _with_draft(laps, draft_ms),
    )


def _best(speeds: Sequence[SyntheticSpeed], alpha: float) -> Best:
    """By what was measured and by theory; of what gains nothing, none."""
    here = [found for found in speeds if found.alpha == alpha]
    measured = max(here, key=lambda found: found.speedup)
    predicted = max(here, key=lambda found: found.predicted)
    return Best(
        alpha,
        measured.gamma if measured.speedup > 1 else 0,
        predicted.gamma if predicted.predicted > 1 else 0,
    )

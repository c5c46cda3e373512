"""From evidence to a choice: predicted speed-up of every gamma, with an interval, and the best.

A pass of a decoded text has `d` drafts (all that were asked for with a drafting model; with look-up
often none). At a gamma it would have min(d, gamma). It then emits

    1 + r1 (1 + r2 (1 + ...))        Equation 1 of arXiv 2211.17192, with a rate for each position

tokens and takes the draft's passes, a target pass over the narrowest built width, and the rest of a
round. The speed-up is tokens over time, by those of the fastest plain decoding: Theorem 3.8 with
measured costs in place of c and 1.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spec_export.calibration import evidence, theory
from spec_export.calibration.acceptance import chain_tokens
from spec_export.calibration.estimate import (
    Interval,
    student_t,
    trials_by_position,
    trials_of,
)
from spec_export.calibration.evidence import TextEvidence, Times, pooled_parts, pooled_plain

T = TypeVar("T")
_FEWEST_TRIALS = 30  # of a position, to take its own rate in place of that of all positions
_CONFIDENCE = 0.95
_MOST_GROUPS = 20  # left out one at a time; more make the interval no better, only slower


@dataclass(frozen=True)
class Widths:
    """What verify passes a bundle has.

    Attributes:
        gammas: that they were built for, ascending.
        plain_rows: rows of a step without drafts inside a speculative run.
        fastest_rows: rows of a step of the fastest plain decoding.
    """

    gammas: tuple[int, ...]
    plain_rows: int
    fastest_rows: int = 1

    def rows(self, n_draft: int) -> int:
        """Rows of the pass that verifies so many drafts."""
        return next(gamma for gamma in self.gammas if gamma >= n_draft) + 1


@dataclass(frozen=True)
class GammaForecast:
    """What a gamma is predicted to do.

    Attributes:
        gamma: drafts a round.
        tokens_a_pass: tokens that a target pass emits on average, passes without drafts included.
        pass_ms: its time, with all that belongs to it.
        speedup: over the fastest plain decoding.
    """

    gamma: int
    tokens_a_pass: float
    pass_ms: float
    speedup: Interval


@dataclass(frozen=True)
class RoundCosts:
    """Times of a round's parts in milliseconds, as a prediction uses them.

    Attributes:
        target: of a target pass by rows.
        accept: of judging by rows; 0 where it was not measured and is part of `host`.
        catch_up: of the draft's first pass in a round.
        step: of every other.
        propose: of choosing a draft's token; 0 like `accept`.
        host: of what is left of a round.
        plain: of a step of the fastest plain decoding, with all that belongs to it.
        plain_host: of what is left of such a step beside its pass.
    """

    target: dict[int, float]
    accept: dict[int, float]
    catch_up: float
    step: float
    propose: float
    host: float
    plain: float
    plain_host: float

    def drafting(self, n_draft: int) -> float:
        """Time to make so many drafts."""
        passes = self.catch_up + (n_draft - 1) * self.step
        return passes + n_draft * self.propose if n_draft else 0.0

    def round(self, n_draft: int, widths: Widths) -> float:
        """Time of a pass with so many drafts."""
        if n_draft == 0:
            return self.target[widths.plain_rows] + self.plain_host
        rows = widths.rows(n_draft)
        judged = self.target[rows] + self.accept.get(rows, 0.0)
        return self.drafting(n_draft) + judged + self.host


def round_costs(texts: Sequence[TextEvidence], widths: Widths) -> RoundCosts:
    """Costs from the medians of measured times; what parts do not explain is the host's."""
    parts = {name: times.median for name, times in pooled_parts(texts).items()}
    rows = sorted({widths.fastest_rows, widths.plain_rows, *(gamma + 1 for gamma in widths.gammas)})
    plain = pooled_plain(texts).median
    costs = RoundCosts(
        target={m: parts[evidence.target_pass(m)] for m in rows},
        accept={m: parts[name] for m in rows if (name := evidence.accept(m)) in parts},
        catch_up=parts.get(evidence.CATCH_UP, 0.0),
        step=parts.get(evidence.STEP, 0.0),
        propose=parts.get(evidence.PROPOSE, 0.0),
        host=0.0,
        plain=plain,
        plain_host=max(0.0, plain - parts[evidence.target_pass(widths.fastest_rows)]),
    )
    rests = [
        r.ms - costs.round(r.n_draft, widths) for text in texts for r in text.rounds if r.n_draft
    ]
    host = max(0.0, statistics.median(rests)) if rests else 0.0
    return RoundCosts(**{**vars(costs), "host": host})


def rates_of(texts: Sequence[TextEvidence], gamma: int) -> tuple[float, ...]:
    """Acceptance by position; where a position was seldom tested, that of all positions."""
    recorded = [r.recorded for text in texts for r in text.rounds]
    total = trials_of(recorded)
    alpha = total.accepted / total.tested if total.tested else 0.0
    return tuple(
        found.accepted / found.tested if found.tested >= _FEWEST_TRIALS else alpha
        for found in trials_by_position(recorded, gamma)
    )


@dataclass(frozen=True)
class Fit:
    """What a prediction needs of some texts.

    Attributes:
        costs: times of a round's parts.
        rates: acceptance by position.
        drafted: target passes by the drafts they had.
        widths: of the bundle.
    """

    costs: RoundCosts
    rates: tuple[float, ...]
    drafted: Mapping[int, int]
    widths: Widths

    def predict(self, gamma: int) -> tuple[float, float]:
        """Tokens and milliseconds of a target pass, passes without drafts included."""
        passes = sum(self.drafted.values())
        tokens = ms = 0.0
        for n_draft, times in self.drafted.items():
            n = min(n_draft, gamma)
            tokens += times * chain_tokens(self.rates[:n])
            ms += times * self.costs.round(n, self.widths)
        return tokens / passes, ms / passes

    def speedup(self, gamma: int) -> float:
        """Over the fastest plain decoding."""
        tokens, ms = self.predict(gamma)
        return tokens / ms * self.costs.plain


def fit(texts: Sequence[TextEvidence], widths: Widths) -> Fit:
    """Summarize texts."""
    drafted = Counter(r.n_draft for text in texts for r in text.rounds)
    rates = rates_of(texts, widths.gammas[-1])
    return Fit(round_costs(texts, widths), rates, drafted, widths)


def forecast(texts: Sequence[TextEvidence], widths: Widths) -> tuple[GammaForecast, ...]:
    """Every gamma from 1 to the largest that was built.

    Args:
        texts: at least two, with rounds each.
        widths: of the bundle.
    """
    whole, parts = fit(texts, widths), [fit(group, widths) for group in leave_some_out(texts)]
    found = []
    for gamma in range(1, widths.gammas[-1] + 1):
        speed = jackknife(whole.speedup(gamma), [part.speedup(gamma) for part in parts])
        found.append(GammaForecast(gamma, *whole.predict(gamma), speed))
    return tuple(found)


def leave_some_out(texts: Sequence[T]) -> list[list[T]]:
    """All texts but one, for each; where there are many, all but those dealt to a group."""
    assert len(texts) > 1
    count = min(len(texts), _MOST_GROUPS)
    return [[text for n, text in enumerate(texts) if n % count != i] for i in range(count)]


def jackknife(value: float, without: Sequence[float]) -> Interval:
    """A positive number with an interval, from its values with some texts left out.

    The variance of k logarithms without a group each is (k-1)/k times their sum of squares (Tukey
    1958; Efron and Stein, Ann. Stat. 9, 1981), and Student's t with k - 1 degrees of freedom gives
    the interval.

    Args:
        value: of all texts.
        without: of what `leave_some_out` leaves.
    """
    count, logs = len(without), [math.log(each) for each in without]
    mean = math.fsum(logs) / count
    variance = (count - 1) / count * math.fsum((x - mean) ** 2 for x in logs)
    reach = student_t(_CONFIDENCE, count - 1) * math.sqrt(variance)
    return Interval(value, value * math.exp(-reach), value * math.exp(reach))


def choose(forecasts: Sequence[GammaForecast]) -> int:
    """The gamma with the largest predicted speed-up; 0 where none gains."""
    best = max(forecasts, key=lambda found: found.speedup.value)
    return best.gamma if best.speedup.value > 1 else 0


def break_even_alpha(texts: Sequence[TextEvidence], widths: Widths) -> float | None:
    """The acceptance below which no gamma gains, for rounds that have all their drafts."""
    costs = round_costs(texts, widths)
    plain = costs.plain

    def verify(rows: int) -> float:
        width = widths.rows(rows - 1)
        return (costs.target[width] + costs.accept.get(width, 0.0)) / plain

    return theory.break_even_alpha(
        theory.Costs(
            cost_ratio=(costs.step + costs.propose) / plain,
            verify_cost=verify,
            overhead=(max(0.0, costs.catch_up - costs.step) + costs.host) / plain,
        ),
        widths.gammas[-1],
    )


def host_times(texts: Sequence[TextEvidence], widths: Widths) -> Times | None:
    """What is left of a round beside its parts; None where no round had drafts."""
    costs = RoundCosts(**{**vars(round_costs(texts, widths)), "host": 0.0})
    rests = [
        r.ms - costs.round(r.n_draft, widths) for text in texts for r in text.rounds if r.n_draft
    ]
    return evidence.times_of([max(0.0, rest) for rest in rests]) if rests else None

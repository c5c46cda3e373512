"""From evidence to a choice: predicted speed-up of every gamma, with an interval, and the best.

What a gamma emits is counted, by replaying texts with it (`evidence.replay`). What it takes are the
median times of rounds with as many drafts, timed in the texts; where there were none of a kind, the
parts of one. The speed-up is tokens over time, by those of the fastest plain decoding: Theorem 3.8
of arXiv 2211.17192 with measured tokens in place of Equation 1 and times in place of c and 1.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spec_export.calibration import evidence, theory
from spec_export.calibration.estimate import Interval, student_t
from spec_export.calibration.evidence import TextEvidence, Times, pooled_parts, pooled_plain

T = TypeVar("T")
_CONFIDENCE = 0.95
_FEWEST_ROUNDS = 8  # of a kind, for a median
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
    """What a round takes, in milliseconds.

    Attributes:
        rounds: of whole rounds as they were timed in a text, by their drafts.
        parts: of everything that was timed by itself, by name.
        plain: of a step of the fastest plain decoding, with all that belongs to it.
        widths: of the bundle.
    """

    rounds: Mapping[int, float]
    parts: Mapping[str, float]
    plain: float
    widths: Widths

    def explained(self, n_draft: int) -> float:
        """What the parts of a round take by themselves; they may take less inside one."""
        parts, widths = self.parts, self.widths
        if n_draft == 0:
            return parts[evidence.target_pass(widths.plain_rows)]
        rows = widths.rows(n_draft)
        drafting = parts.get(evidence.CATCH_UP, 0.0) + n_draft * parts.get(evidence.PROPOSE, 0.0)
        drafting += (n_draft - 1) * parts.get(evidence.STEP, 0.0)
        return drafting + parts[evidence.target_pass(rows)] + parts.get(evidence.accept(rows), 0.0)

    def round(self, n_draft: int) -> float:
        """Of a pass with so many drafts: as timed, or else from its parts.

        Parts are scaled by what they are off in the rounds that were timed.
        """
        if n_draft in self.rounds:
            return self.rounds[n_draft]
        off = [ms / self.explained(n) for n, ms in self.rounds.items()]
        return self.explained(n_draft) * (statistics.median(off) if off else 1.0)


def round_costs(texts: Sequence[TextEvidence], widths: Widths) -> RoundCosts:
    """Costs from the medians of measured times."""
    return RoundCosts(
        rounds={n: times.median for n, times in timed_rounds(texts).items()},
        parts={name: times.median for name, times in pooled_parts(texts).items()},
        plain=pooled_plain(texts).median,
        widths=widths,
    )


def timed_rounds(texts: Sequence[TextEvidence]) -> dict[int, Times]:
    """Times of rounds by their drafts, of those that were seen often enough."""
    found: dict[int, list[float]] = {}
    for text in texts:
        for r in (*text.rounds, *text.shorter):
            found.setdefault(r.n_draft, []).append(r.ms)
    often = sorted(n for n, values in found.items() if len(values) >= _FEWEST_ROUNDS)
    return {n: evidence.times_of(found[n]) for n in often}


@dataclass(frozen=True)
class Replayed:
    """What a gamma does with a text.

    Attributes:
        tokens: emitted after the first.
        passes: target passes by the drafts they had.
    """

    tokens: int
    passes: Mapping[int, int]


def replayed(text: TextEvidence, gamma: int) -> Replayed:
    """Replay a text."""
    rounds = evidence.replay(text.rounds, gamma)
    return Replayed(sum(r.kept for r in rounds), Counter(r.n_draft for r in rounds))


def predict(texts: Sequence[Replayed], costs: RoundCosts) -> tuple[float, float]:
    """Tokens and milliseconds of a target pass, passes without drafts included."""
    passes: Counter[int] = Counter()
    for text in texts:
        passes.update(text.passes)
    count = sum(passes.values())
    tokens = sum(text.tokens for text in texts) / count
    return tokens, sum(times * costs.round(n) for n, times in passes.items()) / count


def forecast(texts: Sequence[TextEvidence], widths: Widths) -> tuple[GammaForecast, ...]:
    """Every gamma from 1 to the largest that was built.

    Args:
        texts: at least two, with rounds each.
        widths: of the bundle.
    """
    texts = evidence.steadied(texts)
    costs = round_costs(texts, widths)
    without = [round_costs(group, widths) for group in leave_some_out(texts)]
    found = []
    for gamma in range(1, widths.gammas[-1] + 1):
        played = [replayed(text, gamma) for text in texts]
        tokens, ms = predict(played, costs)
        others = [
            _speedup(*predict(group, less), less)
            for group, less in zip(leave_some_out(played), without, strict=True)
        ]
        speed = jackknife(_speedup(tokens, ms, costs), others)
        found.append(GammaForecast(gamma, tokens, ms, speed))
    return tuple(found)


def _speedup(tokens: float, ms: float, costs: RoundCosts) -> float:
    return tokens / ms * costs.plain


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
    """The acceptance below which no gamma gains; None where no acceptance is enough.

    Where drafts are found at a share f of the tokens only, (f E + 1 - f) plain steps have to take
    longer than f rounds and 1 - f steps without drafts: E > v + (1 - f) / f (v_0 - 1), with v of a
    round and v_0 of such a step, in plain steps.
    """
    costs = round_costs(evidence.steadied(texts), widths)
    begun = [r for text in texts for r in text.rounds]
    share = sum(r.n_draft > 0 for r in begun) / len(begun)
    if share == 0:
        return None
    without = (1 - share) / share * (costs.round(0) / costs.plain - 1) if share < 1 else 0.0
    whole = theory.Costs(0.0, lambda rows: costs.round(rows - 1) / costs.plain + without)
    return theory.break_even_alpha(whole, widths.gammas[-1])


def host_times(texts: Sequence[TextEvidence], widths: Widths) -> Times | None:
    """What is left of a round beside its parts; None where no round had drafts."""
    costs = round_costs(texts, widths)
    rests = [
        r.ms - costs.explained(r.n_draft)
        for text in texts
        for r in (*text.rounds, *text.shorter)
        if r.n_draft
    ]
    return evidence.times_of([max(0.0, rest) for rest in rests]) if rests else None

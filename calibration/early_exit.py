"""Does it pay that rounds stop drafting early, and below which confidence of the draft?

Of every draft of a measured round it is known how sure the drafting model was before it was drawn.
So the rounds that decoding has with any threshold follow by walking along the text, as they do for
any gamma (`evidence.replay`). What it takes to look is added to what a round with as many drafts
takes.

The token of the row that is not sure is drafted still, since the pass that leaves it has run. To
leave it out paid nowhere with the tiny pair: at best 0.7 % over no threshold, for draft steps of
0.03 to 0.25 and rows of 0.01 to 0.12 target steps, where drafting it gains up to 7.3 % (2026-11-30,
gamma up to 8, replayed at temperatures 0 and 0.8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spec_export.calibration import evidence
from spec_export.calibration.estimate import Interval, RecordedRound
from spec_export.calibration.evidence import TextEvidence, replay
from spec_export.calibration.forecast import (
    RoundCosts,
    Widths,
    jackknife,
    leave_some_out,
    predict,
    replayed,
    round_costs,
)

THRESHOLDS = tuple(k / 20 for k in range(1, 20))
_GAIN = 1.01  # less is within what the choice of one among many thresholds finds in noise


@dataclass(frozen=True)
class EarlyForecast:
    """What the best threshold is predicted to do.

    Attributes:
        confidence: the threshold, above 0 and below 1.
        gamma: drafts a round has at most, with which it is best.
        tokens_a_pass: tokens that a target pass emits on average, passes without drafts included.
        pass_ms: its time, with all that belongs to it.
        speedup: over the fastest plain decoding.
        gain: over the best that there is without a threshold, plain decoding included.
        goes_on: how often another draft was made after one.
        later: how often another was made and accepted after one that was accepted.
    """

    confidence: float
    gamma: int
    tokens_a_pass: float
    pass_ms: float
    speedup: Interval
    gain: Interval
    goes_on: float
    later: float

    @property
    def pays(self) -> bool:
        """Whether the gain is more than noise."""
        return self.gain.value > _GAIN


@dataclass(frozen=True)
class EarlyReplay:
    """What a threshold does with a text.

    Attributes:
        tokens: emitted after the first.
        passes: target passes by the drafts they had, and whether they stopped early.
    """

    tokens: int
    passes: Mapping[tuple[int, bool], int]


def forecast_early(texts: Sequence[TextEvidence], widths: Widths) -> EarlyForecast | None:
    """The threshold and the gamma with the most tokens a millisecond.

    The lowest of equal thresholds, and no claim that it pays: `EarlyForecast.pays`.

    Args:
        texts: at least two, with rounds each.
        widths: of the bundle.

    Returns:
        The forecast; None where no confidence was measured of a draft that can be left out.
    """
    if not any(len(r.confidences) > 1 for text in texts for r in text.rounds):
        return None
    texts = evidence.steadied(texts)
    costs = round_costs(texts, widths)
    tried = [(gamma, t) for gamma in range(2, widths.gammas[-1] + 1) for t in THRESHOLDS]
    gamma, least = max(tried, key=lambda pair: _speed(_early(texts, *pair), costs))
    played = _early(texts, gamma, least)
    tokens, ms = _predict_early(played, costs)
    others = _best_without(texts, costs, widths)
    speeds, gains = [], []
    for some, group in zip(leave_some_out(texts), leave_some_out(played), strict=True):
        less = round_costs(some, widths)
        speeds.append(_speed(group, less) * less.plain)
        gains.append(_speed(group, less) / _speed_without(some, less, others))
    rounds = [r for text in texts for r in replay(text.rounds, gamma, least)]
    return EarlyForecast(
        confidence=least,
        gamma=gamma,
        tokens_a_pass=tokens,
        pass_ms=ms,
        speedup=jackknife(tokens / ms * costs.plain, speeds),
        gain=jackknife(tokens / ms / _speed_without(texts, costs, others), gains),
        goes_on=_goes_on(rounds),
        later=_later(rounds),
    )


def _early(texts: Sequence[TextEvidence], gamma: int, least: float) -> list[EarlyReplay]:
    found = []
    for text in texts:
        rounds = replay(text.rounds, gamma, least)
        passes = Counter((r.n_draft, r.is_early) for r in rounds)
        found.append(EarlyReplay(sum(r.kept for r in rounds), passes))
    return found


def _predict_early(texts: Sequence[EarlyReplay], costs: RoundCosts) -> tuple[float, float]:
    """Tokens and milliseconds of a target pass."""
    passes: Counter[tuple[int, bool]] = Counter()
    for text in texts:
        passes.update(text.passes)
    count, tokens = sum(passes.values()), sum(text.tokens for text in texts)
    ms = sum(times * _round_ms(costs, *kind) for kind, times in passes.items())
    return tokens / count, ms / count


def _round_ms(costs: RoundCosts, n_draft: int, is_early: bool) -> float:
    looked_at = max(0, n_draft - 1) + is_early
    return costs.round(n_draft) + looked_at * costs.parts.get(evidence.CONFIDENCE, 0.0)


def _speed(texts: Sequence[EarlyReplay], costs: RoundCosts) -> float:
    tokens, ms = _predict_early(texts, costs)
    return tokens / ms


def _best_without(texts: Sequence[TextEvidence], costs: RoundCosts, widths: Widths) -> int:
    """The best gamma without a threshold, 0 included."""
    gammas = range(widths.gammas[-1] + 1)
    return max(gammas, key=lambda gamma: _speed_without(texts, costs, gamma))


def _speed_without(texts: Sequence[TextEvidence], costs: RoundCosts, gamma: int) -> float:
    if gamma == 0:
        return 1 / costs.plain
    tokens, ms = predict([replayed(text, gamma) for text in texts], costs)
    return tokens / ms


def _goes_on(rounds: Sequence[RecordedRound]) -> float:
    made = sum(max(0, r.n_draft - 1) for r in rounds)
    looked_at = made + sum(r.is_early for r in rounds)
    return made / looked_at if looked_at else 1.0


def _later(rounds: Sequence[RecordedRound]) -> float:
    """Of a whole round that was not cut short, what would have followed is not known."""
    hits = trials = 0
    for r in rounds:
        is_hidden = r.kept <= r.n_accepted or (r.n_accepted == r.n_draft and not r.is_early)
        hits += max(0, r.accepted - 1)
        trials += max(0, r.accepted - is_hidden)
    return hits / trials if trials else 0.0

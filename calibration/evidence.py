"""What a calibration saw, text by text: rounds, plain steps, and the parts a round is made of.

A text is decoded by a round at every one of its tokens, of which only the first token is kept. So
it is known of every token how many drafts would be accepted there, and the rounds that decoding
takes with any gamma up to the one measured follow by walking along: no law of acceptance is needed.

Every text carries its own times of everything. So a machine that drifts does so for all of them,
and leaving a text out (the jackknife of `forecast`) says how much a number depends on which texts
were seen and when.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spec_export.calibration.estimate import RecordedRound

# Names of the parts; a pass of the target over m rows is `target m`, judging m rows `accept m`.
CATCH_UP, STEP, PROPOSE = "draft catch_up", "draft step", "propose"
CONFIDENCE = "confidence"


def target_pass(rows: int) -> str:
    """Name of a target pass."""
    return f"target {rows}"


def accept(rows: int) -> str:
    """Name of the graph that judges a verify pass."""
    return f"accept {rows}"


@dataclass(frozen=True)
class TimedRound:
    """A round with its time.

    Attributes:
        n_draft: drafts verified, 0 for a step without drafts.
        n_accepted: drafts accepted.
        kept: tokens that became text.
        ms: time from the call to its result.
        confidences: of each draft, the largest probability of the row it was drawn from, 0 to 1;
            empty where that was not looked at.
    """

    n_draft: int
    n_accepted: int
    kept: int
    ms: float
    confidences: tuple[float, ...] = ()

    @property
    def recorded(self) -> RecordedRound:
        """The round without its time."""
        return RecordedRound(self.n_draft, self.n_accepted, self.kept)


@dataclass(frozen=True)
class TextEvidence:
    """What was seen of one text.

    Attributes:
        category: of its prompt.
        rounds: begun at each token after the first, at the largest gamma the bundle was built for.
        shorter: rounds with fewer drafts, begun here and there for their time alone.
        plain_ms: of each step of the fastest plain decoding after the same prompt.
        parts_ms: times of every part by its name.
        beta: at each token a round began at, from both models reading the text; none for look-up.
    """

    category: str
    rounds: tuple[TimedRound, ...]
    shorter: tuple[TimedRound, ...]
    plain_ms: tuple[float, ...]
    parts_ms: dict[str, tuple[float, ...]]
    beta: tuple[float, ...] = ()


def replay(rounds: Sequence[TimedRound], gamma: int, least: float = 0.0) -> list[RecordedRound]:
    """The rounds that decoding the text takes with `gamma` drafts.

    Exact at temperature 0 and with the rule `invariant`, where a text does not depend on drafts.
    With other rules a round has the right law where it begins, but what follows it was drawn apart
    from it: tokens a round of the tiny pair at temperature 1 and gamma 4 were 2.36 against 2.44
    when decoded (`reject`), 2.55 against 2.52 (`block`), each within 0.03.

    Args:
        rounds: begun at each token, with at least `gamma` drafts where there were so many.
        gamma: drafts a round.
        least: a round drafts no further than a token of which the model was less sure.
    """
    found, at = [], 0
    while at < len(rounds):
        begun = rounds[at]
        most = min(begun.n_draft, gamma)
        n_draft = sure_drafts(begun.confidences, most, least)
        n_accepted = min(begun.n_accepted, n_draft)
        kept = min(begun.kept, n_accepted + 1)
        found.append(RecordedRound(n_draft, n_accepted, kept, n_draft < most))
        at += kept
    return found


def sure_drafts(confidences: Sequence[float], most: int, least: float) -> int:
    """How many of up to `most` drafts a round has; the first that is not sure is the last."""
    looked_at = confidences[: max(0, most - 1)]
    return next((i for i, sure in enumerate(looked_at, start=1) if sure < least), most)


@dataclass(frozen=True)
class Times:
    """Median and quartiles of a time in milliseconds, over `count` measurements."""

    median: float
    low: float
    high: float
    count: int


def steadied(texts: Sequence[TextEvidence]) -> list[TextEvidence]:
    """The same texts as if the machine had been equally fast during all of them.

    Every time of a text is scaled by how much slower its plain steps were than those of all texts:
    what is compared was measured within seconds, and what changes over minutes drops out.
    """
    steady = pooled_plain(texts).median
    return [_scaled(text, steady / statistics.median(text.plain_ms)) for text in texts]


def _scaled(text: TextEvidence, factor: float) -> TextEvidence:
    def rounds(found: Sequence[TimedRound]) -> tuple[TimedRound, ...]:
        return tuple(replace(r, ms=r.ms * factor) for r in found)

    return replace(
        text,
        rounds=rounds(text.rounds),
        shorter=rounds(text.shorter),
        plain_ms=tuple(ms * factor for ms in text.plain_ms),
        parts_ms={n: tuple(ms * factor for ms in found) for n, found in text.parts_ms.items()},
    )


def times_of(values: Sequence[float]) -> Times:
    """Summarize measurements, at least one."""
    if len(values) < 2:
        return Times(values[0], values[0], values[0], len(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Times(median, low, high, len(values))


def pooled_parts(texts: Sequence[TextEvidence]) -> dict[str, Times]:
    """Every part over all texts."""
    pooled: dict[str, list[float]] = {}
    for text in texts:
        for name, values in text.parts_ms.items():
            pooled.setdefault(name, []).extend(values)
    return {name: times_of(values) for name, values in pooled.items() if values}


def pooled_plain(texts: Sequence[TextEvidence]) -> Times:
    """Steps of plain decoding over all texts."""
    return times_of([ms for text in texts for ms in text.plain_ms])

"""Is speculation worth it here? The same text three ways, timed in turns.

What speculation is held against is the fastest plain decoding the bundle has (one row a step), and
never a slower one; exact plain decoding, which gives the same bits, stands beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spec_export.engines.bundle import Progress, no_progress
from spec_export.runtime.sampling import Sampling
from spec_export.runtime.session import Session
from spec_export.runtime.stats import Stats
from spec_export.runtime.stream import Request, generate

_STEP = "comparing with plain decoding"
# Long enough to touch every buffer of every role, short beside what is measured.
_WARM_UP_TOKENS = 16
SPECULATIVE, EXACT_PLAIN, FAST_PLAIN = "speculative", "exact_plain", "fast_plain"
_REPEATING = "One two three four five, one two three four five, one two three"


@dataclass(frozen=True)
class Timing:
    """One way of decoding, timed.

    Attributes:
        tokens: ids it gave.
        tokens_per_s: decode speed of each repeat, first tokens left out.
    """

    tokens: tuple[int, ...]
    tokens_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        """Tokens per second of the median repeat."""
        return statistics.median(self.tokens_per_s)


@dataclass(frozen=True)
class DecodingComparison:
    """What a comparison measured; every way gave the same number of tokens.

    Attributes:
        speculative: as requested.
        exact_plain: without drafts, with the bits of a verify pass; None where the engine has none.
        fast_plain: without drafts, one row a step.
        is_exact_promised: the two texts of `speculative` and `exact_plain` have to be equal.
    """

    speculative: Timing
    exact_plain: Timing | None
    fast_plain: Timing
    is_exact_promised: bool

    @property
    def tokens(self) -> int:
        """Tokens of each text."""
        return len(self.speculative.tokens)

    @property
    def speedups(self) -> tuple[float, ...]:
        """Speed-up over the fastest plain decoding, of each repeat."""
        pairs = zip(self.speculative.tokens_per_s, self.fast_plain.tokens_per_s, strict=True)
        return tuple(ours / plain for ours, plain in pairs)

    @property
    def speedup(self) -> float:
        """The median repeat's."""
        return statistics.median(self.speedups)

    @property
    def exact_departs_at(self) -> int | None:
        """First token in which `speculative` is not `exact_plain`; None where they are equal."""
        plain = self.exact_plain
        return None if plain is None else first_difference(self.speculative.tokens, plain.tokens)

    @property
    def fast_departs_at(self) -> int | None:
        """First token in which `speculative` is not `fast_plain`; None where they are equal."""
        return first_difference(self.speculative.tokens, self.fast_plain.tokens)

    @property
    def is_broken(self) -> bool:
        """Whether a promise of equal texts was not kept."""
        return self.is_exact_promised and self.exact_departs_at is not None


def compare_decoding(
    session: Session,
    prompt: Sequence[int],
    request: Request,
    tokens: int,
    *,
    repeats: int = 3,
    progress: Progress = no_progress,
) -> DecodingComparison:
    """Time a request against plain decoding.

    The ways take turns, so that a machine that gets slower does so for all of them; a warm-up of
    each is not counted.

    Args:
        session: restarted for every run.
        prompt: ids.
        request: what was run; its stops and its limit are replaced by `tokens`.
        tokens: ids every way gives, at least 2: what the request gave when it was run.
        repeats: timed runs of each way.
        progress: called with (step, done, total).
    """
    assert tokens >= 2 and repeats >= 1
    ways = _ways(session, request, tokens)
    runs: dict[str, list[tuple[tuple[int, ...], float]]] = {name: [] for name in ways}
    total = (repeats + 1) * len(ways)
    for turn in range(repeats + 1):
        for number, (name, way) in enumerate(ways.items()):
            progress(_STEP, turn * len(ways) + number, total)
            if turn == 0:
                way = replace(way, max_tokens=min(tokens, _WARM_UP_TOKENS))
            ids, stats = _run(session, prompt, way)
            if turn:
                runs[name].append((ids, stats.tokens_per_s or 0.0))
    progress(_STEP, total, total)
    timings = {
        name: Timing(found[0][0], tuple(speed for _, speed in found))
        for name, found in runs.items()
    }
    greedy = request.sampling.temperature == 0
    return DecodingComparison(
        speculative=timings[SPECULATIVE],
        exact_plain=timings.get(EXACT_PLAIN),
        fast_plain=timings[FAST_PLAIN],
        is_exact_promised=greedy and _has_exact(session) and not request.fast_plain,
    )


@dataclass(frozen=True)
class SelfCheck:
    """Whether a text with drafts is the text without.

    Attributes:
        tokens: compared.
        accepted: drafts among them.
        departs_at: first token that differs, or None.
        is_promised: the engine's exactness says that none may.
    """

    tokens: int
    accepted: int
    departs_at: int | None
    is_promised: bool


def check_session(session: Session, tokens: int = 32) -> SelfCheck:
    """Decode a few tokens with and without drafts at temperature 0, after a text that repeats."""
    prompt = session.opened.text.encode(_REPEATING)[: max(1, session.max_len // 2)]
    request = Request(max_tokens=tokens, sampling=Sampling(), ignore_end=True)
    ours, stats = _run(session, prompt, request)
    plain, _ = _run(session, prompt, replace(request, gamma=0))
    return SelfCheck(len(ours), stats.accepted, first_difference(ours, plain), _has_exact(session))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, the shorter's end included."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _ways(session: Session, request: Request, tokens: int) -> dict[str, Request]:
    asked = replace(request, max_tokens=tokens, stop=(), ignore_end=True)
    ways = {SPECULATIVE: asked}
    if session.opened.exactness != "none":
        ways[EXACT_PLAIN] = replace(asked, gamma=0, fast_plain=False)
    return ways | {FAST_PLAIN: replace(asked, gamma=0, fast_plain=True)}


def _has_exact(session: Session) -> bool:
    return session.opened.exactness in ("width_invariant", "row_invariant")


def _run(
    session: Session, prompt: Sequence[int], request: Request
) -> tuple[tuple[int, ...], Stats]:
    ids: list[int] = []
    stats = Stats(gamma=0)
    for piece in generate(session, prompt, request):
        ids += piece.tokens
        stats = piece.stats
    return tuple(ids), stats

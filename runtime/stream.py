"""Generate text as a stream of pieces, stopping exactly where plain decoding would.

Tokens of a round are taken one by one: an end token, a completed stop string, the token limit or
the end of the context ends the text at that token, whatever else the round had accepted, and the
session's lengths are moved back to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spec_export.engines.errors import RequestError
from spec_export.runtime.adaptive import GammaChooser, GammaCosts
from spec_export.runtime.grammar import Grammar
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.sampling import Sampling
from spec_export.runtime.session import Plain, RoundResult, Session
from spec_export.runtime.stats import Stats
from spec_export.runtime.text import StopStrings

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """What to generate after a prompt.

    Attributes:
        max_tokens: tokens at most; None: as many as the context holds.
        sampling: how tokens are drawn.
        grammar: what the text has to match, from its first token to its last.
        gamma: drafts per round, 0 (plain) to the built gamma; None: the built gamma.
        auto: choose the drafts of each round, up to that gamma, by what pays at these costs.
        draft_confidence: a round drafts no further than a token whose row gives its most probable
            one less, by the draft, 0 (off) to 1; None: what `auto` says pays, where rounds are not
            pipelined, else 0. What is emitted follows the same law.
        stop: strings that end the text and are not part of it.
        ignore_end: go on past end tokens.
        fast_plain: steps without drafts run one row, whose bits may differ from a verify pass.

    Raises:
        RequestError: a value is of another kind.
    """

    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    grammar: Grammar | None = None
    gamma: int | None = None
    auto: GammaCosts | None = None
    draft_confidence: float | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    fast_plain: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("gamma", self.gamma)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise RequestError(f"{name}={value!r}: it is a whole number")
        least: object = self.draft_confidence
        is_number = isinstance(least, int | float) and not isinstance(least, bool)
        if least is not None and not (is_number and 0 <= least <= 1):  # type: ignore[operator]
            raise RequestError(f"draft_confidence={least!r}: it is 0 to 1")
        stop: object = self.stop  # a string would be taken for its letters
        if not isinstance(stop, tuple | list) or not all(isinstance(text, str) for text in stop):
            raise RequestError(f"stop={stop!r:.99}: it is a tuple of strings")
        grammar: object = self.grammar
        if grammar is not None and not isinstance(grammar, Grammar):
            raise RequestError(f"grammar={grammar!r:.99}: it is a Grammar")


@dataclass(frozen=True)
class Piece:
    """A part of the text.

    Attributes:
        text: characters that are final; may be empty while one is unfinished.
        tokens: ids this piece adds.
        logprobs: of each id, under the raw target distribution.
        top: of each id's row, the most probable tokens and their logprobs, where asked for.
        n_accepted: how many of the ids were drafts.
        finish: why the text ended, on the last piece only: `stop` (an end token or a stop string)
            or `length` (the limit or the context).
        stats: counts so far; the same object on every piece.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[list[tuple[int, float]], ...]
    n_accepted: int
    finish: FinishReason | None
    stats: Stats


def generate(session: Session, prompt: Sequence[int], request: Request) -> Iterator[Piece]:
    """Generate after `prompt`, yielding a piece per round.

    The session is restarted. An iterator abandoned midway leaves it valid and ready for the next.

    Raises:
        RequestError: the prompt or the request does not fit the bundle.
        NonFiniteError: the target produced NaN or infinity.
    """
    gamma = effective_gamma(session.opened, request)
    plain = plain_role(session.opened, request)
    if request.auto is not None and len(request.auto.round_ms) < gamma:
        raise RequestError(
            f"costs of {len(request.auto.round_ms)} drafts, and rounds have up to {gamma}"
        )
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError(f"max_tokens={request.max_tokens}: at least 1 is generated")
    least = _draft_confidence(session, request, gamma)
    return _pieces(session, list(prompt), request, gamma, plain, least)


def effective_gamma(opened: OpenedBundle, request: Request) -> int:
    """The request's gamma, checked against the built one."""
    built = opened.manifest.gamma
    if request.gamma is None:
        return built
    if not 0 <= request.gamma <= built:
        if opened.manifest.method == "none":
            raise RequestError(
                f"gamma={request.gamma} but the bundle was made without a draft; use 0, or export "
                "the target again with `--draft`"
            )
        raise RequestError(
            f"gamma={request.gamma} but the bundle was built for gamma={built}; use 0 to {built}, "
            f"or rebuild with `--gamma {max(request.gamma, 1)}`"
        )
    return request.gamma


def plain_role(opened: OpenedBundle, request: Request) -> Plain:
    """How steps without drafts are run: exactly where the engine can, unless the fast way is asked.

    On an engine without row invariance nothing is exact, and the fast way is the only sensible one.
    """
    if request.fast_plain or opened.exactness == "none":
        return "decode"
    recorded = opened.manifest.exactness.kind  # the best guess where nothing was probed
    return "verify" if recorded == "row_invariant" else "exact_decode"


def _draft_confidence(session: Session, request: Request, gamma: int) -> float:
    """Below which a text's rounds stop drafting; 0: never.

    Raises:
        RequestError: it was asked for, and rounds of this session cannot.
    """
    if request.draft_confidence is not None:
        if request.draft_confidence:
            session.check_early_exit()
        return request.draft_confidence if gamma else 0.0
    found = request.auto.draft_confidence if request.auto is not None and gamma else 0.0
    if found and not session.can_end_early:
        session.remark(
            f"the profile's draft_confidence of {found:.2f} is not used: rounds are pipelined, or "
            "their drafts come from no model"
        )
        return 0.0
    return found


def _pieces(
    session: Session,
    prompt: list[int],
    request: Request,
    gamma: int,
    plain: Plain,
    draft_confidence: float,
) -> Iterator[Piece]:
    stats = Stats(gamma, len(prompt), draft_confidence=draft_confidence)
    text = _TextEnd(session, request)
    chooser = None
    if request.auto is not None and gamma:
        chooser = GammaChooser(request.auto, gamma, draft_confidence)
    started = time.perf_counter()
    grammar = request.grammar
    constraint = None if grammar is None else session.opened.grammar_tokenizer.state(grammar)
    session.begin(request.sampling, plain, constraint, draft_confidence)
    number = session.texts
    session.prefill(prompt, drafts=gamma > 0)
    limit = session.room if request.max_tokens is None else min(request.max_tokens, session.room)
    if limit == 0:
        stats.ttft_ms = (time.perf_counter() - started) * 1e3
        yield Piece("", (), (), (), 0, "length", stats)
        return
    result = session.first()
    stats.ttft_ms = (time.perf_counter() - started) * 1e3
    kept, piece, finish = text.take(result, limit)
    stats.emitted += kept
    while True:
        if kept < len(result.tokens):
            session.rewind(len(session.history) - (len(result.tokens) - kept))
        tokens, logprobs = tuple(result.tokens[:kept]), tuple(result.logprobs[:kept])
        top, drafts = tuple(result.top[:kept]), min(result.n_accepted, kept)
        yield Piece(piece, tokens, logprobs, top, drafts, finish, stats)
        if finish is not None:
            return
        if session.texts != number:
            raise RequestError(
                "another text was begun on this session; one session holds one text at a time"
            )
        started = time.perf_counter()  # what a consumer does between pieces is not decoding
        wanted = limit - stats.emitted
        n = min(gamma if chooser is None else chooser.n, wanted - 1)
        result = session.round(n, then=n if wanted >= 2 * (n + 1) else None)
        kept, piece, finish = text.take(result, limit - stats.emitted)
        early = result.is_early
        stats.count_round(result.n_draft, result.n_accepted, kept, is_early=early)
        if chooser is not None:
            is_cut = kept <= result.n_accepted
            chooser.count(result.n_draft, result.n_accepted, is_cut=is_cut, is_early=early)
        stats.decode_ms += (time.perf_counter() - started) * 1e3


class _TextEnd:
    """Decodes tokens and finds the end of the text."""

    def __init__(self, session: Session, request: Request) -> None:
        self._stream = session.opened.text.stream()
        self._stops = StopStrings(request.stop)
        self._ends = () if request.ignore_end else session.opened.manifest.text.end_ids

    def take(self, result: RoundResult, limit: int) -> tuple[int, str, FinishReason | None]:
        """Tokens of a round to keep, at most `limit`; their text; why it ends there, if so."""
        shown = ""
        for count, token in enumerate(result.tokens, start=1):
            if token in self._ends:
                return count, shown + self._rest(), "stop"
            text, stopped = self._stops.add(self._stream.add(token))
            shown += text
            if stopped:
                return count, shown, "stop"
            if count == limit:
                rest, stopped = self._stops.add(self._stream.finish())
                shown += rest if stopped else rest + self._stops.finish()
                return count, shown, "stop" if stopped else "length"
        return len(result.tokens), shown, None

    def _rest(self) -> str:
        rest, stopped = self._stops.add(self._stream.finish())
        return rest if stopped else rest + self._stops.finish()

"""Run a session and keep what it did: text, tokens, statistics, the logits behind each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_export.runtime import OpenedBundle, Piece, Request, Sampling, Session, Stats, generate
from spec_export.runtime.session import Plain


@dataclass(frozen=True)
class Decoded:
    """A whole generation."""

    pieces: list[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [value for piece in self.pieces for value in piece.logprobs]

    @property
    def finish(self) -> str | None:
        return self.pieces[-1].finish

    @property
    def stats(self) -> Stats:
        return self.pieces[-1].stats


def decode(where: Session | OpenedBundle, prompt: Sequence[int], **request: object) -> Decoded:
    """Generate to the end; `request` are the fields of a `Request`."""
    session = where if isinstance(where, Session) else Session(where)
    return Decoded(list(generate(session, prompt, Request(**request))))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trace:
    """Tokens of a text and, for each, the row of logits it was chosen from.

    Attributes:
        tokens: `[n]`, the text after the prompt.
        logits: `[n, V]` float32.
        accepted: of each round that had drafts, `(n_draft, n_accepted)`.
    """

    tokens: list[int]
    logits: np.ndarray
    accepted: list[tuple[int, int]]


def trace(
    session: Session,
    prompt: Sequence[int],
    count: int,
    n: int,
    plain: Plain = "exact_decode",
    sampling: Sampling | None = None,
) -> Trace:
    """Decode `count` tokens or a few more, drafting `n` a round; end tokens are ordinary ones."""
    session.begin(sampling or Sampling(), plain)
    session.prefill(prompt)
    result = session.first()
    tokens, rows = list(result.tokens), [logits_of(session, "prefill")[:1].copy()]
    accepted: list[tuple[int, int]] = []
    while len(tokens) < count:
        result = session.round(min(n, session.room - 1))
        role = "verify" if result.n_draft else session._plain
        tokens += result.tokens
        rows.append(logits_of(session, role)[: len(result.tokens)].copy())
        if result.n_draft:
            accepted.append((result.n_draft, result.n_accepted))
    return Trace(tokens, np.concatenate(rows), accepted)


def logits_of(session: Session, role: str) -> np.ndarray:
    """The `[R, V]` logits the last pass of a role left."""
    host = session._roles[role].buffers["logits"].host
    assert host is not None
    return host[0]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in every bit: NaN equals NaN, 0 does not equal -0."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def with_end_ids(opened: OpenedBundle, *end_ids: int) -> OpenedBundle:
    """The same engines with other end tokens."""
    manifest = opened.manifest
    text = replace(manifest.text, end_ids=end_ids)
    return replace(opened, bundle=replace(opened.bundle, manifest=replace(manifest, text=text)))

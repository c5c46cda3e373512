"""Drafts that are right as often as they are told to be, with no second model.

The text that the target is about to emit is known beforehand: it was recorded, decoded plainly. At
every token a synthetic draft proposes the right one with probability alpha and else another, which
the target refuses. Rounds, verify passes and acceptance are the real ones, and so is the text; what
is made up is how good the draft is, and that it takes no time. So speculation can be timed, and
choices by acceptance tested, at any alpha.

A token of a text is judged once at most, whatever the rounds. So one draw for each makes acceptance
independent from draft to draft, as in Leviathan et al. (arXiv 2211.17192, section 3.1), and the
same for every gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spec_export.engines.errors import RequestError
from spec_export.runtime.buffers import HostMirror
from spec_export.runtime.drafts import HostDraft
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.session import Session
from spec_export.runtime.stream import Request, generate


class SyntheticDraft(HostDraft):
    """A source of drafts with a set acceptance, for texts that `follow` was told of.

    Args:
        host: where drafts are written.
        vocabulary: ids of the target.

    Attributes:
        departed_at: the token at which the text was another than the one followed; from there on
            nothing is drafted. None where there is no such token.
    """

    def __init__(self, host: HostMirror, vocabulary: int) -> None:
        super().__init__(host)
        self._vocabulary = vocabulary
        self._text: list[int] = []
        self._proposed: list[int] = []
        self._length = 0
        self.departed_at: int | None = None

    def follow(self, text: Sequence[int], alpha: float, seed: Sequence[int]) -> None:
        """Draft for a text that is about to be decoded.

        Args:
            text: the prompt, and what the target will emit after it.
            alpha: probability that a draft is right, 0 to 1.
            seed: of which drafts are right; the same for another alpha, those that were right at a
                lower one still are.

        Raises:
            RequestError: alpha is no probability.
        """
        if not 0 <= alpha <= 1:
            raise RequestError(f"alpha is {alpha!r}, expected 0 to 1")
        is_right = np.random.default_rng(seed).random(len(text)) < alpha
        self._text = list(text)
        self._proposed = [
            token if right else (token + 1) % self._vocabulary
            for token, right in zip(text, is_right.tolist(), strict=True)
        ]

    def prefill(self, tokens: Sequence[int]) -> None:
        """See that committed tokens are those that are followed."""
        known = self._text[self._length : self._length + len(tokens)]
        if self.departed_at is None and known != list(tokens[: len(known)]):
            self.departed_at = self._length
        self._length += len(tokens)

    def found(self, n: int) -> list[int]:
        """The next tokens of the text, some of them wrong; fewer where it ends."""
        if self.departed_at is not None:
            return []
        return self._proposed[self._length : self._length + n]

    def rewind(self, length: int) -> None:
        """Forget everything from `length` on."""
        self._length = min(self._length, length)
        if self.departed_at is not None and self.departed_at >= length:
            self.departed_at = None


def synthetic_session(
    opened: OpenedBundle, *, pipelined: bool | None = None
) -> tuple[Session, SyntheticDraft]:
    """A session with synthetic drafts in place of the bundle's, and their source.

    Args:
        opened: a bundle that was built for some gamma, whatever its own draft is.
        pipelined: as of `Session`.
    """
    vocabulary = opened.manifest.models["target"].vocabulary
    session = Session(
        opened, pipelined=pipelined, draft=lambda host: SyntheticDraft(host, vocabulary)
    )
    assert isinstance(session.draft, SyntheticDraft)
    return session, session.draft


def record_text(session: Session, prompt: Sequence[int], request: Request) -> list[int]:
    """The prompt and the text after it, by plain decoding with the bits of a verify pass.

    Where the engine has no such decoding (exactness `none`), rounds may depart from it.

    Args:
        session: any of the bundle.
        prompt: its ids.
        request: as it will be decoded with drafts; its gamma plays no part.

    Raises:
        RequestError: the text would depend on its drafts, or the request does not fit the bundle.
    """
    sampling = request.sampling
    if sampling.temperature > 0 and sampling.rule != "invariant":
        raise RequestError(
            f"under rule {sampling.rule} a text depends on its drafts, so that none is known "
            "beforehand: use temperature 0, or rule invariant"
        )
    text = list(prompt)
    plain = replace(request, gamma=0, auto=None, fast_plain=False)
    for piece in generate(session, prompt, plain):
        text += piece.tokens
    return text

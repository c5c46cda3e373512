"""Which tokens may come, as bits for every row of a round, where the sampling graphs read them.

Two things say so: lists of a request, which hold for the whole text, and a grammar, which follows
it. A row's mask is that of the text and the drafts before the row, so drafts are stepped through
and taken back again. Owned by the `SamplingCalls` of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_export.engines.backend import Buffer, Device
from spec_export.engines.errors import RequestError
from spec_export.engines.graphs import padded_vocabulary
from spec_export.runtime.sampling import Sampling


class Constraint(Protocol):
    """Which tokens a grammar lets follow; `grammar.GrammarState` is one.

    `fill` and `advance` may raise RequestError, and have changed nothing then.
    """

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write the mask of the next token: bit i % 16 of word i // 16 for token i."""

    def advance(self, token: int) -> bool:
        """Take in a token; False, and nothing changed, when it is not allowed."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""


class TokenMasks:
    """The masks of the rows of a round.

    Args:
        device: where they lie.
        rows: M, of a verify pass.
        vocabulary: V.
        drafts: `[G]` this round's drafts.

    Attributes:
        buffer: `[M, V64/8]` bytes, row i after i drafts.
        follows: whether a grammar is followed, so that masks change with the text.
    """

    def __init__(self, device: Device, rows: int, vocabulary: int, drafts: Buffer) -> None:
        width = padded_vocabulary(vocabulary)
        self._device, self._vocabulary, self._drafts = device, vocabulary, drafts
        self.buffer = device.allocate((rows, width // 8), np.uint8)
        self.follows = False
        self._constraint: Constraint | None = None
        self._taken = 0  # tokens of the text that the constraint has taken in
        self._bits = np.zeros(width, np.bool_)
        self._listed = np.zeros(width // 8, np.uint8)
        self._masks = np.zeros((rows, width // 8), np.uint8)
        self._halves = [row.view(np.uint16) for row in self._masks]
        self._words = np.zeros(width // 16, np.int32)
        self._draft_ids = np.zeros(drafts.shape, np.int64)

    def begin(self, sampling: Sampling, constraint: Constraint | None) -> None:
        """Take over the lists of a request, and a grammar at the beginning of its text."""
        self._constraint, self._taken = constraint, 0
        self.follows = constraint is not None
        bits, allowed = self._bits, sampling.allowed_tokens
        bits[:] = False
        bits[slice(self._vocabulary) if allowed is None else list(allowed)] = True
        bits[list(sampling.banned_tokens)] = False
        np.copyto(self._listed, np.packbits(bits, bitorder="little"))
        self._masks[:] = self._listed
        self._device.upload(self.buffer, self._masks)

    def grow(self, tokens: Sequence[int]) -> None:
        """The output grew."""
        if self._constraint is not None:
            for token in tokens:
                self._taken += self._constraint.advance(token)

    def shrink(self, count: int) -> None:
        """The last `count` tokens were taken back."""
        if self._constraint is not None:
            count = min(count, self._taken)
            self._constraint.rollback(count)
            self._taken -= count

    def fill(self, n_draft: int) -> None:
        """Make the masks of the rows up to that after `n_draft` drafts, which are on the device.

        A draft that is not allowed has no weight in its row, and no row after it counts. After one
        that leads the grammar to where it cannot go on, nothing may come: it may yet be refused.

        Raises:
            RequestError: the grammar cannot go on after the text itself.
        """
        constraint, taken = self._constraint, 0
        assert constraint is not None
        if n_draft:
            self._device.download(self._drafts, self._draft_ids)
        self._fill_row(0, constraint)
        for row in range(1, n_draft + 1):
            try:
                if not constraint.advance(int(self._draft_ids[row - 1])):
                    break
                taken = row
                self._fill_row(row, constraint)
            except RequestError:
                self._masks[row] = 0
                break
        constraint.rollback(taken)
        self._device.upload(self.buffer, self._masks)

    def _fill_row(self, row: int, constraint: Constraint) -> None:
        constraint.fill(self._words)
        np.copyto(self._halves[row], self._words, casting="unsafe")
        np.bitwise_and(self._masks[row], self._listed, out=self._masks[row])

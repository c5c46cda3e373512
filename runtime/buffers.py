"""The small memory a round passes between its engines, laid out once.

One line of int64 holds what the passes read:

    kv_len | draft_kv_len x G | previous, last | draft_1 .. draft_G | spare

so that every pass binds a slice of it and nothing is copied between them: the target verifies
`last, draft_1 .. draft_G`, the drafting model catches up on `previous, last`, and each `propose`
writes the token that the next step reads. `accept` writes `next`, which has the layout of the
line's head and is copied over it. What the host reads is one block, `report`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spec_export.engines.backend import Buffer, Device


@dataclass(frozen=True)
class RoundBuffers:
    """The line and the blocks beside it; G is gamma, M = G + 1. int64 unless said otherwise.

    Attributes:
        gamma: G.
        line: `[2 G + 4]`, sliced by the properties below.
        n_draft: `[1]` how many drafts of the round count.
        next: `[G + 3]` the head of the next round, as `accept` leaves it.
        report: `[8 + 12 M]` bytes, what the host reads after a round.
    """

    gamma: int
    line: Buffer
    n_draft: Buffer
    next: Buffer
    report: Buffer

    @property
    def kv_len(self) -> Buffer:
        """`[1]` length of the target's cache: one less than the committed tokens."""
        return self.line.part(0, 1)

    @property
    def draft_kv_len(self) -> Buffer:
        """`[G]` length at which the drafting model's i-th pass runs."""
        return self.line.part(1, 1 + self.gamma)

    @property
    def pair(self) -> Buffer:
        """`[2]` the last two committed tokens."""
        return self.line.part(1 + self.gamma, 3 + self.gamma)

    @property
    def last(self) -> Buffer:
        """`[1]` the last committed token."""
        return self.line.part(2 + self.gamma, 3 + self.gamma)

    @property
    def drafts(self) -> Buffer:
        """`[G]` this round's drafts."""
        return self.line.part(3 + self.gamma, 3 + 2 * self.gamma)

    @property
    def head(self) -> Buffer:
        """`[G + 3]` everything before the drafts."""
        return self.line.part(0, 3 + self.gamma)

    def pass_tokens(self, rows: int) -> Buffer:
        """`[1, rows]` tokens of a target pass: the last committed one and what follows it."""
        return self.line.part(2 + self.gamma, 2 + self.gamma + rows).shaped(1, rows)

    @property
    def n_accepted(self) -> Buffer:
        """`[1]` drafts accepted, a part of the report."""
        return self.report.part(0, 8).viewed(np.int64)

    @property
    def tokens(self) -> Buffer:
        """`[M]` tokens emitted, a part of the report."""
        return self.report.part(8, 16 + 8 * self.gamma).viewed(np.int64)

    @property
    def logprob(self) -> Buffer:
        """`[M]` float32 logprobs of the tokens, a part of the report."""
        return self.report.part(16 + 8 * self.gamma, self.report.shape[0]).viewed(np.float32)


def allocate_round(device: Device, gamma: int) -> RoundBuffers:
    """Allocate the line and its companions for `gamma` drafts a round."""
    return RoundBuffers(
        gamma=gamma,
        line=device.allocate((4 + 2 * gamma,), np.int64),
        n_draft=device.allocate((1,), np.int64),
        next=device.allocate((3 + gamma,), np.int64),
        report=device.allocate((8 + 12 * (gamma + 1),), np.uint8),
    )


class HostMirror:
    """The host's copies of the line's head and of the report, allocated once.

    `memoryview`s give Python integers without making an array.
    """

    def __init__(self, device: Device, buffers: RoundBuffers) -> None:
        gamma = buffers.gamma
        self._device, self._buffers = device, buffers
        self._head = np.zeros(3 + gamma, np.int64)
        self._n_draft = np.zeros(1, np.int64)
        self._drafts = np.zeros(gamma, np.int64)
        self._report = np.zeros(buffers.report.shape, np.uint8)
        self.n_accepted = self._report[:8].view(np.int64).data
        self.tokens = self._report[8 : 16 + 8 * gamma].view(np.int64).data
        self.logprob = self._report[16 + 8 * gamma :].view(np.float32).data
        self._drafts_buffer = buffers.drafts
        self._head_buffer = buffers.head
        self._gamma = gamma

    def set_lengths(self, committed: int, previous: int, last: int) -> None:
        """Put the line's head where a session with `committed` tokens starts a round."""
        head, gamma = self._head, self._gamma
        head[0] = committed - 1
        for i in range(gamma):
            head[1 + i] = committed - 2 + (i + 1 if i else 0)
        head[1 + gamma], head[2 + gamma] = previous, last
        self._device.upload(self._head_buffer, head)

    def set_n_draft(self, n_draft: int) -> None:
        """Say how many drafts of the coming round count."""
        self._n_draft[0] = n_draft
        self._device.upload(self._buffers.n_draft, self._n_draft)

    def set_drafts(self, tokens: list[int]) -> None:
        """Write drafts that the host found; the rest of the row keeps valid ids."""
        for i, token in enumerate(tokens):
            self._drafts[i] = token
        self._device.upload(self._drafts_buffer, self._drafts)

    def read_report(self) -> None:
        """The one copy from the device in a round."""
        self._device.download(self._buffers.report, self._report)

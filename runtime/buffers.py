"""The small memory a round passes between its engines, laid out once.

One line of int64 holds what the passes read:

    kv_len | draft_kv_len x D | previous, last, draft_1 .. draft_G | spare

so that a pass binds a slice of it: the target verifies `last, draft_1 .. draft_G`, the drafting
model catches up on `previous, last`, and each `propose` writes the token that the next step reads.
`accept` and `sample` write `next`, which has the layout of the line's head (everything before the
drafts) and is copied over it. What the host reads is one block, `report`. The bars are places that
start where the device likes addresses to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spec_export.engines.backend import Buffer, Device

_WORD = 8


@dataclass(frozen=True)
class RoundBuffers:
    """The line and the blocks beside it; G is gamma, M = G + 1, D = max(1, G).

    int64 unless said otherwise.

    Attributes:
        gamma: G, of the widest round.
        line: sliced by the properties below.
        n_draft: `[1]` how many drafts of the round count.
        next: the head of the next round, as `accept` and `sample` leave it.
        report: bytes; what the host reads after a round.
        alignment: in bytes, of the places in them.
    """

    gamma: int
    line: Buffer
    n_draft: Buffer
    next: Buffer
    report: Buffer
    alignment: int

    @property
    def passes(self) -> int:
        """D: passes of a drafting model; there is room for one even where none is."""
        return max(1, self.gamma)

    @property
    def kv_len(self) -> Buffer:
        """`[1]` length of the target's cache: one less than the committed tokens."""
        return self.line.part(0, 1)

    @property
    def draft_kv_len(self) -> Buffer:
        """`[D]` length at which the drafting model's i-th pass runs."""
        return self.line.part(self.lengths_at, self.lengths_at + self.passes)

    @property
    def pair(self) -> Buffer:
        """`[2]` the last two committed tokens."""
        return self.line.part(self.pair_at, self.pair_at + 2)

    @property
    def last(self) -> Buffer:
        """`[1]` the last committed token."""
        return self.line.part(self.pair_at + 1, self.pair_at + 2)

    @property
    def drafts(self) -> Buffer:
        """`[G]` this round's drafts."""
        return self.line.part(self.pair_at + 2, self.pair_at + 2 + self.gamma)

    @property
    def head(self) -> Buffer:
        """Everything before the drafts."""
        return self.line.part(0, self.pair_at + 2)

    def pass_tokens(self, rows: int) -> Buffer:
        """`[1, rows]` tokens of a target pass: the last committed one and what follows it."""
        return self.line.part(self.pair_at + 1, self.pair_at + 1 + rows).shaped(1, rows)

    @property
    def place(self) -> dict[str, Buffer]:
        """What `accept` and `sample` read of the line, and where they write the next head."""
        lengths, pair, head = self.lengths_at, self.pair_at, self.next
        return {
            "last_id": self.last,
            "kv_len": self.kv_len,
            "draft_kv_len": self.draft_kv_len,
            "next_kv_len": head.part(0, 1),
            "next_draft_kv_len": head.part(lengths, lengths + self.passes),
            "next_ids": head.part(pair, pair + 2),
        }

    @property
    def n_accepted(self) -> Buffer:
        """`[1]` drafts accepted, a part of the report."""
        return self.report.part(0, _WORD).viewed(np.int64)

    @property
    def tokens(self) -> Buffer:
        """`[M]` tokens emitted, a part of the report."""
        start = aligned(_WORD, self.alignment)
        return self.report.part(start, start + _WORD * (self.gamma + 1)).viewed(np.int64)

    @property
    def logprob(self) -> Buffer:
        """`[M]` float32 logprobs of the tokens, a part of the report."""
        start = aligned(aligned(_WORD, self.alignment) + _WORD * (self.gamma + 1), self.alignment)
        return self.report.part(start, start + 4 * (self.gamma + 1)).viewed(np.float32)

    @property
    def lengths_at(self) -> int:
        """Where `draft_kv_len` starts in the line."""
        return _words(1, self.alignment)

    @property
    def pair_at(self) -> int:
        """Where `pair` starts in the line."""
        return _words(self.lengths_at + self.passes, self.alignment)


def first_row(logits: Buffer) -> Buffer:
    """`[1, R, V]` as `[1, 1, V]`: the row of a pass that a token is drawn from."""
    _, rows, width = logits.shape
    return logits.shaped(rows, width).part(0, 1).shaped(1, 1, width)


def aligned(size: int, alignment: int) -> int:
    """`size` bytes, rounded up to whole alignments."""
    return -(-size // alignment) * alignment


def _words(count: int, alignment: int) -> int:
    return aligned(count * _WORD, alignment) // _WORD


def allocate_round(device: Device, gamma: int) -> RoundBuffers:
    """Allocate the line and its companions for up to `gamma` drafts a round."""
    unit, passes = device.alignment, max(1, gamma)
    pair_at = _words(_words(1, unit) + passes, unit)
    report = aligned(aligned(_WORD, unit) + _WORD * (gamma + 1), unit) + 4 * (gamma + 1)
    return RoundBuffers(
        gamma=gamma,
        line=device.allocate((pair_at + 3 + gamma,), np.int64),
        n_draft=device.allocate((1,), np.int64),
        next=device.allocate((pair_at + 2,), np.int64),
        report=device.allocate((report,), np.uint8),
        alignment=unit,
    )


class HostMirror:
    """The host's side of the line: what it writes there between rounds. Allocates nothing after."""

    def __init__(self, device: Device, buffers: RoundBuffers) -> None:
        self._device, self._buffers = device, buffers
        self._head = np.zeros(buffers.head.shape, np.int64)
        self._n_draft = np.full(1, -1, np.int64)
        self._drafts = np.zeros(buffers.gamma, np.int64)
        self._drafts_buffer, self._head_buffer = buffers.drafts, buffers.head

    def set_place(self, committed: int, previous: int, last: int) -> None:
        """Put the line's head where a text of `committed` tokens goes on."""
        head, buffers = self._head, self._buffers
        head[0] = committed - 1
        for i in range(buffers.passes):  # the first pass catches up on two rows
            head[buffers.lengths_at + i] = committed - 2 + (i + 1 if i else 0)
        head[buffers.pair_at], head[buffers.pair_at + 1] = previous, last
        self._device.upload(self._head_buffer, head)

    def place_after(self, history: Sequence[int], last: int | None = None) -> None:
        """Put the line's head where a text goes on; `last` stands in for its last token."""
        n = len(history)
        if n:
            before = history[n - 2] if n > 1 else 0
            self.set_place(n, before, history[n - 1] if last is None else last)

    def set_n_draft(self, n_draft: int) -> None:
        """Say how many drafts of the rounds to come count."""
        if self._n_draft[0] != n_draft:
            self._n_draft[0] = n_draft
            self._device.upload(self._buffers.n_draft, self._n_draft)

    def set_drafts(self, tokens: list[int]) -> None:
        """Write drafts that the host found; the rest of the row keeps valid ids."""
        for i, token in enumerate(tokens):
            self._drafts[i] = token
        self._device.upload(self._drafts_buffer, self._drafts)


class Report:
    """The one copy from the device in a round. Views give Python integers and make no array.

    Attributes:
        n_accepted: `[1]` drafts accepted; of a round only.
        tokens: `[M]` tokens emitted.
        logprob: `[M]` float32.
    """

    def __init__(self, device: Device, buffers: RoundBuffers) -> None:
        self._reader = device.reader(buffers.report)
        host, base = self._reader.host, buffers.report.address
        self.n_accepted = _view(host, buffers.n_accepted, base)
        self.tokens = _view(host, buffers.tokens, base)
        self.logprob = _view(host, buffers.logprob, base)
        self.start, self.wait = self._reader.start, self._reader.wait

    def content(self) -> bytes:
        """All of it."""
        return self._reader.host.tobytes()


def _view(host: np.ndarray, part: Buffer, base: int) -> memoryview:
    start = part.address - base
    return host[start : start + part.nbytes].view(part.dtype).data

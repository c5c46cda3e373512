"""The masks of a round's rows: they follow its drafts, are taken back with them, and never lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from spec_export.engines.errors import RequestError
from spec_export.engines.host import HostDevice
from spec_export.runtime import Sampling
from spec_export.runtime.masks import TokenMasks

V, GAMMA = 70, 3
ALL = frozenset(range(V))


class Rising:
    """A grammar under which tokens rise; it breaks down after `breaks`, in `fill` or `advance`."""

    def __init__(self, breaks: int | None = None, where: str = "fill") -> None:
        self.text: list[int] = []
        self._breaks, self._where = breaks, where

    def fill(self, words: NDArray[np.int32]) -> None:
        if self._where == "fill" and self.text[-1:] == [self._breaks]:
            raise RequestError("the grammar cannot go on")
        bits = np.zeros(len(words) * 16, bool)
        bits[self.text[-1] + 1 if self.text else 0 : V] = True
        words[:] = np.packbits(bits, bitorder="little").view(np.uint16)

    def advance(self, token: int) -> bool:
        if self._where == "advance" and token == self._breaks:
            raise RequestError("the grammar cannot go on")
        if self.text and token <= self.text[-1]:
            return False
        self.text.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self.text)
        del self.text[len(self.text) - count :]


class Round:
    """Masks over drafts that the test sets."""

    def __init__(self, grammar: Rising, sampling: Sampling | None = None) -> None:
        device = HostDevice()
        self._drafts = device.allocate((GAMMA,), np.int64)
        self.masks = TokenMasks(device, GAMMA + 1, V, self._drafts)
        self.masks.begin(sampling or Sampling(), grammar)
        self.masks.buffer.host[:] = 255  # what is not written shows

    def fill(self, drafts: Sequence[int]) -> None:
        self._drafts.host[: len(drafts)] = drafts
        self.masks.fill(len(drafts))

    def allowed(self, row: int) -> set[int]:
        bits = np.unpackbits(self.masks.buffer.host[row], bitorder="little")
        return set(np.flatnonzero(bits).tolist())


def test_a_row_sees_the_drafts_before_it() -> None:
    """vllm 34650: one mask for a whole block."""
    grammar = Rising()
    round_ = Round(grammar, Sampling(banned_tokens=(5,)))
    round_.masks.grow([3])
    round_.fill([10, 20, 60])
    assert [round_.allowed(row) for row in range(4)] == [
        set(range(last + 1, V)) - {5} for last in (3, 10, 20, 60)
    ]
    assert grammar.text == [3], "the drafts were taken back"


def test_a_draft_that_may_not_come_has_no_weight_in_its_row() -> None:
    round_ = Round(Rising())
    round_.masks.grow([30])
    round_.fill([40, 20, 50])
    assert 20 not in round_.allowed(1)


@pytest.mark.parametrize("where", ["fill", "advance"])
def test_after_a_draft_the_grammar_breaks_down_on_nothing_may_come(where: str) -> None:
    """It raised, and kept the drafts it had taken in: speculation showed where plain decoding may
    never have come to, and the text could not go on."""
    grammar = Rising(20, where)
    round_ = Round(grammar)
    round_.masks.grow([3])
    round_.fill([10, 20, 60])
    assert [round_.allowed(row) for row in range(2)] == [set(range(4, V)), set(range(11, V))]
    assert round_.allowed(2) == set(), "never the mask of an earlier round"
    assert grammar.text == [3]
    round_.fill([10, 11])
    assert round_.allowed(2) == set(range(12, V))


def test_a_grammar_that_breaks_down_on_the_text_itself_is_an_error() -> None:
    round_ = Round(Rising(20))
    round_.masks.grow([20])
    with pytest.raises(RequestError, match="cannot go on"):
        round_.fill([30])
    round_.masks.shrink(1)
    round_.fill([30])
    assert round_.allowed(0) == ALL

"""Calls that are made of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spec_export.engines.backend import Buffer, Call, Device


class Sequel:
    """Calls one after another."""

    def __init__(self, *calls: Call) -> None:
        self._calls = calls

    def enqueue(self) -> None:
        """Run them."""
        for call in self._calls:
            call.enqueue()


class Fallback:
    """Ways to compute the same rows; where one could not, the next computes that row alone.

    Args:
        device: where they run.
        ways: bind rows `start` to `stop`, in the order they are tried; each when first needed. The
            last one always can.
        overflow: `[rows]` int64, 1 for each row that a way could not compute; the last one does
            not write it.
        start: the first of the rows.
    """

    def __init__(
        self,
        device: Device,
        ways: Sequence[Callable[[int, int], Call]],
        overflow: Buffer,
        start: int = 0,
    ) -> None:
        rows = overflow.shape[0]
        self._device, self._ways, self._overflow, self._start = device, ways[1:], overflow, start
        self._call = ways[0](start, start + rows)
        self._found = np.zeros(rows, np.int64)
        self._is_missing = self._found.data  # gives Python integers without making an array
        self._alone: dict[int, Fallback] = {}

    def enqueue(self) -> None:
        """Run the first way, then others for the rows it could not compute."""
        self._call.enqueue()
        if not self._ways:
            return
        self._device.download(self._overflow, self._found)
        for row, is_missing in enumerate(self._is_missing):
            if is_missing:
                self._row(row).enqueue()

    def _row(self, row: int) -> Fallback:
        if row not in self._alone:
            flag = self._overflow.part(row, row + 1)
            self._alone[row] = Fallback(self._device, self._ways, flag, self._start + row)
        return self._alone[row]

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
    """Calls that compute the same, the next one where one could not; the last one always can.

    Args:
        device: where they run.
        calls: make them, in the order they are tried; each is made when first needed.
        overflow: `[1]` int64, 1 where a call could not; the last one does not write it.
    """

    def __init__(
        self, device: Device, calls: Sequence[Callable[[], Call]], overflow: Buffer
    ) -> None:
        self._device, self._unmade = device, list(calls[1:])
        self._calls = [calls[0]()]
        self._overflow, self._found = overflow, np.zeros(1, np.int64)

    def enqueue(self) -> None:
        """Run until one can."""
        tried = 0
        while True:
            self._calls[tried].enqueue()
            tried += 1
            if tried == len(self._calls) and not self._unmade:
                return
            self._device.download(self._overflow, self._found)
            if not self._found[0]:
                return
            if tried == len(self._calls):
                self._calls.append(self._unmade.pop(0)())

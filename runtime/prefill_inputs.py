"""What a prefill pass reads, written for one chunk of tokens after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_export.engines.backend import Device
from spec_export.engines.passes import BoundRole


class PrefillInputs:
    """The inputs of a bound prefill pass. Allocates nothing after.

    Args:
        device: where the pass runs.
        bound: the pass.
        has_logits: have the pass leave the logits of the last token of a chunk.

    Attributes:
        rows: tokens of a chunk.
    """

    def __init__(self, device: Device, bound: BoundRole, *, has_logits: bool) -> None:
        self.rows = bound.rows
        self._device, self._buffers = device, bound.buffers
        self._tokens = np.zeros((1, bound.rows), np.int64)
        self._start = np.zeros(1, np.int64)
        self._last: np.ndarray | None = None
        if has_logits:
            self._last = np.zeros(bound.buffers["logit_rows"].shape, np.int64)

    def upload(self, tokens: Sequence[int], start: int) -> None:
        """Have the next pass write `tokens`, a chunk at most, from cache row `start` on."""
        self._tokens.fill(0)
        self._tokens[0, : len(tokens)] = tokens
        self._start[0] = start
        self._device.upload(self._buffers["input_ids"], self._tokens)
        self._device.upload(self._buffers["kv_len"], self._start)
        if self._last is not None:
            self._last.fill(len(tokens) - 1)
            self._device.upload(self._buffers["logit_rows"], self._last)

"""How sure a drafting model is of its next token, read by the host while a round drafts.

A round may draft no further than a token of which the draft is not sure: what is looked at is the
row that token is drawn from, before it is, so nothing depends on what is drawn. It costs a small
graph and a wait for the device at each draft that another may follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_export.engines.backend import Buffer
from spec_export.runtime.opened import OpenedBundle


class DraftConfidence:
    """The largest probability of each of a draft's rows, without anything a request changes.

    Args:
        opened: a bundle with a drafting model.
        logits: `[1, 1, Vd]` of each of its passes in a round, in order.
    """

    def __init__(self, opened: OpenedBundle, logits: Sequence[Buffer]) -> None:
        self._device, engine = opened.device, opened.sampling["confidence"]
        self._share = opened.device.allocate((1,), np.float32)
        self._host = np.zeros(1, np.float32)
        self._value = self._host.data  # gives Python numbers without making an array
        bound = {"confidence": self._share}
        self._calls = [engine.bind("run", bound | {"logits": row}) for row in logits]

    def read(self, i: int) -> float:
        """Of the row that the `i`-th pass has left; 0 where it is no distribution."""
        self._calls[i].enqueue()
        self._device.download(self._share, self._host)
        return float(self._value[0])

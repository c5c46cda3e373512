"""What the text so far means for the next token, kept where the sampling graphs read it.

Two inputs grow with the text: the committed ids, and how often each id is among them, separately
for prompt and output. A token costs two copies of one element. Owned by the `SamplingCalls` of a
plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spec_export.engines.backend import Buffer, Device
from spec_export.engines.graphs import BIAS_SLOTS, END_SLOTS
from spec_export.runtime.sampling import Sampling


class TextEdits:
    """The inputs of the graphs with `edits`.

    Args:
        device: where they lie.
        capacity: C, ids the history has room for.
        vocabulary: V.
        end_ids: tokens that end a text.

    Attributes:
        buffers: by the name of the input, but for `draft_tokens` and `row0`.
    """

    def __init__(
        self, device: Device, capacity: int, vocabulary: int, end_ids: Sequence[int]
    ) -> None:
        self._device = device
        self._end_ids = end_ids
        self._shapes: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
            "history": ((capacity,), np.int64),
            "n_history": ((1,), np.int64),
            "prompt_counts": ((vocabulary,), np.float32),
            "output_counts": ((vocabulary,), np.float32),
            "repetition": ((1,), np.float32),
            "presence": ((1,), np.float32),
            "frequency": ((1,), np.float32),
            "ngram": ((1,), np.int64),
            "bias_ids": ((BIAS_SLOTS,), np.int64),
            "bias_values": ((BIAS_SLOTS,), np.float32),
            "end_ids": ((END_SLOTS,), np.int64),
            "end_from": ((1,), np.int64),
        }
        self.buffers: dict[str, Buffer] = {
            name: device.allocate(shape, kind) for name, (shape, kind) in self._shapes.items()
        }
        self._host = {name: np.zeros(shape, kind) for name, (shape, kind) in self._shapes.items()}
        self._length = self._prompt = self._min_tokens = 0

    def begin(self, sampling: Sampling) -> None:
        """Take over the values of a request; the text stays."""
        self._set("repetition", sampling.repetition_penalty)
        self._set("presence", sampling.presence_penalty)
        self._set("frequency", sampling.frequency_penalty)
        self._set("ngram", sampling.no_repeat_ngram)
        bias = list(sampling.logit_bias.items()) or [(0, 0.0)]
        bias += [bias[0]] * (BIAS_SLOTS - len(bias))
        self._set("bias_ids", [token for token, _ in bias])
        self._set("bias_values", [value for _, value in bias])
        ends = list(self._end_ids) if sampling.min_tokens else []
        ends = ends or [0]
        self._set("end_ids", ends + [ends[0]] * (END_SLOTS - len(ends)))
        self._min_tokens = sampling.min_tokens if self._end_ids else 0
        self._set_end()

    def grow(self, tokens: Sequence[int], *, is_prompt: bool = False) -> None:
        """Take in committed tokens."""
        for token in tokens:
            self._host["history"][self._length] = token
            self._upload("history", self._length)
            self._count(token, self._length, 1, is_prompt=is_prompt)
            self._length += 1
        if is_prompt:
            self._prompt = self._length
            self._set_end()
        self._set("n_history", self._length)

    def shrink(self, length: int) -> None:
        """Forget everything from token `length` on."""
        while self._length > length:
            self._length -= 1
            token = int(self._host["history"][self._length])
            self._count(token, self._length, -1, is_prompt=self._length < self._prompt)
        if length < self._prompt:
            self._prompt = length
            self._set_end()
        self._set("n_history", self._length)

    def _count(self, token: int, place: int, by: int, *, is_prompt: bool) -> None:
        name = "prompt_counts" if is_prompt else "output_counts"
        self._host[name][token] += by
        self._upload(name, token)

    def _set_end(self) -> None:
        self._set("end_from", self._prompt + self._min_tokens if self._min_tokens else 0)

    def _set(self, name: str, value: float | list[int] | list[float]) -> None:
        self._host[name][:] = value
        self._device.upload(self.buffers[name], self._host[name])

    def _upload(self, name: str, at: int) -> None:
        self._device.upload(self.buffers[name].part(at, at + 1), self._host[name][at : at + 1])

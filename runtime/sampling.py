"""How tokens are drawn, and the sampling graphs bound for it.

Which graphs a request needs is chosen once, on the host: greedy or temperature, and by what the
draft is. What is off is not in the graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spec_export.engines.backend import Buffer, Call
from spec_export.engines.errors import RequestError
from spec_export.engines.passes import BoundRole
from spec_export.runtime.buffers import RoundBuffers
from spec_export.runtime.noise import Noise, Stream, race_size
from spec_export.runtime.opened import OpenedBundle

Variant = Literal["greedy", "temperature"]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a text are drawn.

    Attributes:
        temperature: 0 takes the most probable token, the first of equals.
        seed: of all randomness, 0 or more.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.temperature) or not 0 <= self.temperature <= 1e4:
            raise RequestError(f"temperature={self.temperature}: it is 0 to 10000")
        Noise(self.seed)

    @property
    def variant(self) -> Variant:
        """Which graphs serve it."""
        return "temperature" if self.temperature > 0 else "greedy"


class SamplingCalls:
    """The sampling graphs of one variant, bound to a session's buffers.

    Args:
        opened: the bundle.
        variant: greedy or temperature.
        buffers: what the round passes along.
        roles: the target's roles, for their logits.
        draft_logits: logits of the drafting model's passes, in order; empty without one.
    """

    def __init__(
        self,
        opened: OpenedBundle,
        variant: Variant,
        buffers: RoundBuffers,
        roles: Mapping[str, BoundRole],
        draft_logits: list[Buffer],
    ) -> None:
        self._opened, self._device, self._buffers = opened, opened.device, buffers
        self._variant = variant
        self._noise: Noise | None = None
        self._row = self._device.allocate((1,), np.int64)
        vocabulary, gamma = opened.manifest.models["target"].vocabulary, buffers.gamma
        self._inputs: dict[str, Buffer] = {}
        if variant == "temperature":
            self._temperature = np.zeros(1, np.float32)
            self._race = np.zeros(race_size(vocabulary), np.float32)
            self._uniform = np.zeros(gamma, np.float32)
            for name, array in (("temperature", self._temperature), ("race", self._race)):
                self._inputs[name] = self._device.allocate(array.shape, np.float32)
            self._uniform_buffer = self._device.allocate((gamma,), np.float32)
        dense = variant == "temperature" and bool(draft_logits)
        self._q = self._device.allocate((gamma, vocabulary), np.float32) if dense else None
        self.sample = {
            name: self._bind_sample(role) for name, role in roles.items() if name != "verify"
        }
        self.propose = [self._bind_propose(i, logits) for i, logits in enumerate(draft_logits)]
        self.accept = self._bind_accept(roles["verify"]) if "verify" in roles else None

    def begin(self, sampling: Sampling) -> None:
        """Take over temperature and seed of a new text."""
        if self._variant == "temperature":
            self._noise = Noise(sampling.seed)
            self._temperature[0] = sampling.temperature
            self._device.upload(self._inputs["temperature"], self._temperature)

    def draw_for_sample(self, committed: int) -> None:
        """Noise for one token without drafts."""
        if self._noise is not None:
            self._noise.exponential(self._race, committed, 0, stream=Stream.SAMPLE)
            self._device.upload(self._inputs["race"], self._race)

    def draw_for_propose(self, committed: int, i: int) -> None:
        """Noise for the i-th draft of the round that starts at `committed`."""
        if self._noise is not None:
            self._noise.exponential(self._race, committed, i, stream=Stream.PROPOSE)
            self._device.upload(self._inputs["race"], self._race)

    def draw_for_accept(self, committed: int) -> None:
        """Noise for judging the round that starts at `committed`."""
        if self._noise is not None:
            self._noise.uniform(self._uniform, committed, 0, stream=Stream.ACCEPT)
            self._noise.exponential(self._race, committed, 0, stream=Stream.RESIDUAL)
            self._device.upload(self._uniform_buffer, self._uniform)
            self._device.upload(self._inputs["race"], self._race)

    def _bind_sample(self, role: BoundRole) -> Call:
        logits = role.buffers["logits"]
        engine = self._opened.sampling[f"sample_{self._variant}.{logits.shape[1]}"]
        bound = {
            "logits": logits,
            "row": self._row,
            "tokens": self._buffers.tokens.part(0, 1),
            "logprob": self._buffers.logprob.part(0, 1),
        }
        return engine.bind("run", self._inputs | bound)

    def _bind_propose(self, i: int, logits: Buffer) -> Call:
        name = "greedy" if self._q is None else "dense"
        bound = {
            "logits": logits,
            "row": self._row,
            "token": self._buffers.drafts.part(i, i + 1),
        }
        if self._q is not None:
            bound["q"] = self._q.part(i, i + 1)
        engine = self._opened.sampling[f"propose_{name}.{logits.shape[1]}"]
        return engine.bind("run", self._inputs | bound)

    def _bind_accept(self, verify: BoundRole) -> Call:
        buffers, next_head, gamma = self._buffers, self._buffers.next, self._buffers.gamma
        bound = {
            "logits": verify.buffers["logits"],
            "draft_tokens": buffers.drafts,
            "n_draft": buffers.n_draft,
            "last_id": buffers.last,
            "kv_len": buffers.kv_len,
            "tokens": buffers.tokens,
            "n_accepted": buffers.n_accepted,
            "logprob": buffers.logprob,
            "next_kv_len": next_head.part(0, 1),
            "next_draft_kv_len": next_head.part(1, 1 + gamma),
            "next_ids": next_head.part(1 + gamma, 3 + gamma),
        }
        name = "accept_greedy"
        if self._variant == "temperature":
            bound["uniform"] = self._uniform_buffer
            name = "accept_one_hot" if self._q is None else "accept_dense"
        if self._q is not None:
            bound["q"] = self._q
        return self._opened.sampling[name].bind("run", self._inputs | bound)

"""What the device does in a round, under one plan: calls in their order, and recordings of them.

Knows no text. Lengths, tokens and noise lie in the round's buffers before it is enqueued, and it
leaves there what the next one starts with. On a GPU a round that needs nothing of the host is
recorded once and launched as one call from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_export.engines.backend import Call, Device
from spec_export.engines.errors import EngineError
from spec_export.engines.passes import BoundRole
from spec_export.runtime.buffers import RoundBuffers
from spec_export.runtime.call_chains import Sequel
from spec_export.runtime.drafts import Draft, MaskFill
from spec_export.runtime.sampling_calls import SamplingCalls


class Advance:
    """Puts the line's head where the next round starts."""

    def __init__(self, device: Device, buffers: RoundBuffers) -> None:
        self._copy, self._next, self._head = device.copy, buffers.next, buffers.head

    def enqueue(self) -> None:
        """Copy."""
        self._copy(self._next, self._head)


class Rounds:
    """The rounds of a plan.

    Args:
        device: where they run.
        buffers: what they pass along.
        roles: the target's, bound.
        verifying: names of the roles a round may take, by the drafts they have room for.
        draft: where drafts come from.
        sampling: the plan's calls.
    """

    def __init__(
        self,
        device: Device,
        buffers: RoundBuffers,
        roles: Mapping[str, BoundRole],
        verifying: Mapping[int, str],
        draft: Draft | None,
        sampling: SamplingCalls,
    ) -> None:
        self._device, self._roles, self._draft = device, roles, draft
        self._verifying = sorted(verifying.items())
        self.sampling = sampling
        self._advance = Advance(device, buffers)
        self._made: dict[tuple[str, int], Call] = {}
        self._recorded: dict[tuple[str, int], Call] = {}
        self._refused: set[tuple[str, int]] = set()

    def role(self, n_draft: int) -> str:
        """The narrowest verify pass with room for the drafts."""
        return next(name for gamma, name in self._verifying if gamma >= n_draft)

    def call(self, role: str, n_draft: int) -> Call:
        """A round of `n_draft` drafts that `role` verifies, or a token without drafts after it."""
        key = role, n_draft
        if key in self._recorded:
            return self._recorded[key]
        if key not in self._made:
            self._made[key] = Sequel(*self._calls(role, n_draft))
        return self._made[key]

    def wants_recording(self, role: str, n_draft: int) -> bool:
        """Whether a recording would pay and can be made: there is none, and no host in the round.

        The token after a prefill is drawn once a text.
        """
        is_apart = role == "prefill" or self.sampling.follows_drafts
        known = (role, n_draft) in self._recorded or (role, n_draft) in self._refused
        return self._device.is_deferred and not is_apart and not known

    def record(self, role: str, n_draft: int) -> Call:
        """Have `call` give a recording from now on. Lengths on the device move as in a round.

        Raises:
            EngineError: it cannot be recorded; it is not tried again, and runs call by call.
        """
        try:
            recorded = self._device.record(self.call(role, n_draft).enqueue)
        except EngineError:
            self._refused.add((role, n_draft))
            raise
        self._recorded[role, n_draft] = recorded
        return recorded

    def forget(self, role: str, n_draft: int) -> None:
        """Drop a recording."""
        del self._recorded[role, n_draft]

    def _calls(self, role: str, n_draft: int) -> Sequence[Call]:
        sampling = self.sampling
        calls: list[Call] = [sampling.races] if sampling.races is not None else []
        if n_draft:
            assert self._draft is not None
            calls += self._draft.calls(n_draft, sampling)
        if role != "prefill":
            calls.append(self._roles[role].call)
        if sampling.follows_drafts:
            calls.append(MaskFill(sampling, n_draft))
        judge = sampling.accept if role.startswith("verify") else sampling.sample
        return [*calls, judge[role], self._advance]

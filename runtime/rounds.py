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
from spec_export.runtime.drafts import Draft, MaskFill, ModelDraft
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
        self._steps: list[tuple[Call, Call]] = []
        self._made: dict[tuple[str, int, bool], Call] = {}
        self._recorded: dict[tuple[str, int], Call] = {}
        self._refused: set[tuple[str, int]] = set()

    def role(self, n_draft: int) -> str:
        """The narrowest verify pass with room for the drafts."""
        return next(name for gamma, name in self._verifying if gamma >= n_draft)

    def draft(self, most: int, least: float) -> int:
        """Draft tokens one by one while the drafting model is sure of them; returns how many.

        The first row whose most probable token has less than `least` gives the last draft: its pass
        has run, and no other follows. That is decided before its token is drawn, so the law of the
        text is untouched; to leave out a draft for what was drawn would change it.

        Args:
            most: drafts at most, 1 or more.
            least: probability, 0 to 1.
        """
        assert isinstance(self._draft, ModelDraft)
        while len(self._steps) < most:
            self._steps.append(self._draft.step(len(self._steps), self.sampling))
        if self.sampling.races is not None:
            self.sampling.races.enqueue()
        for i in range(most):
            run, draw = self._steps[i]
            run.enqueue()
            is_last = i + 1 == most or self._draft.confidence(i) < least
            draw.enqueue()
            if is_last:
                return i + 1
        raise AssertionError("a round that drafts has a last draft")

    def call(self, role: str, n_draft: int, *, is_drafted: bool = False) -> Call:
        """A round of `n_draft` drafts that `role` verifies, or a token without drafts after it.

        Args:
            role: of the target.
            n_draft: drafts it has.
            is_drafted: they are there, by `draft`; what is left is to verify them.
        """
        if not is_drafted and (role, n_draft) in self._recorded:
            return self._recorded[role, n_draft]
        key = role, n_draft, is_drafted
        if key not in self._made:
            drafting = [] if is_drafted else self._drafting(n_draft)
            self._made[key] = Sequel(*drafting, *self._judging(role, n_draft))
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

    def _drafting(self, n_draft: int) -> Sequence[Call]:
        calls: list[Call] = [] if self.sampling.races is None else [self.sampling.races]
        if n_draft:
            assert self._draft is not None
            calls += self._draft.calls(n_draft, self.sampling)
        return calls

    def _judging(self, role: str, n_draft: int) -> Sequence[Call]:
        sampling = self.sampling
        calls: list[Call] = [] if role == "prefill" else [self._roles[role].call]
        if sampling.follows_drafts:
            calls.append(MaskFill(sampling, n_draft))
        judge = sampling.accept if role.startswith("verify") else sampling.sample
        return [*calls, judge[role], self._advance]

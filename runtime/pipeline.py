"""Rounds that are under way: enqueued, one of them ahead of its time, and recorded.

A pipelined session enqueues the next round before it has read one, so that a GPU does not wait for
the host. Where the text takes another turn, what that round did is forgotten: it wrote past the
committed rows, and the lengths are put back.

Reads the text and never changes it; reading a round is the session's part, and so is getting ready
again after an engine error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spec_export.engines.backend import Call
from spec_export.engines.errors import EngineError
from spec_export.engines.passes import BoundRole
from spec_export.runtime.buffers import HostMirror, Report, RoundBuffers
from spec_export.runtime.drafts import Draft
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.rounds import Rounds

_OTHER_TOKENS = (1, 7, 97)  # past the last one, to see that what comes out moves with it


@dataclass(frozen=True)
class Started:
    """A round that is under way, or a token without drafts (`n_draft` 0)."""

    role: str
    n_draft: int
    report: Report
    is_early: bool = False


class Pipeline:
    """The rounds of one session that were enqueued and not read; two at most.

    Args:
        opened: the bundle.
        roles: the target's, bound.
        buffers: what rounds pass along.
        host: the host's side of them.
        history: the session's tokens.
        draft: where drafts come from.
        remarks: where it is noted that a round could not be recorded.
        is_on: record rounds, and enqueue the next before the last was read.
    """

    def __init__(
        self,
        opened: OpenedBundle,
        roles: Mapping[str, BoundRole],
        buffers: RoundBuffers,
        host: HostMirror,
        history: Sequence[int],
        draft: Draft | None,
        remarks: list[str],
        *,
        is_on: bool,
    ) -> None:
        self.is_on = is_on
        self._roles, self._host, self._history, self._draft = roles, host, history, draft
        self._remarks = remarks
        self._capacity = opened.manifest.capacity
        self._vocabulary = opened.manifest.models["target"].vocabulary
        self._reports = [Report(opened.device, buffers) for _ in range(2)]
        self._ahead: Started | EngineError | None = None
        self._drawn = 0  # rounds and single tokens of this text: where their noise belongs

    def begin(self, rounds: Rounds, draft_confidence: float, *, is_listed: bool) -> None:
        """Begin a text; nothing is under way.

        Args:
            rounds: those of its plan.
            draft_confidence: a round drafts no further than a token the draft is less sure of.
            is_listed: the most probable tokens are read of each row, once its round is.
        """
        self._rounds, self._least_confidence = rounds, draft_confidence
        self._is_listed = is_listed
        self._drawn = 0

    def take(self, role: str, n_draft: int, *, more: bool) -> Started:
        """The round under way, or a new one. Then the next is begun, where it may be.

        Args:
            role: of the target, that verifies or extends the text.
            n_draft: drafts of the round.
            more: another such round will follow, unless the text ends.

        Raises:
            EngineError: it could not be enqueued.
        """
        if self.is_under_way(n_draft, role):
            assert isinstance(self._ahead, Started)
            started, self._ahead = self._ahead, None
        else:
            self.drop()
            started = self._start(role, n_draft)
        if more and self._can_run_ahead(role, n_draft):
            try:
                self._ahead = self._start(role, n_draft, unread=n_draft + 1)
            except EngineError as error:
                self._ahead = error
        return started

    def is_under_way(self, n_draft: int, role: str | None = None) -> bool:
        """Whether such a round was enqueued ahead; an error in doing so is raised here."""
        ahead = self._ahead
        if isinstance(ahead, EngineError):
            raise ahead
        return ahead is not None and ahead.n_draft == n_draft and role in (None, ahead.role)

    def drop(self) -> None:
        """Forget the round that was enqueued ahead; its noise goes to the one in its place.

        Raises:
            EngineError: it failed; it is forgotten all the same.
        """
        ahead = self._forget()
        if ahead is not None:
            ahead.report.wait()
            self._host.place_after(self._history)

    def abandon(self) -> None:
        """The same after a failed pass, whose error is on its way to the caller."""
        ahead = self._forget()
        if ahead is not None:
            with contextlib.suppress(EngineError):
                ahead.report.wait()

    def _forget(self) -> Started | None:
        ahead, self._ahead = self._ahead, None
        if not isinstance(ahead, Started):
            return None
        self._drawn -= 1
        return ahead

    def _start(self, role: str, n_draft: int, unread: int = 0) -> Started:
        """Enqueue a round that starts up to `unread` tokens after the committed ones."""
        rounds, committed = self._rounds, len(self._history)
        if role != "prefill":
            assert_room(committed + unread, self._roles[role].rows, self._capacity)
        start, stop = committed + min(unread, 1), committed + unread + n_draft + 1
        rounds.sampling.draw(self._drawn, start, stop, n_draft)
        report, wanted = self._reports[self._drawn % 2], n_draft
        may_end_early = self._may_end_early(n_draft)
        if may_end_early:  # noise of drafts that are not made is used by nothing else
            n_draft = rounds.draft(n_draft, self._least_confidence)
            role = rounds.role(n_draft)
        if role.startswith("verify"):
            self._host.set_n_draft(n_draft)
        is_recordable = self.is_on and not unread and not may_end_early
        if is_recordable and rounds.wants_recording(role, n_draft):
            self._record(role, n_draft)
        rounds.call(role, n_draft, is_drafted=may_end_early).enqueue()
        report.start()
        self._drawn += 1
        return Started(role, n_draft, report, n_draft < wanted)

    def _can_run_ahead(self, role: str, n_draft: int) -> bool:
        """Whether another such round needs nothing that the host has yet to see."""
        most = len(self._history) + n_draft + 1
        return (
            self.is_on
            and not self._may_end_early(n_draft)
            and not self._rounds.sampling.follows_text
            and not self._is_listed
            and most - 1 + self._roles[role].rows <= self._capacity
            and (not n_draft or self._draft is None or self._draft.can_run_ahead(n_draft, most))
        )

    def _may_end_early(self, n_draft: int) -> bool:
        """Whether the host looks at the drafts of such a round while they are made."""
        return n_draft > 1 and self._least_confidence > 0

    def _record(self, role: str, n_draft: int) -> None:
        """Record a round, and see that the recording reads what it is given.

        One that was captured with values of its own would repeat itself without an error, so what
        comes out has to move with what goes in. A round that cannot be recorded runs call by call.

        Raises:
            EngineError: it does not do what it was recorded from.
        """
        rounds, report, last = self._rounds, self._reports[0], self._history[-1]

        def outcome(call: Call, token: int) -> bytes:
            self._host.place_after(self._history, token)
            call.enqueue()
            report.start()
            report.wait()
            return report.content()

        given = rounds.call(role, n_draft)
        expected = outcome(given, last)
        try:
            recorded = rounds.record(role, n_draft)
        except EngineError as error:
            self._remarks.append(f"rounds run call by call, they could not be recorded: {error}")
            self._host.place_after(self._history)
            return
        others = ((last + step) % self._vocabulary for step in _OTHER_TOKENS)
        tried = ((token, outcome(given, token)) for token in others)
        moved = next((pair for pair in tried if pair[1] != expected), None)
        is_same = outcome(recorded, last) == expected
        if moved is None or not is_same or outcome(recorded, moved[0]) != moved[1]:
            rounds.forget(role, n_draft)
            raise EngineError(
                f"a recorded round ({role}, {n_draft} drafts) does not do what it was recorded "
                "from; use `--no-pipeline`, and report this"
            )
        self._host.place_after(self._history)


def assert_room(committed: int, rows: int, capacity: int) -> None:
    """An engine may drop rows past the capacity silently; ours never get there.

    Raises:
        EngineError: a pass of `rows` rows after `committed` tokens would.
    """
    if committed - 1 + rows > capacity:
        raise EngineError(
            f"a pass of {rows} rows after {committed} tokens does not fit the cache of "
            f"{capacity} rows"
        )

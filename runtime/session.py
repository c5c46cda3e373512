"""One sequence: its caches, its lengths, and the passes that extend it.

Who owns which length, between rounds, with `n` committed tokens:

    history         n         the session; ids on the host
    target kv_len   n - 1     the last committed token is row 0 of the next pass
    draft length    >= n - 2  the drafting model; less after steps without drafts (its lag)

A prefill of n tokens writes n rows; the first token is then sampled, which makes n + 1. A round of
`n_draft` drafts moves the target's length by `n_accepted + 1`. Rolling back moves no data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from spec_export.engines.backend import Buffer, Call
from spec_export.engines.errors import (
    EngineError,
    NonFiniteError,
    RequestError,
    SpecExportError,
)
from spec_export.engines.graphs import ModelSpec
from spec_export.engines.passes import BoundRole, allocate_caches, bind_role
from spec_export.runtime.buffers import HostMirror, allocate_round
from spec_export.runtime.drafts import Draft, ModelDraft, NgramDraft
from spec_export.runtime.masks import Constraint
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.sampling import Plan, Sampling, plan_for
from spec_export.runtime.sampling_calls import SamplingCalls

Plain = Literal["exact_decode", "verify", "decode"]


@dataclass
class RoundResult:
    """What a round or a plain step emitted; one object a session, overwritten by the next.

    Attributes:
        tokens: emitted ids, `n_accepted + 1`.
        logprobs: of each, under the raw target distribution.
        n_draft: drafts verified.
        n_accepted: drafts accepted.
        top: of each token's row, the most probable tokens and their logprobs, where asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    n_draft: int
    n_accepted: int
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class Session:
    """A sequence over an opened bundle; many sessions may share one bundle, one thread each."""

    def __init__(self, opened: OpenedBundle) -> None:
        manifest = opened.manifest
        self.opened = opened
        self.gamma, self.max_len = manifest.gamma, manifest.max_len
        self.history: list[int] = []
        self.result = RoundResult([], [], 0, 0)
        self._device = opened.device
        self._spec: ModelSpec = manifest.models["target"]
        self._caches = allocate_caches(opened.device, self._spec)
        self._buffers = allocate_round(opened.device, self.gamma)
        self._host = HostMirror(opened.device, self._buffers)
        self._roles = {role.name: self._bind(role.name) for role in self._spec.roles}
        self._chunk = np.zeros((1, self._roles["prefill"].rows), np.int64)
        self._chunk_start = np.zeros(1, np.int64)
        self._chunk_last = np.zeros(self._roles["prefill"].buffers["logit_rows"].shape, np.int64)
        self._spoiled = False  # whether a pass has failed since the text was empty
        self.draft = self._make_draft()
        self._variants: dict[Plan, SamplingCalls] = {}
        self._listed = 0
        self._sampling = self._calls_for(Sampling())
        self.begin(Sampling())

    # --- a text -------------------------------------------------------------------------------

    def begin(
        self,
        sampling: Sampling,
        plain: Plain = "exact_decode",
        constraint: Constraint | None = None,
    ) -> None:
        """Forget the text and begin another.

        Args:
            sampling: how its tokens are drawn.
            plain: the role that extends it without drafts: `exact_decode` (two rows, with the bits
                of a verify pass), `verify` (its full width) or `decode` (one row, the fastest).
            constraint: a grammar at the beginning of a text; it follows this one.

        Raises:
            RequestError: the sampling does not fit the bundle.
        """
        calls = self._calls_for(sampling, is_constrained=constraint is not None)
        self.rewind(0)
        self._sampling, self._listed = calls, sampling.top_logprobs
        calls.begin(sampling, constraint)
        self._plain: Plain = "exact_decode" if plain == "verify" and not self.gamma else plain

    def prefill(self, tokens: Sequence[int], *, drafts: bool = True) -> None:
        """Take in a prompt, chunk by chunk. Nothing is sampled yet.

        Args:
            tokens: the prompt.
            drafts: whether rounds with drafts follow; a drafting model that is needed after all
                takes the prompt in then.

        Raises:
            RequestError: there is text already, the prompt is empty, has ids the model does not
                know, or is longer than the context.
        """
        self._check_prompt(tokens)
        rows = self._chunk.shape[1]
        for start in range(0, len(tokens), rows):
            self._run_chunk(tokens[start : start + rows], start)
        self.history.extend(tokens)
        self._sampling.grow(tokens, is_prompt=True)
        if isinstance(self.draft, NgramDraft) or (self.draft is not None and drafts):
            self.draft.prefill(tokens)

    def first(self) -> RoundResult:
        """Sample the token that follows the prompt, from the logits its prefill left."""
        return self._sample("prefill")

    def plain(self) -> RoundResult:
        """Extend the text by one token without drafts."""
        if self._plain == "verify":
            return self._verify(0)
        self._assert_room(self._roles[self._plain].rows)
        self._enqueue(self._roles[self._plain].call)
        return self._sample(self._plain)

    def round(self, n: int) -> RoundResult:
        """Draft up to `n` tokens, verify them in one pass, emit the accepted and one more.

        Args:
            n: drafts wanted, 0 to gamma. It may depend on the text so far, never on what this
                round draws.
        """
        assert 0 <= n <= self.gamma
        if n == 0 or self.draft is None:
            return self.plain()
        try:
            n_draft = self.draft.propose(n, self._sampling)
        except EngineError:
            self._recover()
            raise
        return self._verify(n_draft) if n_draft else self.plain()

    def rewind(self, length: int) -> None:
        """Forget everything from token `length` on. No data moves."""
        assert 0 <= length <= len(self.history)
        self._sampling.shrink(length, len(self.history))
        del self.history[length:]
        if self.draft is not None:
            self.draft.rewind(length)
        if self._spoiled:  # rows that are given up now may be what broke the pass
            self._zero_past_text()
            self._spoiled = length > 0
        self._place()

    @property
    def room(self) -> int:
        """Tokens that still fit in the context."""
        return self.max_len - len(self.history)

    # --- passes -------------------------------------------------------------------------------

    def _verify(self, n_draft: int) -> RoundResult:
        """One target pass over `last, drafts`, judged inside the graph."""
        host, start, accept = self._host, len(self.history), self._sampling.accept
        assert accept is not None
        self._assert_room(self.gamma + 1)
        host.set_n_draft(n_draft)
        self._sampling.draw_for_accept(start, n_draft)
        self._enqueue(self._roles["verify"].call)
        self._enqueue(accept)
        self._device.copy(self._buffers.next, self._buffers.head)
        host.read_report()
        return self._commit("verify", n_draft, host.n_accepted[0])

    def _sample(self, role: str) -> RoundResult:
        """Draw one token from the logits a pass left, and move the lengths by one."""
        self._sampling.draw_for_sample(len(self.history))
        self._enqueue(self._sampling.sample[role])
        self._host.read_report()
        self._commit(role, 0, 0)
        self._place()
        return self.result

    def _commit(self, role: str, n_draft: int, n_accepted: int) -> RoundResult:
        """Take the report into the history; refuse what is not finite."""
        host, result = self._host, self.result
        result.tokens.clear()
        result.logprobs.clear()
        for i in range(n_accepted + 1):
            if not math.isfinite(host.logprob[i]):
                self._recover()
                raise _not_drawn(host.logprob[i], len(self.history) + i)
            result.tokens.append(host.tokens[i])
            result.logprobs.append(host.logprob[i])
        result.n_draft, result.n_accepted = n_draft, n_accepted
        listed = self._listed
        result.top = self._sampling.top_logprobs(role, n_accepted + 1, listed) if listed else []
        self.history.extend(result.tokens)
        self._sampling.grow(result.tokens)
        if self.draft is not None:
            self.draft.commit(result.tokens, n_accepted)
        return result

    def _enqueue(self, call: Call) -> None:
        try:
            call.enqueue()
        except EngineError:
            self._recover()
            raise

    def _recover(self) -> None:
        """After a failed pass: be ready for another, and for taking the text back."""
        self._spoiled = True
        self._zero_past_text()
        self._place()

    def _zero_past_text(self) -> None:
        """Zero what lies past the committed text: a masked column still meets 0 * NaN = NaN."""
        kept = max(0, len(self.history) - 1)
        for state in self._spec.states:
            self._device.clear(self._caches[state.input], state.length_axis, kept)
        if self.draft is not None:
            self.draft.recover(kept)

    def _run_chunk(self, part: Sequence[int], start: int) -> None:
        chunk, buffers = self._chunk, self._roles["prefill"].buffers
        assert start + chunk.shape[1] <= self.opened.manifest.capacity
        chunk.fill(0)
        chunk[0, : len(part)] = part
        self._chunk_start[0] = start
        self._chunk_last.fill(len(part) - 1)
        self._device.upload(buffers["input_ids"], chunk)
        self._device.upload(buffers["kv_len"], self._chunk_start)
        self._device.upload(buffers["logit_rows"], self._chunk_last)
        self._enqueue(self._roles["prefill"].call)

    def _place(self) -> None:
        """Put the lengths and the last two tokens on the device where the history says."""
        n = len(self.history)
        if n:
            self._host.set_lengths(n, self.history[n - 2] if n > 1 else 0, self.history[n - 1])

    def _assert_room(self, rows: int) -> None:
        """An engine may drop rows past the capacity silently; ours never get there."""
        assert len(self.history) - 1 + rows <= self.opened.manifest.capacity

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        if self.history:
            raise RequestError("the session holds a text already; begin another first")
        if not tokens:
            raise RequestError("the prompt has no tokens")
        if len(tokens) > self.max_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, but the bundle was built for a context of "
                f"{self.max_len}; shorten it, or rebuild with a larger `--max-len`"
            )
        if min(tokens) < 0 or max(tokens) >= self._spec.vocabulary:
            raise RequestError(
                f"the prompt has an id outside 0 to {self._spec.vocabulary - 1}, which is the "
                "target's vocabulary"
            )

    # --- binding ------------------------------------------------------------------------------

    def _bind(self, role: str) -> BoundRole:
        """Bind a role of the target; all but `prefill` read the round's line."""
        given: dict[str, Buffer] = {}
        if role != "prefill":
            tokens = self._buffers.pass_tokens(int(self._spec.role(role).rows))
            given = {"input_ids": tokens, "kv_len": self._buffers.kv_len}
        return bind_role(self._device, self.opened.target, self._spec, role, self._caches, given)

    def _make_draft(self) -> Draft | None:
        method = self.opened.manifest.method
        if method == "model":
            return ModelDraft(self.opened, self._buffers, self.history)
        return NgramDraft(self._host) if method == "ngram" else None

    def _calls_for(self, sampling: Sampling, *, is_constrained: bool = False) -> SamplingCalls:
        """The sampling graphs of a request, bound when their plan is first asked for."""
        plan = plan_for(sampling, self.opened.manifest, is_constrained=is_constrained)
        if plan not in self._variants:
            logits = self.draft.logits if isinstance(self.draft, ModelDraft) else []
            calls = SamplingCalls(self.opened, plan, self._buffers, self._roles, logits)
            self._variants[plan] = calls
        return self._variants[plan]


def _not_drawn(logprob: float, at: int) -> SpecExportError:
    """Why there is no token `at`."""
    if math.isnan(logprob):
        return NonFiniteError(
            f"the target produced NaN or infinity at token {at}; the text before it is kept and "
            "the session can go on from there"
        )
    return RequestError(
        f"no token may come at token {at}: everything the target gives any probability is "
        "forbidden by allowed_tokens, banned_tokens, logit_bias, no_repeat_ngram, min_tokens or a "
        "grammar; the text before it is kept"
    )

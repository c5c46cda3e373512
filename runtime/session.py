"""One sequence: its caches, its lengths, and the passes that extend it.

Who owns which length, between rounds, with `n` committed tokens:

    history         n         the session; ids on the host
    target kv_len   n - 1     the last committed token is row 0 of the next pass
    draft length    >= n - 2  the drafting model; less after steps without drafts (its lag)

A prefill of n tokens writes n rows; the first token is then sampled, which makes n + 1. A round of
`n_draft` drafts moves the target's length by `n_accepted + 1`. Rolling back moves no data. Between
rounds the lengths and the last tokens on the device are those of the history.

How rounds are enqueued, recorded and run ahead of their time is in `pipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spec_export.engines.backend import Buffer
from spec_export.engines.errors import (
    EngineError,
    NonFiniteError,
    RequestError,
    SpecExportError,
)
from spec_export.engines.graphs import ModelSpec, verify_name
from spec_export.engines.passes import BoundRole, allocate_caches, bind_role
from spec_export.runtime.buffers import HostMirror, allocate_round
from spec_export.runtime.drafts import Draft, HostDraft, ModelDraft, NgramDraft
from spec_export.runtime.masks import Constraint
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.pipeline import Pipeline, Started, assert_room
from spec_export.runtime.prefill_inputs import PrefillInputs
from spec_export.runtime.rounds import Rounds
from spec_export.runtime.sampling import Plan, Sampling, plan_for
from spec_export.runtime.sampling_calls import SamplingCalls

Plain = Literal["exact_decode", "verify", "decode"]


@dataclass
class RoundResult:
    """What a round or a plain step emitted; one object a session, overwritten by the next.

    Attributes:
        tokens: emitted ids, `n_accepted + 1`; all of them drafts where the row after them cannot
            be drawn from.
        logprobs: of each, under the raw target distribution.
        n_draft: drafts verified.
        n_accepted: drafts accepted.
        top: of each token's row, the most probable tokens and their logprobs, where asked for.
        is_early: there would have been another draft, had the model been sure of the last one.
    """

    tokens: list[int]
    logprobs: list[float]
    n_draft: int
    n_accepted: int
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    is_early: bool = False


class Session:
    """A sequence over an opened bundle; many sessions may share one bundle, one thread each.

    Args:
        opened: the bundle.
        pipelined: record rounds, and enqueue the next before the last was read; None: where the
            device runs work after it was enqueued.
        draft: makes a source of drafts in place of the bundle's; it is given where to write them.

    Attributes:
        remarks: what is served in another way than it should be, in words.
        texts: texts begun so far.
    """

    def __init__(
        self,
        opened: OpenedBundle,
        *,
        pipelined: bool | None = None,
        draft: Callable[[HostMirror], Draft] | None = None,
    ) -> None:
        manifest = opened.manifest
        self.opened = opened
        self.gamma, self.max_len = manifest.gamma, manifest.max_len
        self.history: list[int] = []
        self.result = RoundResult([], [], 0, 0)
        self._device = opened.device
        self._has_to_pipeline = pipelined is True
        self._spec: ModelSpec = manifest.models["target"]
        self._caches = allocate_caches(opened.device, self._spec)
        self._buffers = allocate_round(opened.device, self.gamma)
        self._host = HostMirror(opened.device, self._buffers)
        self._roles = {role.name: self._bind(role.name) for role in self._spec.roles}
        self._chunk = PrefillInputs(opened.device, self._roles["prefill"], has_logits=True)
        self._spoiled = False  # whether a pass has failed since the text was empty
        self.remarks: list[str] = []
        self.texts = 0
        self.draft = self._make_draft() if draft is None else draft(self._host)
        self._pipeline = Pipeline(
            opened,
            self._roles,
            self._buffers,
            self._host,
            self.history,
            self.draft,
            self.remarks,
            is_on=opened.device.is_deferred if pipelined is None else pipelined,
        )
        self._variants: dict[Plan, Rounds] = {}
        self._listed = 0
        self._rounds = self._rounds_for(Sampling())
        self.begin(Sampling())

    # --- a text -------------------------------------------------------------------------------

    def begin(
        self,
        sampling: Sampling,
        plain: Plain = "exact_decode",
        constraint: Constraint | None = None,
        draft_confidence: float = 0.0,
    ) -> None:
        """Forget the text and begin another.

        Args:
            sampling: how its tokens are drawn.
            plain: the role that extends it without drafts: `exact_decode` (two rows, with the bits
                of a verify pass), `verify` (its full width) or `decode` (one row, the fastest).
            constraint: a grammar at the beginning of a text; it follows this one.
            draft_confidence: a round drafts no further than a token whose row gives its most
                probable one less, by the draft; 0: it always does.

        Raises:
            RequestError: the sampling does not fit the bundle, or rounds cannot stop drafting.
        """
        if draft_confidence:
            self.check_early_exit()
        rounds = self._rounds_for(sampling, is_constrained=constraint is not None)
        self.rewind(0)
        self.texts += 1
        self._rounds, self._listed = rounds, sampling.top_logprobs
        self._pipeline.begin(rounds, draft_confidence, is_listed=bool(self._listed))
        rounds.sampling.begin(sampling, constraint)
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
        rows = self._chunk.rows
        for start in range(0, len(tokens), rows):
            self._run_chunk(tokens[start : start + rows], start)
        self.history.extend(tokens)
        self._rounds.sampling.grow(tokens, is_prompt=True)
        if isinstance(self.draft, HostDraft) or (self.draft is not None and drafts):
            self.draft.prefill(tokens)
        self._host.place_after(self.history)

    def first(self) -> RoundResult:
        """Sample the token that follows the prompt, from the logits its prefill left."""
        return self._run("prefill", 0, more=False)

    def plain(self, *, more: bool = False) -> RoundResult:
        """Extend the text by one token without drafts.

        Args:
            more: another will follow, unless the text ends.
        """
        return self._run(self._plain, 0, more=more)

    def round(self, n: int, then: int | None = None) -> RoundResult:
        """Draft up to `n` tokens, verify them in one pass, emit the accepted and one more.

        Args:
            n: drafts wanted, 0 to gamma. It may depend on the text so far, never on what this
                round draws.
            then: drafts wanted in the round that follows, where that can be expected; what was
                begun for nothing is forgotten.
        """
        assert 0 <= n <= self.gamma
        if n == 0 or self.draft is None:
            return self.plain(more=then == 0)
        found = self._prepare(n)
        if found == 0:
            return self.plain()
        return self._run(self._rounds.role(found), found, more=then == n == found)

    def rewind(self, length: int) -> None:
        """Forget everything from token `length` on. No data moves."""
        assert 0 <= length <= len(self.history)
        try:
            self._pipeline.drop()
        except EngineError:
            self._recover()
            raise
        self._rounds.sampling.shrink(length, len(self.history))
        del self.history[length:]
        if self.draft is not None:
            self.draft.rewind(length)
        if self._spoiled:  # rows that are given up now may be what broke the pass
            self._zero_past_text()
            self._spoiled = length > 0
        self._host.place_after(self.history)

    @property
    def room(self) -> int:
        """Tokens that still fit in the context."""
        return self.max_len - len(self.history)

    @property
    def can_end_early(self) -> bool:
        """Whether rounds may stop drafting at no cost but that of looking."""
        return isinstance(self.draft, ModelDraft) and not self._pipeline.is_on

    def check_early_exit(self) -> None:
        """Refuse what cannot be done; say what is done at a price.

        Raises:
            RequestError: no model drafts, or rounds have to be pipelined.
        """
        if not isinstance(self.draft, ModelDraft):
            raise RequestError(
                "draft_confidence is for drafts of a model, and no model drafts in this session; "
                "leave it out"
            )
        if self._has_to_pipeline:
            raise RequestError(
                "draft_confidence has the host look at drafts while a round runs, and a pipelined "
                "round runs without it; leave out one of the two"
            )
        if self._pipeline.is_on:
            self.remark(
                "rounds are not pipelined: draft_confidence looks at drafts while they are made"
            )

    def remark(self, text: str) -> None:
        """Keep a remark; once is enough."""
        if text not in self.remarks:
            self.remarks.append(text)

    def confidences(self) -> list[float]:
        """How sure the drafting model was of each draft of the last round, by its own row.

        The largest probability of the row a draft was drawn from; empty where no model drafts, or
        where the next round may have begun.
        """
        if not isinstance(self.draft, ModelDraft) or not self.can_end_early:
            return []
        return [self.draft.confidence(i) for i in range(self.result.n_draft)]

    # --- rounds -------------------------------------------------------------------------------

    def _run(self, role: str, n_draft: int, *, more: bool) -> RoundResult:
        """Have one round enqueued, and perhaps the next; read the first of them."""
        try:
            started = self._pipeline.take(role, n_draft, more=more)
        except EngineError:
            self._recover()
            raise
        return self._finish(started)

    def _prepare(self, n: int) -> int:
        """Have the draft ready for a round; returns how many drafts there will be."""
        assert self.draft is not None
        try:
            if self._pipeline.is_under_way(n):
                return n
            self._pipeline.drop()
            return self.draft.prepare(n)
        except EngineError:
            self._recover()
            raise

    def _finish(self, started: Started) -> RoundResult:
        """Read a round and take it into the history; refuse what is not finite.

        What comes before such a row stays: the text may end there and never reach it. Where it does
        not, the next pass meets it again.
        """
        report, result, n_draft = started.report, self.result, started.n_draft
        try:
            report.wait()
        except EngineError:
            self._recover()
            raise
        n_accepted = report.n_accepted[0] if started.role.startswith("verify") else 0
        result.tokens.clear()
        result.logprobs.clear()
        for i in range(n_accepted + 1):
            if not math.isfinite(report.logprob[i]):
                break
            result.tokens.append(report.tokens[i])
            result.logprobs.append(report.logprob[i])
        kept = len(result.tokens)
        if not kept:
            self._recover()
            raise _not_drawn(report.logprob[0], len(self.history))
        is_cut = kept <= n_accepted
        if is_cut:
            n_draft = n_accepted = kept
        result.n_draft, result.n_accepted = n_draft, n_accepted
        result.is_early = started.is_early and not is_cut
        sampling, listed = self._rounds.sampling, self._listed
        result.top = sampling.top_logprobs(started.role, kept, listed) if listed else []
        self.history.extend(result.tokens)
        sampling.grow(result.tokens)
        if self.draft is not None:
            self.draft.commit(result.tokens, n_draft, n_accepted)
        if is_cut:
            self._recover()
        return result

    def _recover(self) -> None:
        """After a failed pass: be ready for another, and for taking the text back."""
        self._pipeline.abandon()
        self._spoiled = True
        self._zero_past_text()
        self._host.place_after(self.history)

    def _zero_past_text(self) -> None:
        """Zero what lies past the committed text: a masked column still meets 0 * NaN = NaN."""
        kept = max(0, len(self.history) - 1)
        for state in self._spec.states:
            self._device.clear(self._caches[state.input], state.length_axis, kept)
        if self.draft is not None:
            self.draft.recover(kept)

    def _run_chunk(self, part: Sequence[int], start: int) -> None:
        assert_room(start + 1, self._chunk.rows, self.opened.manifest.capacity)
        self._chunk.upload(part, start)
        try:
            self._roles["prefill"].call.enqueue()
        except EngineError:
            self._recover()
            raise

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

    def _rounds_for(self, sampling: Sampling, *, is_constrained: bool = False) -> Rounds:
        """The rounds of a request, bound when their plan is first asked for."""
        plan = plan_for(sampling, self.opened.manifest, is_constrained=is_constrained)
        if plan not in self._variants:
            logits = self.draft.logits if isinstance(self.draft, ModelDraft) else []
            calls = SamplingCalls(self.opened, plan, self._buffers, self._roles, logits)
            verifying = _verifying(self.opened)
            self._variants[plan] = Rounds(
                self._device, self._buffers, self._roles, verifying, self.draft, calls
            )
        return self._variants[plan]


def _verifying(opened: OpenedBundle) -> dict[int, str]:
    """Verify passes that rounds may take, by the drafts they hold.

    Only one where rows have the same bits at one width alone: then texts are exact at that width.
    """
    manifest = opened.manifest
    is_one = manifest.exactness.kind == "row_invariant"
    gammas = manifest.gammas[-1:] if is_one else manifest.gammas
    return {gamma: verify_name(gamma, manifest.gamma) for gamma in gammas}


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

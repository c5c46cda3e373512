"""Where drafts come from: a smaller model, or the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from spec_export.engines.backend import Buffer, Call
from spec_export.engines.errors import EngineError
from spec_export.engines.passes import BoundRole, allocate_caches, bind_role
from spec_export.runtime.buffers import HostMirror, RoundBuffers, first_row
from spec_export.runtime.call_chains import Sequel
from spec_export.runtime.confidence import DraftConfidence
from spec_export.runtime.ngram import NgramIndex
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.prefill_inputs import PrefillInputs
from spec_export.runtime.sampling_calls import SamplingCalls

Kind = Literal["one_hot", "dense"]


class Draft(Protocol):
    """A source of drafts for one session; it owns its own length."""

    @property
    def lag(self) -> int:
        """Committed tokens it has not seen, beyond those its next pass takes in anyway."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens that follow what it has seen."""

    def prepare(self, n: int) -> int:
        """Get ready for a round of up to `n` drafts; returns how many there will be.

        What is found on the host is written into the round's buffers here.
        """

    def calls(self, n: int, sampling: SamplingCalls) -> list[Call]:
        """What a round of `n` drafts enqueues to have them in the round's buffers."""

    def can_run_ahead(self, n: int, committed: int) -> bool:
        """Whether a round of `n` drafts needs nothing of the one before but what is on the device.

        `committed` is the most tokens that there may be when it starts.
        """

    def commit(self, tokens: Sequence[int], n_draft: int, n_accepted: int) -> None:
        """The history grew by `tokens`, the first `n_accepted` of them drafts."""

    def rewind(self, length: int) -> None:
        """Forget everything from committed token `length` on."""

    def recover(self, length: int) -> None:
        """After a failed pass: nothing past cache row `length` may be anything but zero."""


class HostDraft:
    """Drafts that are found on the host from the text alone, and carry no distribution."""

    lag = 0

    def __init__(self, host: HostMirror) -> None:
        self._host = host

    def prefill(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens that follow what it has seen."""
        raise NotImplementedError

    def found(self, n: int) -> list[int]:
        """Up to `n` drafts for the next tokens."""
        raise NotImplementedError

    def prepare(self, n: int) -> int:
        """Write what is found into the round's buffers."""
        drafts = self.found(n)
        if drafts:
            self._host.set_drafts(drafts)
        return len(drafts)

    def calls(self, n: int, sampling: SamplingCalls) -> list[Call]:
        """Nothing: they are there."""
        return []

    def can_run_ahead(self, n: int, committed: int) -> bool:
        """It has to see the text."""
        return False

    def commit(self, tokens: Sequence[int], n_draft: int, n_accepted: int) -> None:
        """Take in what the round emitted."""
        self.prefill(tokens)

    def recover(self, length: int) -> None:
        """It has no cache."""


class NgramDraft(HostDraft):
    """Prompt lookup."""

    def __init__(self, host: HostMirror) -> None:
        super().__init__(host)
        self._index = NgramIndex()

    def prefill(self, tokens: Sequence[int]) -> None:
        """Index committed tokens."""
        for token in tokens:
            self._index.append(token)

    def found(self, n: int) -> list[int]:
        """What followed the last n-gram before."""
        return self._index.continuation(n)

    def rewind(self, length: int) -> None:
        """Forget everything from `length` on."""
        self._index.truncate(length)


class MaskFill:
    """Has the masks of a grammar follow a round's first `n` drafts: work of the host in a round."""

    def __init__(self, sampling: SamplingCalls, n: int) -> None:
        self._sampling, self._n = sampling, n

    def enqueue(self) -> None:
        """Read the drafts and write the masks."""
        self._sampling.fill_masks(self._n)


class ModelDraft:
    """A smaller language model with its own cache.

    Its first pass of a round catches up: it is fed the last two committed tokens, so the row that a
    full acceptance or a rejection left stale is written anew, with no case distinction. A longer
    lag, after steps without drafts, is replayed through `prefill`.

    Attributes:
        length: cache rows that hold committed tokens.
        logits: of each pass of a round, in order.
    """

    def __init__(self, opened: OpenedBundle, buffers: RoundBuffers, history: Sequence[int]) -> None:
        assert opened.draft is not None
        self._device, self._engine = opened.device, opened.draft
        self._spec = opened.manifest.models["draft"]
        self._capacity = opened.manifest.capacity
        self._history = history
        self._caches = allocate_caches(opened.device, self._spec)
        self._prefill = self._bind("prefill", {})
        self._passes = [self._bind_pass(buffers, i) for i in range(buffers.gamma)]
        self._chunk = PrefillInputs(opened.device, self._prefill, has_logits=False)
        self.logits: list[Buffer] = [first_row(p.buffers["logits"]) for p in self._passes]
        self.length = 0
        self._opened = opened
        self._confidence: DraftConfidence | None = None  # its graph is opened when first asked for

    @property
    def lag(self) -> int:
        """Committed tokens that a catch-up pass would not reach."""
        return max(0, len(self._history) - 2 - self.length)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Run committed tokens through the model, as far as its positions reach."""
        rows = self._chunk.rows
        stop = min(len(tokens), max(0, self._spec.max_position - self.length))
        for start in range(0, stop, rows):
            part = tokens[start : min(start + rows, stop)]
            if self.length + rows > self._capacity:
                raise EngineError(
                    f"a chunk of {rows} rows after {self.length} does not fit the draft's cache of "
                    f"{self._capacity} rows"
                )
            self._chunk.upload(part, self.length)
            self._prefill.call.enqueue()
            self.length += len(part)

    def prepare(self, n: int) -> int:
        """Take in what it lags behind; fewer drafts where the text outgrows its positions."""
        committed = len(self._history)
        n = min(n, self._spec.max_position - committed + 1)
        if n <= 0 or committed < 2:
            return 0
        if self.lag:
            self.prefill(self._history[self.length : committed - 2])
        return n

    def calls(self, n: int, sampling: SamplingCalls) -> list[Call]:
        """A pass and a draw for each draft."""
        return [call for i in range(n) for call in self.step(i, sampling)]

    def step(self, i: int, sampling: SamplingCalls) -> tuple[Call, Call]:
        """The pass that leaves the logits of the `i`-th draft, and what draws it from them."""
        draw = sampling.propose[i]
        if sampling.follows_drafts:
            draw = Sequel(MaskFill(sampling, i), draw)
        return self._passes[i].call, draw

    def confidence(self, i: int) -> float:
        """The largest probability in the logits that the pass of the `i`-th draft has left."""
        if self._confidence is None:
            self._confidence = DraftConfidence(self._opened, self.logits)
        return self._confidence.read(i)

    def can_run_ahead(self, n: int, committed: int) -> bool:
        """After a round it lags behind by nothing."""
        return n <= self._spec.max_position - committed + 1

    def commit(self, tokens: Sequence[int], n_draft: int, n_accepted: int) -> None:
        """Rows of refused drafts are stale; they are written again before they are read.

        The token that follows the last draft was in no pass of this model.
        """
        if n_draft:
            before = len(self._history) - len(tokens)
            self.length = before + min(n_accepted, n_draft - 1)

    def rewind(self, length: int) -> None:
        """Forget everything from `length` on."""
        self.length = min(self.length, length)

    def recover(self, length: int) -> None:
        """Zero the cache past row `length`."""
        self.length = min(self.length, length)
        for state in self._spec.states:
            self._device.clear(self._caches[state.input], state.length_axis, self.length)

    def _bind_pass(self, buffers: RoundBuffers, i: int) -> BoundRole:
        rows = int(self._spec.role("step").rows) if i else 2
        tokens = buffers.drafts.part(i - 1, i - 1 + rows) if i else buffers.pair
        given = {
            "input_ids": tokens.shaped(1, tokens.shape[0]),
            "kv_len": buffers.draft_kv_len.part(i, i + 1),
        }
        return self._bind("step" if i else "catch_up", given)

    def _bind(self, role: str, given: dict[str, Buffer]) -> BoundRole:
        return bind_role(self._device, self._engine, self._spec, role, self._caches, given)

"""The sampling graphs of one plan, bound to a session's buffers.

Every call is bound once. Before a round its noise is written, in one block; in the round, calls are
enqueued and nothing else, but that a grammar's masks follow the drafts on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spec_export.engines.backend import Buffer, Call
from spec_export.engines.graphs import BLOCK, TOP_LOGPROBS, WeighingKey, padded_vocabulary
from spec_export.engines.passes import BoundRole
from spec_export.runtime.buffers import RoundBuffers, first_row
from spec_export.runtime.call_chains import Fallback, Sequel
from spec_export.runtime.edits import TextEdits
from spec_export.runtime.masks import Constraint, TokenMasks
from spec_export.runtime.noise import Float32Array, Noise, PositionRaces, Stream, race_size
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.sampling import Plan, Sampling


class SamplingCalls:
    """The calls of a plan.

    Args:
        opened: the bundle.
        plan: which graphs.
        buffers: what the round passes along.
        roles: the target's roles, for their logits.
        draft_logits: logits of the drafting model's passes, in order; empty without one.

    Attributes:
        plan: as given.
        sample: draws a token without drafts, by the role that left its logits.
        propose: draws the i-th draft.
        accept: judges a round, by the role that verified it; empty where nothing drafts.
        list_logprobs: lists the most probable tokens, by role; empty unless the plan says so.
        races: picks the noise of a round's positions, under rule `invariant`.
    """

    def __init__(
        self,
        opened: OpenedBundle,
        plan: Plan,
        buffers: RoundBuffers,
        roles: Mapping[str, BoundRole],
        draft_logits: Sequence[Buffer],
    ) -> None:
        self._opened, self._device, self._buffers = opened, opened.device, buffers
        self.plan, gamma = plan, buffers.gamma
        self._vocabulary = opened.manifest.models["target"].vocabulary
        self._width = padded_vocabulary(self._vocabulary)
        self._noise: Noise | None = None
        self._rows = gamma + 1
        # Edits see drafts even where there are none.
        self._drafts = buffers.drafts if gamma else self._new((1,), np.int64)
        self._given: dict[str, Buffer] = {}
        self._edits = self._make_edits() if plan.edits else None
        self._masks = self._make_masks() if plan.mask else None
        self._make_values()
        self.races: Call | None = None
        self._make_noise()
        rows = (self._rows, self._width)
        self._weights = self._new(rows, np.float32) if plan.chooses != "greedy" else None
        self._unfiltered = self._new(rows, np.float32) if plan.filters else None
        is_weighed = plan.proposes not in (None, "greedy")
        self._q = self._new((gamma, self._width), np.float32) if is_weighed else None
        self._overflow = self._new((self._rows,), np.int64)
        verifying = {name: role for name, role in roles.items() if name.startswith("verify")}
        self.sample: dict[str, Call] = {
            name: self._bind_sample(role) for name, role in roles.items() if name not in verifying
        }
        self.propose: list[Call] = [self._bind_propose(i, x) for i, x in enumerate(draft_logits)]
        self.accept: dict[str, Call] = {n: self._bind_accept(r) for n, r in verifying.items()}
        self.list_logprobs = self._bind_lists(roles) if plan.lists_logprobs else {}

    @property
    def follows_text(self) -> bool:
        """Whether the host has to see a round's tokens before the next round can start."""
        return self.plan.edits or self.follows_drafts

    @property
    def follows_drafts(self) -> bool:
        """Whether the host has to see a round's drafts while it runs."""
        return self._masks is not None and self._masks.follows

    # --- a text -----------------------------------------------------------------------------------

    def begin(self, sampling: Sampling, constraint: Constraint | None = None) -> None:
        """Take over the values of a request; the text so far stays."""
        assert sampling.seed is not None
        if self.plan.chooses == "drawn":
            self._noise = Noise(sampling.seed)
            values = {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k if sampling.top_k < self._vocabulary else 0,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "typical_p": sampling.typical_p,
            }
            for name, array in self._values.items():
                array[0] = values[name]
                self._device.upload(self._given[name], array)
            if self._races is not None:
                self._races.begin(self._noise)
        if self._edits is not None:
            self._edits.begin(sampling)
        if self._masks is not None:
            self._masks.begin(sampling, constraint)

    def grow(self, tokens: Sequence[int], *, is_prompt: bool = False) -> None:
        """The text grew by committed tokens."""
        if self._edits is not None:
            self._edits.grow(tokens, is_prompt=is_prompt)
        if self._masks is not None and not is_prompt:
            self._masks.grow(tokens)

    def shrink(self, length: int, before: int) -> None:
        """The text went back from `before` tokens to `length`."""
        if self._edits is not None:
            self._edits.shrink(length)
        if self._masks is not None:
            self._masks.shrink(before - length)

    # --- a round ----------------------------------------------------------------------------------

    def draw(self, place: int, start: int, stop: int, n_draft: int) -> None:
        """Write the noise of a round, or of a token without drafts.

        Args:
            place: its number in the text.
            start: lowest position its first token may have.
            stop: one beyond the highest position its last token may have.
            n_draft: drafts it has.
        """
        noise = self._noise
        if noise is None:
            return
        if self._races is not None:
            self._races.hold(start, stop)
            return
        noise.uniform(self._uniform, place, 0, stream=Stream.ACCEPT)
        noise.exponential(self._race_rows[0], place, 0, stream=Stream.RESIDUAL)
        drawn = n_draft if self.plan.proposes == "drawn" else 0
        for i in range(drawn):
            noise.exponential(self._race_rows[1 + i], place, i, stream=Stream.PROPOSE)
        self._device.upload(*self._noise_blocks[drawn])

    def fill_masks(self, n_draft: int) -> None:
        """Have the masks follow `n_draft` drafts, which are on the device."""
        if self._masks is not None:
            self._masks.fill(n_draft)

    def top_logprobs(self, role: str, rows: int, count: int) -> list[list[tuple[int, float]]]:
        """The `count` most probable tokens of the first rows that the last pass of a role left."""
        self.list_logprobs[role].enqueue()
        self._device.download(self._top_ids, self._top_ids_host)
        self._device.download(self._top_values, self._top_values_host)
        ids, values = self._top_ids_host[:rows, :count], self._top_values_host[:rows, :count]
        return [
            list(zip(a, b, strict=True)) for a, b in zip(ids.tolist(), values.tolist(), strict=True)
        ]

    # --- binding ----------------------------------------------------------------------------------

    def _new(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Buffer:
        return self._device.allocate(shape, dtype)

    def _make_edits(self) -> TextEdits:
        manifest = self._opened.manifest
        ends = manifest.text.end_ids
        return TextEdits(self._device, manifest.capacity, self._vocabulary, ends)

    def _make_masks(self) -> TokenMasks:
        return TokenMasks(self._device, self._rows, self._vocabulary, self._drafts)

    def _make_values(self) -> None:
        self._values: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {}
        if self.plan.chooses != "drawn":
            return
        self._values["temperature"] = np.zeros(1, np.float32)
        if self.plan.filters:
            self._values |= {name: np.zeros(1, np.float32) for name in ("top_p", "min_p")}
            self._values |= {"typical_p": np.zeros(1, np.float32), "top_k": np.zeros(1, np.int64)}
        for name, array in self._values.items():
            self._given[name] = self._new((1,), array.dtype.type)

    def _make_noise(self) -> None:
        """Uniforms of a round, then rows of races: the last token's, and each draft's.

        Under `invariant` row i is that of the i-th position, picked from a ring.
        """
        self._races: PositionRaces | None = None
        if self.plan.chooses != "drawn":
            return
        size, rows = race_size(self._vocabulary), self._rows
        if self.plan.is_positional:
            ring = self._new((2 * rows, size), np.float32)
            self._race_buffer = self._new((rows, size), np.float32)
            self._races = PositionRaces(self._device, ring)
            bound = {"ring": ring, "kv_len": self._buffers.kv_len, "race": self._race_buffer}
            self.races = self._opened.sampling["position_races"].bind("run", bound)
            return
        first = -(-max(1, rows - 1) // BLOCK) * BLOCK
        block = self._new((first + rows * size,), np.float32)
        host: Float32Array = np.zeros(block.shape, np.float32)
        self._uniform_buffer, self._uniform = block.part(0, rows - 1), host[: rows - 1]
        self._race_buffer = block.part(first, block.shape[0]).shaped(rows, size)
        self._race_rows = host[first:].reshape(rows, 1, size)
        ends = [first + size * (1 + i) for i in range(rows)]
        self._noise_blocks = [(block.part(0, end), host[:end]) for end in ends]

    def _weigh(
        self, key: WeighingKey | None, logits: Buffer, row: int, out: Buffer
    ) -> tuple[Call, ...]:
        """From `logits [1, R, V]`, the rows from `row` on of a round, to `out [R, V64]`."""
        rows, sampling = logits.shape[1], self._opened.sampling
        if key is None:
            return ()
        is_filtered = key.is_drawn and self._unfiltered is not None
        made = self._unfiltered.part(0, rows) if is_filtered and self._unfiltered else out
        bound = self._given | {"logits": logits, "p": made, "scores": made}
        if self._edits is not None:
            first = self._new((1,), np.int64)
            self._device.upload(first, np.array([row], np.int64))
            bound |= self._edits.buffers | {"draft_tokens": self._drafts, "row0": first}
        if self._masks is not None:
            bound["allowed"] = self._masks.buffer.part(row, row + rows)
        weighing = sampling[f"{key.name}.{rows}"].bind("run", bound)
        if not is_filtered:
            return (weighing,)

        def way(name: str) -> Callable[[int, int], Call]:
            def bind(start: int, stop: int) -> Call:
                parts = {"p": made, "kept": out, "overflow": self._overflow}
                these = {key: buffer.part(start, stop) for key, buffer in parts.items()}
                return sampling[f"filter_{name}.{stop - start}"].bind("run", bound | these)

            return bind

        # Whether a quick filter sufficed is for the host to ask, which a device that works later
        # would have to be waited for.
        filters = self.plan.filters[-1:] if self._device.is_deferred else self.plan.filters
        ways = [way(name) for name in filters]
        return weighing, Fallback(self._device, ways, self._overflow.part(0, rows))

    def _bind_sample(self, role: BoundRole) -> Call:
        plan, logits = self.plan, first_row(role.buffers["logits"])
        bound = self._buffers.place | {
            "logits": logits,
            "tokens": self._buffers.tokens.part(0, 1),
            "logprob": self._buffers.logprob.part(0, 1),
        }
        weighing: tuple[Call, ...] = ()
        if self._weights is not None:
            weights = self._weights.part(0, 1)
            weighing = self._weigh(plan.weighing(plan.chooses, "target"), logits, 0, weights)
            bound |= {"p": weights, "scores": weights} | self._race_of(0)
        return _after(weighing, self._opened.sampling[f"sample_{plan.chooses}"].bind("run", bound))

    def _bind_propose(self, i: int, logits: Buffer) -> Call:
        plan = self.plan
        assert plan.proposes is not None
        bound = {"logits": logits, "token": self._buffers.drafts.part(i, i + 1)}
        weighing: tuple[Call, ...] = ()
        if self._q is not None:
            q = self._q.part(i, i + 1)
            same = self._opened.manifest.models["draft"].vocabulary == self._vocabulary
            key = plan.weighing(plan.proposes, "target" if same else "draft")
            weighing = self._weigh(key, logits, i, q)
            bound |= {"p": q, "scores": q} | self._race_of(i if plan.is_positional else 1 + i)
        engine = self._opened.sampling[f"propose_{plan.proposes}"]
        return _after(weighing, engine.bind("run", bound))

    def _bind_accept(self, verify: BoundRole) -> Call:
        buffers, plan, rows = self._buffers, self.plan, verify.rows
        bound = buffers.place | {
            "logits": verify.buffers["logits"],
            "draft_tokens": buffers.drafts.part(0, rows - 1),
            "n_draft": buffers.n_draft,
            "tokens": buffers.tokens.part(0, rows),
            "n_accepted": buffers.n_accepted,
            "logprob": buffers.logprob.part(0, rows),
        }
        weighing: tuple[Call, ...] = ()
        if self._weights is not None:
            key, weights = plan.weighing(plan.chooses, "target"), self._weights.part(0, rows)
            weighing = self._weigh(key, verify.buffers["logits"], 0, weights)
            bound |= {"p": weights, "scores": weights}
        if plan.is_positional:
            bound["race"] = self._race_buffer.part(0, rows)
        elif plan.chooses == "drawn":
            bound |= self._race_of(0) | {"uniform": self._uniform_buffer.part(0, rows - 1)}
        if self._q is not None:
            bound["q"] = self._q.part(0, rows - 1)
        engine = self._opened.sampling[f"accept_{plan.accept}.{rows}"]
        return _after(weighing, engine.bind("run", bound))

    def _bind_lists(self, roles: Mapping[str, BoundRole]) -> dict[str, Call]:
        shape = (self._rows, TOP_LOGPROBS)
        self._top_ids, self._top_values = self._new(shape, np.int64), self._new(shape, np.float32)
        self._top_ids_host, self._top_values_host = np.zeros(shape, np.int64), np.zeros(shape, "f4")
        calls = {}
        for name, role in roles.items():
            logits = role.buffers["logits"]
            logits = logits if name.startswith("verify") else first_row(logits)
            rows = logits.shape[1]
            bound = {
                "logits": logits,
                "ids": self._top_ids.part(0, rows),
                "values": self._top_values.part(0, rows),
            }
            calls[name] = self._opened.sampling[f"top_logprobs.{rows}"].bind("run", bound)
        return calls

    def _race_of(self, row: int) -> dict[str, Buffer]:
        if self.plan.chooses != "drawn":
            return {}
        return {"race": self._race_buffer.part(row, row + 1)}


def _after(weighing: tuple[Call, ...], call: Call) -> Call:
    return Sequel(*weighing, call) if weighing else call

"""Bind a role of a model: allocate what is not given, fill in what never changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_export.engines.backend import Buffer, Call, Device, Engine
from spec_export.engines.element_types import numpy_type
from spec_export.engines.graphs import ModelSpec, TensorSpec


@dataclass(frozen=True)
class BoundRole:
    """A role ready to run.

    Attributes:
        call: the engine bound to `buffers`.
        buffers: every tensor of the graph by name, caches included.
        rows: rows of a pass.
    """

    call: Call
    buffers: Mapping[str, Buffer]
    rows: int


def allocate_caches(device: Device, spec: ModelSpec) -> dict[str, Buffer]:
    """One zeroed buffer per state, under both its input and its output name."""
    caches: dict[str, Buffer] = {}
    for state in spec.states:
        shape = tuple(int(dim) for dim in state.dims)
        caches[state.input] = caches[state.output] = device.allocate(shape, numpy_type(state.dtype))
    return caches


def cache_bytes(spec: ModelSpec) -> int:
    """Memory of one set of caches."""
    return sum(
        int(np.prod([int(d) for d in state.dims], dtype=np.int64))
        * numpy_type(state.dtype).itemsize
        for state in spec.states
    )


def bind_role(
    device: Device,
    engine: Engine,
    spec: ModelSpec,
    role: str,
    caches: Mapping[str, Buffer],
    given: Mapping[str, Buffer] | None = None,
) -> BoundRole:
    """Bind one role.

    Args:
        device: allocates what is not given.
        engine: the opened model.
        spec: its description, dimensions pinned.
        role: name of the role.
        caches: from `allocate_caches`; shared by all roles of a session.
        given: buffers to use for some inputs or outputs, such as tokens another call writes.

    Returns:
        The bound role. `depth` counts rows, `tree_mask` is a lower triangle, `logit_rows` are the
        last rows of the pass; all three may be overwritten where they were not given.
    """
    rows, logit_rows = int(spec.role(role).rows), int(spec.role(role).logit_rows)
    symbols = {"T": rows, "R": logit_rows}
    buffers: dict[str, Buffer] = {**caches, **(given or {})}
    for tensor in (*spec.inputs, *spec.outputs):
        if tensor.name not in buffers:
            buffers[tensor.name] = device.allocate(
                _shape(tensor, symbols), numpy_type(tensor.dtype)
            )
            constant = _constant(tensor.name, rows, logit_rows)
            if constant is not None:
                device.upload(buffers[tensor.name], constant)
    return BoundRole(engine.bind(role, buffers), buffers, rows)


def _shape(tensor: TensorSpec, symbols: dict[str, int]) -> tuple[int, ...]:
    return tuple(symbols[dim] if isinstance(dim, str) else dim for dim in tensor.dims)


def _constant(name: str, rows: int, logit_rows: int) -> np.ndarray | None:
    if name == "depth":
        return np.arange(rows, dtype=np.int64)
    if name == "tree_mask":
        return np.tril(np.ones((rows, rows), bool))
    if name == "logit_rows":
        return np.arange(rows - logit_rows, rows, dtype=np.int64).clip(min=0)
    return None


def whole_pass(spec: ModelSpec, text: Sequence[int]) -> dict[str, np.ndarray]:
    """Inputs of one pass over a whole text, from empty caches of its length.

    Args:
        spec: of an exported model, dimensions not pinned.
        text: token ids.
    """
    count = len(text)
    given = {
        "input_ids": np.asarray([text], np.int64),
        "kv_len": np.zeros(1, np.int64),
        "depth": np.arange(count),
        "tree_mask": np.tril(np.ones((count, count), bool)),
        "logit_rows": np.array([count - 1], np.int64),
    }
    for state in spec.states:
        dims = [count if dim == "C" else int(dim) for dim in state.dims]
        given[state.input] = np.zeros(dims, numpy_type(state.dtype))
    return given


class PassRunner:
    """Runs passes over one set of caches from host arrays; for checks, not for decoding."""

    def __init__(self, device: Device, engine: Engine, spec: ModelSpec) -> None:
        self._device, self._engine, self.spec = device, engine, spec
        self.caches = allocate_caches(device, spec)
        self._bound: dict[str, BoundRole] = {}

    def run(self, role: str, tokens: np.ndarray, kv_len: int, logit_rows: np.ndarray) -> np.ndarray:
        """One pass; returns logits `[R, V]` of `logit_rows` (repeated to fill R)."""
        bound = self._role(role)
        wanted = int(self.spec.role(role).logit_rows)
        padded = np.zeros((1, bound.rows), np.int64)
        padded[0, : len(tokens)] = tokens
        rows = np.resize(np.asarray(logit_rows, np.int64), wanted)
        self._device.upload(bound.buffers["input_ids"], padded)
        self._device.upload(bound.buffers["kv_len"], np.array([kv_len], np.int64))
        self._device.upload(bound.buffers["logit_rows"], rows)
        bound.call.enqueue()
        logits = np.empty(bound.buffers["logits"].shape, np.float32)
        self._device.download(bound.buffers["logits"], logits)
        return np.asarray(logits[0])

    def prefill(self, tokens: np.ndarray) -> None:
        """Fill the caches with `tokens`, chunk by chunk, from an empty context."""
        rows = self._role("prefill").rows
        for start in range(0, len(tokens), rows):
            self.run("prefill", tokens[start : start + rows], start, np.zeros(1, np.int64))

    def read_caches(self) -> list[np.ndarray]:
        """A copy of every cache, in the order of `spec.states`."""
        copies = []
        for state in self.spec.states:
            buffer = self.caches[state.input]
            copy = np.empty(buffer.shape, buffer.dtype)
            self._device.download(buffer, copy)
            copies.append(copy)
        return copies

    def write_caches(self, contents: list[np.ndarray]) -> None:
        """Overwrite every cache."""
        for state, content in zip(self.spec.states, contents, strict=True):
            self._device.upload(self.caches[state.input], content)

    def _role(self, role: str) -> BoundRole:
        if role not in self._bound:
            self._bound[role] = bind_role(self._device, self._engine, self.spec, role, self.caches)
        return self._bound[role]

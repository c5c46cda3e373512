"""What an engine library must offer, and the memory that passes between engines.

A `Backend` compiles graphs and opens them as engines. An `Engine` binds buffers to one of its
roles once; the `Call` it returns only enqueues. Buffers are views of memory with an address that
never moves, so that a bound call stays valid for the life of its session.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from spec_export.engines.graphs import ModelSpec, RoleSpec, SamplingSpec, TensorSpec
from spec_export.engines.manifest import CompilerSpec, DeviceSpec, EngineSpec


@dataclass(frozen=True)
class Buffer:
    """A view of device memory.

    Attributes:
        address: of the first byte.
        shape: of the view.
        dtype: element type.
        host: the same memory as a writable array where the host can see it, else None.
        owner: keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    host: np.ndarray | None
    owner: object = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes the view covers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, start: int, stop: int) -> Buffer:
        """Elements `start` to `stop` of the first axis."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"{start}:{stop} of a buffer with shape {self.shape}")
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        host = None if self.host is None else self.host[start:stop]
        shape = (stop - start, *self.shape[1:])
        return Buffer(self.address + start * row, shape, self.dtype, host, self.owner)

    def viewed(self, dtype: npt.DTypeLike) -> Buffer:
        """The same bytes of a one-dimensional buffer as elements of another type."""
        kind = np.dtype(dtype)
        if len(self.shape) != 1 or self.nbytes % kind.itemsize:
            raise ValueError(f"a buffer with shape {self.shape} cannot be seen as {kind}")
        host = None if self.host is None else self.host.view(kind)
        return Buffer(self.address, (self.nbytes // kind.itemsize,), kind, host, self.owner)

    def shaped(self, *shape: int) -> Buffer:
        """The same elements under another shape."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"a buffer with shape {self.shape} cannot become {shape}")
        host = None if self.host is None else self.host.reshape(shape)
        return Buffer(self.address, shape, self.dtype, host, self.owner)


class Reader(Protocol):
    """Copies of one buffer to the host that are waited for later.

    Attributes:
        host: what the last finished copy held; of the buffer's shape and type.
    """

    host: np.ndarray

    def start(self) -> None:
        """Enqueue a copy. One is under way at a time."""

    def wait(self) -> None:
        """Return when the copy that was started last is in `host`."""


class Device(Protocol):
    """Memory of one device, the copies the runtime makes, and the order of what is enqueued.

    Copies and calls run in the order they were enqueued in. On a GPU they may run later: only
    `download` and `Reader.wait` say that something has happened.

    Attributes:
        is_deferred: whether work runs after it was enqueued, so that enqueuing ahead pays.
        alignment: bytes that the address of a buffer is a multiple of, and which the parts of a
            larger one should start at; an engine copies what lies elsewhere.
    """

    is_deferred: bool
    alignment: int

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """Zeroed memory."""

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        """Copy from a host array of the same shape; it may be changed when this returns."""

    def download(self, source: Buffer, target: np.ndarray) -> None:
        """Copy to a host array of the same shape; the data is there on return."""

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy between buffers of one shape, in enqueue order."""

    def clear(self, target: Buffer, axis: int, start: int) -> None:
        """Fill with zeros from index `start` of `axis` on, in enqueue order."""

    def reader(self, source: Buffer) -> Reader:
        """Reads `source` without waiting for it; allocates host memory once."""

    def record(self, work: Callable[[], None]) -> Call:
        """What `work` enqueues, as one call; a CUDA graph on a GPU. `work` runs once, or is kept.

        `work` may enqueue calls and `copy`; it may not upload, download or read.
        """


class Call(Protocol):
    """An engine with every input and output bound."""

    def enqueue(self) -> None:
        """Run once. Looks nothing up and allocates nothing.

        Raises:
            EngineError: the library failed; the caches may hold anything past `kv_len`.
        """


class Engine(Protocol):
    """A compiled graph."""

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """Tensors the graph describes, by name; the compiled form may read fewer."""

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """Tensors the engine writes, by name."""

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> Call:
        """Bind `buffers` by tensor name; ones the compiled graph does not read are left out.

        Raises:
            EngineError: a buffer is missing or does not have the shape or type of its tensor.
        """


@runtime_checkable
class FreeRows(Protocol):
    """An engine whose passes may have any number of rows."""

    def with_roles(self, spec: ModelSpec) -> Engine:
        """The same engine for the roles of `spec`, whose rows it was not opened for."""


@dataclass(frozen=True)
class Compiled:
    """What `compile` made of a model graph.

    Attributes:
        file: name of the engine file in the directory it was compiled into.
        lowered: notes on what was replaced, such as `GroupQueryAttention: 30 of 30 layers`.
        roles: with the rows that they were compiled for, where those differ from what was asked.
        engine: how it was compiled, for the manifest; None where nothing was.
    """

    file: str
    lowered: tuple[str, ...]
    roles: tuple[RoleSpec, ...] | None = None
    engine: EngineSpec | None = None


class Backend(Protocol):
    """An engine library.

    Attributes:
        name: as in `--backend` and the manifest.
        threads: the host's threads an engine computes with.
        suffix: of its engine files, such as `.onnx`.
        left_out: sampling graphs that it has no use for, of those a bundle can do without.
    """

    name: str
    threads: int
    suffix: str
    left_out: frozenset[str]

    @property
    def can_run(self) -> bool:
        """Whether this machine runs its engines; what is built ahead is checked where it runs."""

    @property
    def device(self) -> Device:
        """Where its engines run."""

    def compile_model(
        self, graph: Path, spec: ModelSpec, capacity: int, out: Path, link: bool
    ) -> Compiled:
        """Compile a model graph into the directory `out`, with the cache capacity pinned.

        The roles of `spec` are pinned, the dimensions of its tensors are not. With `link`, weight
        files are shared with the exported directory instead of copied.
        """

    def compile_sampling(self, graph: Path, pins: Mapping[str, int], out: Path) -> None:
        """Compile a sampling graph with its symbols pinned to `out` (a file)."""

    def open_model(self, file: Path, spec: ModelSpec) -> Engine:
        """Open a compiled model; many sessions share it."""

    def open_sampling(self, file: Path, spec: SamplingSpec) -> Engine:
        """Open a compiled sampling graph."""

    def unfused(self, file: Path) -> tuple[str, ...]:
        """Layers of a compiled model whose attention is spelled out, where that can be seen."""

    def describe(self) -> DeviceSpec:
        """The device and library, as the manifest records them."""

    def compiler(self) -> CompilerSpec | None:
        """What was asked of a compiler, after everything was compiled; None without one."""

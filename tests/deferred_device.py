"""A CPU that works the way a GPU does: what is enqueued runs later, in order, out of sight.

Engines and copies go into a queue. Nothing of it has happened until somebody waits, and then no
more of it than was waited for, or, where `rng` is given, any further part. Memory has an address
and no array that the host could look at. Reading or uploading while a round is recorded is an
error.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from spec_export.engines.backend import Buffer, Call, Engine
from spec_export.engines.errors import EngineError
from spec_export.engines.host import HostDevice
from spec_export.runtime import OpenedBundle

Work = Callable[[], None]


def seen(buffer: Buffer) -> np.ndarray:
    """A device's memory as an array; only the queue may look."""
    raw = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address)
    return np.frombuffer(raw, buffer.dtype).reshape(buffer.shape)


class DeferredDevice:
    """The queue and its memory.

    Attributes:
        log: verbs in the order they were called: `enqueue`, `upload`, `start`, `wait`, ...
        fail_at: the verb that fails once, when it is called `fail_in` times.
    """

    is_deferred = True
    alignment = 256

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self._memory, self._rng = HostDevice(), rng
        self._queue: list[Work] = []
        self._done = 0  # pieces of work that have run
        self._recording: list[Work] | None = None
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.fail_at: str | None = None
        self.fail_in = -1

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, shape, dtype) -> Buffer:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = self._memory.allocate((max(size, 1) + 256,), np.uint8)
        start = -raw.address % 256
        owner = _Owner()
        weakref.finalize(owner, self._free, raw).atexit = False
        return Buffer(raw.address + start, tuple(shape), np.dtype(dtype), None, owner)

    def _free(self, raw: Buffer) -> None:
        """As `cudaFree`: what was enqueued before happens first. Then the memory is spoiled."""
        self._run(len(self._queue))
        ctypes.memset(raw.address, 0xFF, raw.nbytes)

    # --- copies -----------------------------------------------------------------------------------

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        assert self._recording is None, "an upload cannot be recorded"
        assert source.shape == target.shape and source.dtype == target.dtype
        snapshot = source.copy()
        self._push("upload", lambda: np.copyto(seen(target), snapshot))

    def copy(self, source: Buffer, target: Buffer) -> None:
        self._push("copy", lambda: np.copyto(seen(target), seen(source)))

    def clear(self, target: Buffer, axis: int, start: int) -> None:
        def work() -> None:
            seen(target)[(slice(None),) * axis + (slice(start, None),)] = 0

        self._push("clear", work)

    def download(self, source: Buffer, target: np.ndarray) -> None:
        assert self._recording is None, "a download cannot be recorded"
        self._note("download")
        self._run(len(self._queue))
        np.copyto(target, seen(source))

    def reader(self, source: Buffer) -> DeferredReader:
        return DeferredReader(self, source)

    def record(self, work: Work) -> Call:
        work()  # as a first run, so that engines have made what they make once
        assert self._recording is None
        self._recording = []
        try:
            work()
            recorded = self._recording
        finally:
            self._recording = None
        self.counts["recorded"] += 1
        return _Replayed(self, tuple(recorded))

    # --- the queue --------------------------------------------------------------------------------

    def push_call(self, call: Call) -> None:
        self._push("enqueue", call.enqueue)

    def _push(self, verb: str, work: Work) -> None:
        if self._recording is not None:
            self._recording.append(work)
            return
        self._note(verb)
        self._queue.append(work)
        if self._rng is not None:
            self._run(int(self._rng.integers(0, len(self._queue) + 1)))

    def _note(self, verb: str) -> None:
        self.log.append(verb)
        self.counts[verb] += 1
        if verb == self.fail_at:
            self.fail_in -= 1
            if self.fail_in == 0:
                raise EngineError(f"{verb}: the device went away")

    def _run(self, count: int) -> None:
        for _ in range(count):
            work = self._queue.pop(0)
            self._done += 1
            work()


class _Owner:
    """Memory is freed when the last view of it goes."""


class DeferredReader:
    """Waits for its own copy and for no more."""

    def __init__(self, device: DeferredDevice, source: Buffer) -> None:
        self._device, self._source = device, source
        self._staging = np.zeros(source.shape, source.dtype)
        self.host = np.zeros(source.shape, source.dtype)
        self._until = -1

    def start(self) -> None:
        device = self._device
        assert device._recording is None, "a read cannot be recorded"
        device._push("start", lambda: np.copyto(self._staging, seen(self._source)))
        self._until = device._done + len(device._queue)

    def wait(self) -> None:
        device = self._device
        assert self._until >= 0, "nothing was started"
        device._note("wait")
        device._run(max(0, self._until - device._done))
        np.copyto(self.host, self._staging)


class _Replayed:
    """A recording: the same work at the same addresses, as one call."""

    def __init__(self, device: DeferredDevice, work: tuple[Work, ...]) -> None:
        self._device, self._work = device, work

    def enqueue(self) -> None:
        def run() -> None:
            for work in self._work:
                work()

        self._device._push("launch", run)


class _DeferredCall:
    def __init__(self, device: DeferredDevice, call: Call) -> None:
        self._device, self._call = device, call

    def enqueue(self) -> None:
        self._device.push_call(self._call)


class _DeferredEngine:
    """An engine whose calls go into the queue."""

    def __init__(self, device: DeferredDevice, engine: Engine) -> None:
        self._device, self._engine = device, engine
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> Call:
        for name in (*self.inputs, *self.outputs):
            assert buffers[name].host is None, f"{name} lies on the host"
        return _DeferredCall(self._device, self._engine.bind(role, buffers))


class _DeferredEngines(Mapping[str, Engine]):
    def __init__(self, device: DeferredDevice, engines: Mapping[str, Engine]) -> None:
        self._device, self._engines = device, engines

    def __getitem__(self, name: str) -> Engine:
        return _DeferredEngine(self._device, self._engines[name])

    def __iter__(self):
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)


def deferred(opened: OpenedBundle, rng: np.random.Generator | None = None) -> OpenedBundle:
    """The same engines behind a queue."""
    device = DeferredDevice(rng)
    return replace(
        opened,
        device=device,
        target=_DeferredEngine(device, opened.target),
        draft=None if opened.draft is None else _DeferredEngine(device, opened.draft),
        sampling=_DeferredEngines(device, opened.sampling),
    )

"""Page-locked host memory: what a GPU copies from and to while the host goes on."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spec_export.engines.backend import Buffer
from spec_export.engines.cuda_api import CudaApi

# A round uploads at most a few hundred kilobytes (noise, masks of all its rows) in under ten
# pieces, and two rounds may be under way.
SLOTS, SLOT_BYTES = 32, 128 * 1024


def new_event(api: CudaApi) -> Any:
    """An event without a time."""
    return api.call("cudaEventCreateWithFlags", api.runtime.cudaEventDisableTiming)


class Retired:
    """What is to be freed, once nothing that was enqueued can use it.

    Objects are collected at any moment, perhaps in the middle of a capture, which a call that
    frees memory would spoil. So collecting one only notes what to free; it is freed when no
    capture is under way in this thread, after the stream has come to its end.

    Args:
        api: checked calls.
        stream: where everything is enqueued.
        is_capturing: whether this thread captures now.
    """

    def __init__(self, api: CudaApi, stream: Any, is_capturing: Callable[[], bool]) -> None:
        self._api, self._stream, self._is_capturing = api, stream, is_capturing
        self._noted: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()

    def follow(self, owner: object, free: Callable[[], object]) -> None:
        """Call `free` some time after `owner` was collected; not when the process ends."""
        weakref.finalize(owner, self.note, free).atexit = False

    def note(self, free: Callable[[], object]) -> None:
        """Call `free` as soon as that is safe."""
        self._noted.append(free)
        self.sweep()

    def sweep(self) -> None:
        """Free what was noted, or leave it to the next sweep where that is not possible now."""
        if not self._noted or self._is_capturing() or not self._lock.acquire(blocking=False):
            return
        try:
            noted = [self._noted.popleft() for _ in range(len(self._noted))]
            self.settle()
            for free in noted:
                free()
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Wait for the stream, or for the whole GPU where the stream has gone already."""
        if self._stream is not None:
            self._api.attempt("cudaStreamSynchronize", self._stream)
        else:
            self._api.attempt("cudaDeviceSynchronize")

    def close(self) -> None:
        """Give the stream back. Whatever else went at the same time may be freed after it."""
        stream, self._stream = self._stream, None
        self._api.attempt("cudaStreamDestroy", stream)


class PinnedBytes:
    """Page-locked memory as an array of bytes; it lives as long as any view of that array.

    Args:
        api: checked calls.
        count: bytes.
        retired: frees it when the last view is gone and nothing enqueued uses it.
    """

    def __init__(self, api: CudaApi, count: int, retired: Retired) -> None:
        self.address = int(api.call("cudaHostAlloc", max(1, count), 0))
        block = (ctypes.c_uint8 * max(1, count)).from_address(self.address)
        retired.follow(block, partial(api.attempt, "cudaFreeHost", self.address))
        self.array = np.frombuffer(memoryview(block), np.uint8)[:count]
        self.array[:] = 0


class StagingRing:
    """Slots that uploads go through, so that a source may change as soon as it was copied here.

    A slot is taken again when the copy out of it is done, which an event says: with as many slots
    as a few rounds use, nobody waits. Copies larger than a slot are made in pieces.

    Args:
        api: checked calls.
        retired: frees what it holds.
    """

    def __init__(self, api: CudaApi, retired: Retired) -> None:
        self._api, self._lock = api, threading.Lock()
        self._pinned = PinnedBytes(api, SLOTS * SLOT_BYTES, retired)
        self._events = [new_event(api) for _ in range(SLOTS)]
        for event in self._events:
            retired.follow(self, partial(api.attempt, "cudaEventDestroy", event))
        self._to_device = api.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._next = 0

    def upload(self, address: int, source: np.ndarray, stream: Any) -> None:
        """Enqueue a copy of a contiguous array to device memory; `source` is free on return."""
        content = source.reshape(-1).view(np.uint8)
        with self._lock:
            for start in range(0, content.size, SLOT_BYTES):
                self._piece(address + start, content[start : start + SLOT_BYTES], stream)

    def _piece(self, address: int, content: np.ndarray, stream: Any) -> None:
        call, event = self._api.call, self._events[self._next]
        offset = self._next * SLOT_BYTES
        self._next = (self._next + 1) % SLOTS
        call("cudaEventSynchronize", event)  # done at once for one that was never recorded
        self._pinned.array[offset : offset + content.size] = content
        source = self._pinned.address + offset
        call("cudaMemcpyAsync", address, source, content.size, self._to_device, stream)
        call("cudaEventRecord", event, stream)


class CudaReader:
    """Copies of one buffer into page-locked memory, waited for by an event.

    Args:
        api: checked calls.
        source: what is read; kept alive.
        stream: gives the stream to enqueue on, or refuses.
        retired: frees what it holds.
    """

    def __init__(
        self, api: CudaApi, source: Buffer, stream: Callable[[], Any], retired: Retired
    ) -> None:
        self._api, self._source, self._stream = api, source, stream
        self._pinned = PinnedBytes(api, source.nbytes, retired)
        self.host: np.ndarray = self._pinned.array.view(source.dtype).reshape(source.shape)
        self._event = new_event(api)
        retired.follow(self, partial(api.attempt, "cudaEventDestroy", self._event))
        self._kind = api.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def start(self) -> None:
        """Enqueue a copy."""
        call, stream = self._api.call, self._stream()
        source, count = self._source.address, self._source.nbytes
        call("cudaMemcpyAsync", self._pinned.address, source, count, self._kind, stream)
        call("cudaEventRecord", self._event, stream)

    def wait(self) -> None:
        """Return when the copy that was started last is in `host`."""
        self._api.call("cudaEventSynchronize", self._event)

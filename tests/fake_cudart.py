"""A CUDA runtime without a GPU, for tests: as late, and as strict, as the real one may be.

It has the functions of `cuda.bindings.runtime` that the package uses. Device memory is ordinary
memory at its true address. A stream is a queue that runs only when somebody waits for it, so that
whatever leaves a copy's source unguarded, or reads before waiting, is caught. Every access is
checked against what is allocated at the moment it runs. Within a capture the calls that CUDA
forbids there fail and spoil it.
"""

# ruff: noqa: N801, N802, N815 - the names are those of CUDA

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidResourceHandle = 400
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901
    cudaErrorStreamCaptureWrongThread = 908


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


class cudaDeviceAttr(enum.IntEnum):
    cudaDevAttrIntegrated = 18
    cudaDevAttrMemoryClockRate = 36
    cudaDevAttrGlobalMemoryBusWidth = 37


@dataclass
class Operation:
    """Something that runs later: what it does, and the memory it touches."""

    run: Callable[[], None]
    touches: tuple[tuple[int, int], ...]


@dataclass(eq=False)
class Handle:
    """Whatever CUDA gives a handle to."""

    number: int
    is_alive: bool = True
    queue: list[Operation] = field(default_factory=list)  # of a stream
    done: int = 0  # operations of the stream that ran
    graph: Handle | None = None  # being captured on the stream
    thread: int = 0  # that captures
    is_spoiled: bool = False
    nodes: list[Operation] = field(default_factory=list)  # of a graph
    stream: Handle | None = None  # an event was recorded on
    mark: int = 0  # operations that were enqueued before it

    def __int__(self) -> int:
        return self.number


class FakeCudart:
    """The module.

    Attributes:
        calls: names of the functions called, in order.
        fail: function name to the status it returns next, once.
        free, total: what `cudaMemGetInfo` says; allocations take from `free`.
        faults: accesses to memory that was not allocated, or had been freed.
    """

    cudaError_t, cudaMemcpyKind = cudaError_t, cudaMemcpyKind
    cudaStreamCaptureMode, cudaDeviceAttr = cudaStreamCaptureMode, cudaDeviceAttr
    cudaStreamNonBlocking, cudaEventDisableTiming = 1, 2

    def __init__(self, *, driver: int = 13000, cuda: int = 13000, devices: int = 1) -> None:
        self.driver, self.cuda, self.devices = driver, cuda, devices
        self.calls: list[str] = []
        self.fail: dict[str, cudaError_t] = {}
        self.total = self.free = 1 << 30
        self.faults: list[str] = []
        self.memory: dict[int, np.ndarray] = {}
        self.freed: list[np.ndarray] = []  # never reused, so that a late access is no crash
        self.handles: dict[int, Handle] = {}
        self._lock = threading.RLock()

    # --- what a test asks -------------------------------------------------------------------------

    def alive(self) -> dict[str, int]:
        """What was made and not given back."""
        return {
            "memory": len(self.memory),
            "handles": sum(h.is_alive for h in self.handles.values()),
        }

    def launch(self, stream: int, run: Callable[[], None], *touches: tuple[int, int]) -> None:
        """Enqueue a kernel on a stream given by its number."""
        status = self._enqueue(self.handles[int(stream)], Operation(run, touches))
        assert status is cudaError_t.cudaSuccess, status

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cuda") or not callable(found) or isinstance(found, type):
            return found
        return lambda *arguments: self._logged(name, found, arguments)

    def _logged(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self.calls.append(name)
            if name in self.fail:
                status = self.fail.pop(name)
                if name == "cudaStreamEndCapture":  # over, and failed
                    arguments[0].graph = None
                return (status, *[None] * _VALUES.get(name, 0))
            return function(*arguments)

    # --- the device -------------------------------------------------------------------------------

    def cudaDriverGetVersion(self):
        return cudaError_t.cudaSuccess, self.driver

    def cudaRuntimeGetVersion(self):
        return cudaError_t.cudaSuccess, self.cuda

    def cudaGetDeviceCount(self):
        if self.driver // 1000 < self.cuda // 1000:
            return cudaError_t.cudaErrorInsufficientDriver, None
        if not self.devices:
            return cudaError_t.cudaErrorNoDevice, None
        return cudaError_t.cudaSuccess, self.devices

    def cudaSetDevice(self, device):
        return (cudaError_t.cudaSuccess,)

    def cudaGetDeviceProperties(self, device):
        found = SimpleNamespace(
            name=b"Fake GPU", major=8, minor=7, totalGlobalMem=self.total, multiProcessorCount=4
        )
        return cudaError_t.cudaSuccess, found

    def cudaDeviceGetAttribute(self, attr, device):
        known = {cudaDeviceAttr.cudaDevAttrIntegrated: 1}
        return cudaError_t.cudaSuccess, known.get(attr, 0)

    def cudaGetErrorName(self, error):
        return cudaError_t.cudaSuccess, error.name.encode()

    def cudaGetErrorString(self, error):
        return cudaError_t.cudaSuccess, b"the text of " + error.name.encode()

    def cudaGetLastError(self):
        return (cudaError_t.cudaSuccess,)

    def cudaMemGetInfo(self):
        return cudaError_t.cudaSuccess, self.free, self.total

    def cudaDeviceSynchronize(self):
        if (status := self._forbidden()) is not None:
            return (status,)
        for handle in list(self.handles.values()):
            self._run(handle, len(handle.queue) + handle.done)
        return (cudaError_t.cudaSuccess,)

    # --- memory -----------------------------------------------------------------------------------

    def cudaMalloc(self, size):
        if (status := self._forbidden()) is not None:
            return status, None
        if size > self.free:
            return cudaError_t.cudaErrorMemoryAllocation, None
        self.free -= size
        # Not zero: whoever needs zeros has to write them.
        return cudaError_t.cudaSuccess, self._take(size, 0xAB)

    def cudaHostAlloc(self, size, flags):
        if (status := self._forbidden()) is not None:
            return status, None
        return cudaError_t.cudaSuccess, self._take(size, 0xCD)

    def cudaFree(self, devPtr):
        if (status := self._forbidden()) is not None:
            return (status,)
        return (self._give_back(devPtr, is_device=True),)

    def cudaFreeHost(self, ptr):
        if (status := self._forbidden()) is not None:
            return (status,)
        return (self._give_back(ptr, is_device=False),)

    def cudaMemcpyAsync(self, dst, src, count, kind, stream):
        touches = []
        if kind != cudaMemcpyKind.cudaMemcpyDeviceToHost or self._owns(dst):
            touches.append((dst, count))
        touches.append((src, count))
        operation = Operation(lambda: ctypes.memmove(dst, src, count), tuple(touches))
        return (self._enqueue(stream, operation),)

    def cudaMemsetAsync(self, devPtr, value, count, stream):
        operation = Operation(lambda: ctypes.memset(devPtr, value, count), ((devPtr, count),))
        return (self._enqueue(stream, operation),)

    def cudaMemset2DAsync(self, devPtr, pitch, value, width, height, stream):
        if width > pitch and height > 1:
            return (cudaError_t.cudaErrorInvalidValue,)

        def run() -> None:
            for line in range(height):
                ctypes.memset(devPtr + line * pitch, value, width)

        touched = (devPtr, (height - 1) * pitch + width)
        return (self._enqueue(stream, Operation(run, (touched,))),)

    # --- streams and events -----------------------------------------------------------------------

    def cudaStreamCreateWithFlags(self, flags):
        assert flags == self.cudaStreamNonBlocking
        return cudaError_t.cudaSuccess, self._handle()

    def cudaStreamDestroy(self, stream):
        return (self._destroy(stream),)

    def cudaStreamSynchronize(self, stream):
        if (status := self._forbidden()) is not None:
            return (status,)
        if not stream.is_alive:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        return (self._run(stream, stream.done + len(stream.queue)),)

    def cudaEventCreateWithFlags(self, flags):
        return cudaError_t.cudaSuccess, self._handle()

    def cudaEventDestroy(self, event):
        return (self._destroy(event),)

    def cudaEventRecord(self, event, stream):
        if not event.is_alive or not stream.is_alive:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        event.stream, event.mark = stream, stream.done + len(stream.queue)
        return (cudaError_t.cudaSuccess,)

    def cudaEventSynchronize(self, event):
        if not event.is_alive:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        if event.stream is None:
            return (cudaError_t.cudaSuccess,)
        return (self._run(event.stream, event.mark),)

    def cudaEventElapsedTime(self, start, end):
        """A millisecond for each operation between them."""
        if start.stream is None or end.stream is None or start.stream.done < end.mark:
            return cudaError_t.cudaErrorInvalidResourceHandle, None
        return cudaError_t.cudaSuccess, float(end.mark - start.mark)

    # --- graphs -----------------------------------------------------------------------------------

    def cudaStreamBeginCapture(self, stream, mode):
        assert mode == cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        stream.graph, stream.thread, stream.is_spoiled = Handle(0), threading.get_ident(), False
        return (cudaError_t.cudaSuccess,)

    def cudaStreamEndCapture(self, stream):
        graph, stream.graph = stream.graph, None
        if graph is None or stream.is_spoiled:
            return cudaError_t.cudaErrorStreamCaptureInvalidated, None
        if stream.thread != threading.get_ident():
            return cudaError_t.cudaErrorStreamCaptureWrongThread, None
        made = self._handle()
        made.nodes = graph.nodes
        return cudaError_t.cudaSuccess, made

    def cudaGraphGetNodes(self, graph, numNodes=0):
        return cudaError_t.cudaSuccess, [], len(graph.nodes)

    def cudaGraphInstantiate(self, graph, flags):
        made = self._handle()
        made.nodes = list(graph.nodes)
        return cudaError_t.cudaSuccess, made

    def cudaGraphLaunch(self, graphExec, stream):
        if not graphExec.is_alive:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        for node in graphExec.nodes:
            status = self._enqueue(stream, node)
            if status != cudaError_t.cudaSuccess:
                return (status,)
        return (cudaError_t.cudaSuccess,)

    def cudaGraphExecDestroy(self, graphExec):
        return (self._destroy(graphExec),)

    def cudaGraphDestroy(self, graph):
        return (self._destroy(graph),)

    # --- inside -----------------------------------------------------------------------------------

    def _take(self, size: int, filler: int) -> int:
        raw = np.full(size + 256, filler, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % 256
        self.memory[address] = raw[address - raw.ctypes.data :][:size]
        return address

    def _give_back(self, address: int, *, is_device: bool) -> cudaError_t:
        if address not in self.memory:
            return cudaError_t.cudaErrorInvalidValue
        block = self.memory.pop(address)
        self.free += block.size if is_device else 0
        self.freed.append(block.base)
        return cudaError_t.cudaSuccess

    def _owns(self, address: int) -> bool:
        return any(a <= address < a + block.size for a, block in self.memory.items())

    def _handle(self) -> Handle:
        handle = Handle(1000 + len(self.handles))
        self.handles[handle.number] = handle
        return handle

    def _destroy(self, handle: Handle) -> cudaError_t:
        if not handle.is_alive:
            return cudaError_t.cudaErrorInvalidResourceHandle
        if handle.queue:
            self.faults.append(f"handle {handle.number} was destroyed with work under way")
        handle.is_alive, handle.nodes = False, []
        return cudaError_t.cudaSuccess

    def _forbidden(self) -> cudaError_t | None:
        """What a thread that captures may not call; the capture is spoiled by it."""
        for handle in self.handles.values():
            if handle.graph is not None and handle.thread == threading.get_ident():
                handle.is_spoiled = True
                return cudaError_t.cudaErrorStreamCaptureUnsupported
        return None

    def _enqueue(self, stream: Handle, operation: Operation) -> cudaError_t:
        if not stream.is_alive:
            return cudaError_t.cudaErrorInvalidResourceHandle
        if stream.graph is None:
            stream.queue.append(operation)
        elif stream.thread != threading.get_ident():
            return cudaError_t.cudaErrorStreamCaptureWrongThread
        else:
            stream.graph.nodes.append(operation)
        return cudaError_t.cudaSuccess

    def _run(self, stream: Handle, until: int) -> cudaError_t:
        while stream.done < until:
            operation = stream.queue.pop(0)
            stream.done += 1
            for address, count in operation.touches:
                if not self._holds(address, count):
                    self.faults.append(f"{count} bytes at {address:#x} are not allocated")
                    return cudaError_t.cudaErrorIllegalAddress
            operation.run()
        return cudaError_t.cudaSuccess

    def _holds(self, address: int, count: int) -> bool:
        return (
            any(
                a <= address and address + count <= a + max(1, block.size)
                for a, block in self.memory.items()
            )
            or not count
        )


_VALUES = {"cudaMalloc": 1, "cudaHostAlloc": 1, "cudaStreamEndCapture": 1, "cudaMemGetInfo": 2}
_VALUES |= {"cudaGraphInstantiate": 1, "cudaStreamCreateWithFlags": 1, "cudaGetDeviceCount": 1}

"""A GPU as a device: memory, copies in order, and CUDA graphs. Needs cuda-python, and no torch.

Everything is enqueued on one stream of the device, whichever thread asks, so the order in which
things are enqueued is the order in which they happen. The exception is a thread that captures: what
it enqueues goes to a stream of its own, where nothing runs and where no other thread gets in.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_export.engines.backend import Buffer
from spec_export.engines.cuda_api import CudaApi, Gpu, find_gpu, load_api
from spec_export.engines.cuda_staging import CudaReader, Retired, StagingRing
from spec_export.engines.errors import EngineError


class _Memory:
    """An allocation."""

    def __init__(self, device: object, address: int) -> None:
        self.device, self.address = device, address


class _Local(threading.local):
    """What a thread keeps: the stream it captures on, if it does, and whether it chose the GPU."""

    capture: Any = None
    capture_handle = 0
    has_chosen = False


class CudaGraph:
    """Recorded work, launched as one.

    Args:
        device: where it was recorded.
        executable: the instantiated graph.
        work: what was recorded; it keeps the memory alive that the graph has the addresses of.
    """

    def __init__(self, device: CudaDevice, executable: Any, work: Callable[[], None]) -> None:
        self._device, self._executable, self._work = device, executable, work
        self._call = device.api.call

    def enqueue(self) -> None:
        """Launch it."""
        self._call("cudaGraphLaunch", self._executable, self._device.current())


class CudaDevice:
    """One GPU.

    Args:
        index: which one.
        api: the CUDA runtime; cuda-python's unless given.

    Raises:
        MissingExtra: cuda-python is not installed.
        EngineError: there is no driver, the driver is too old, or there is no such device.
    """

    is_deferred = True
    alignment = 256  # what TensorRT asks of every address

    def __init__(self, index: int = 0, api: CudaApi | None = None) -> None:
        self.api = load_api() if api is None else api
        self.gpu: Gpu = find_gpu(self.api, index)
        self._index, self._local = index, _Local()
        self._choose()
        local = self._local
        flags = self.api.runtime.cudaStreamNonBlocking
        self._stream = self.api.call("cudaStreamCreateWithFlags", flags)
        self._handle = int(self._stream)
        self._retired = Retired(self.api, self._stream, lambda: local.capture is not None)
        self._retired.follow(self, self._retired.close)
        # Nothing may still run when the process takes its libraries apart.
        weakref.finalize(self, self._retired.settle)
        self._ring = StagingRing(self.api, self._retired)
        kinds = self.api.runtime.cudaMemcpyKind
        self._to_host, self._within = kinds.cudaMemcpyDeviceToHost, kinds.cudaMemcpyDeviceToDevice

    # --- the stream -------------------------------------------------------------------------------

    def current(self) -> Any:
        """The stream this thread enqueues on, as cuda-python has it."""
        self._choose()
        capture = self._local.capture
        return self._stream if capture is None else capture

    @property
    def stream(self) -> int:
        """The handle of `current`, for libraries that take a number."""
        self._choose()
        return self._handle if self._local.capture is None else self._local.capture_handle

    def synchronize(self) -> None:
        """Wait for everything that was enqueued."""
        self.api.call("cudaStreamSynchronize", self._waiting("synchronize"))

    def when_gone(self, owner: object, free: Callable[[], object]) -> None:
        """Call `free` after `owner` was collected, when nothing enqueued before can need it."""
        self._retired.follow(owner, free)

    def _choose(self) -> None:
        if not self._local.has_chosen:
            self.api.call("cudaSetDevice", self._index)
            self._local.has_chosen = True

    def _waiting(self, what: str) -> Any:
        """The stream, for what a recorded call may not do."""
        self._choose()
        if self._local.capture is not None:
            raise EngineError(f"{what} inside recorded work: only calls and copies can be recorded")
        return self._stream

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """Zeroed memory, freed after its owner was collected.

        Raises:
            EngineError: there is not enough.
        """
        kind = np.dtype(dtype)
        count = math.prod(shape) * kind.itemsize
        stream = self._waiting("allocate")
        self._retired.sweep()
        address = self.api.attempt("cudaMalloc", max(1, count))
        if address is None:
            gc.collect()
            self._retired.sweep()
            address = self.api.attempt("cudaMalloc", max(1, count))
        if address is None:
            raise EngineError(self._no_memory(count, shape, kind))
        memory = _Memory(self, int(address))
        self._retired.follow(memory, partial(self.api.attempt, "cudaFree", memory.address))
        if count:
            self.api.call("cudaMemsetAsync", memory.address, 0, count, stream)
        return Buffer(memory.address, tuple(shape), kind, None, memory)

    def free_bytes(self) -> tuple[int, int]:
        """Memory that is free, and all there is."""
        self._choose()
        free, total = self.api.call("cudaMemGetInfo")
        return int(free), int(total)

    def _no_memory(self, count: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> str:
        free, total = self.api.attempt("cudaMemGetInfo") or (0, 0)
        return (
            f"no device memory for {count} bytes of {list(shape)} {kind}: {free} of {total} bytes "
            f"of {self.gpu.name} are free; close other programs on it, open fewer sessions, or "
            "build with a smaller --max-len"
        )

    # --- copies -----------------------------------------------------------------------------------

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        """Copy from a host array of the same shape; it may be changed when this returns."""
        _same_shape(target.shape, source.shape)
        stream = self._waiting("upload")
        if source.dtype != target.dtype or not source.flags.c_contiguous:
            source = np.ascontiguousarray(source, target.dtype)
        self._ring.upload(target.address, source, stream)

    def download(self, source: Buffer, target: np.ndarray) -> None:
        """Copy to a host array of the same shape; waits for everything enqueued before."""
        _same_shape(target.shape, source.shape)
        stream = self._waiting("download")
        direct = target.flags.c_contiguous and target.dtype == source.dtype
        into = target if direct else np.empty(source.shape, source.dtype)
        if source.nbytes:
            place = into.ctypes.data
            self.api.call(
                "cudaMemcpyAsync", place, source.address, source.nbytes, self._to_host, stream
            )
        self.api.call("cudaStreamSynchronize", stream)
        if not direct:
            np.copyto(target, into)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy between buffers of one shape and type, in enqueue order."""
        _same_shape(target.shape, source.shape)
        self._copy(target.address, source.address, source.nbytes)

    def clear(self, target: Buffer, axis: int, start: int) -> None:
        """Fill with zeros from index `start` of `axis` on, in enqueue order."""
        row = math.prod(target.shape[axis + 1 :]) * target.dtype.itemsize
        width, lines = (target.shape[axis] - start) * row, math.prod(target.shape[:axis])
        if width <= 0 or not lines:
            return
        place, pitch = target.address + start * row, target.shape[axis] * row
        self.api.call("cudaMemset2DAsync", place, pitch, 0, width, lines, self.current())

    def reader(self, source: Buffer) -> CudaReader:
        """Reads `source` without waiting for it."""
        self._waiting("reader")
        return CudaReader(self.api, source, partial(self._waiting, "read"), self._retired)

    def _copy(self, target: int, source: int, count: int) -> None:
        if count:
            self.api.call("cudaMemcpyAsync", target, source, count, self._within, self.current())

    # --- recorded work ----------------------------------------------------------------------------

    def record(self, work: Callable[[], None]) -> CudaGraph:
        """Run `work` once, then capture what it enqueues as a CUDA graph.

        The first run lets libraries load their kernels and set themselves up, which cannot be
        captured. It is waited for, so that an error of its own is told as such.

        Raises:
            EngineError: CUDA or a library refused the capture, or nothing was enqueued.
        """
        self._waiting("record")
        work()
        self.synchronize()
        try:
            executable = self._instantiated(work)
        except EngineError as error:
            raise EngineError(
                f"this could not be captured as a CUDA graph: {error}; `--no-pipeline` goes without"
            ) from error
        recorded = CudaGraph(self, executable, work)
        destroy = partial(self.api.attempt, "cudaGraphExecDestroy", executable)
        self._retired.follow(recorded, destroy)
        return recorded

    def _instantiated(self, work: Callable[[], None]) -> Any:
        graph = self._captured(work)
        try:
            if not self.api.call("cudaGraphGetNodes", graph)[-1]:
                raise EngineError("nothing was enqueued while recording")
            return self.api.call("cudaGraphInstantiate", graph, 0)
        finally:
            self.api.attempt("cudaGraphDestroy", graph)

    def _captured(self, work: Callable[[], None]) -> Any:
        """What `work` enqueues, as a graph; whatever happens, this thread is out of the capture."""
        api, local = self.api, self._local
        stream = api.call("cudaStreamCreateWithFlags", api.runtime.cudaStreamNonBlocking)
        graph = None
        try:
            mode = api.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
            api.call("cudaStreamBeginCapture", stream, mode)
            local.capture, local.capture_handle = stream, int(stream)
            try:
                work()
            except BaseException:
                graph = api.attempt("cudaStreamEndCapture", stream)
                if graph is not None:
                    api.attempt("cudaGraphDestroy", graph)
                raise
            graph = api.call("cudaStreamEndCapture", stream)
        finally:
            local.capture = None
            api.attempt("cudaStreamDestroy", stream)
            self._retired.sweep()
        return graph


def _same_shape(target: tuple[int, ...], source: tuple[int, ...]) -> None:
    if target != source:
        raise EngineError(f"a copy of {list(source)} into {list(target)}: the shapes differ")

"""Ordinary memory: the device of engines that run on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from spec_export.engines.backend import Buffer
from spec_export.engines.errors import EngineError


class HostReader:
    """A copy that is made at once."""

    def __init__(self, source: Buffer) -> None:
        assert source.host is not None
        self._source = source.host
        self.host = np.empty(source.shape, source.dtype)

    def start(self) -> None:
        """Copy."""
        np.copyto(self.host, self._source)

    def wait(self) -> None:
        """It is there."""


class Recorded:
    """Work that is done anew each time."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.enqueue = work


class HostDevice:
    """Ordinary memory, aligned to 64 bytes. Everything is done when its call returns."""

    is_deferred = False
    alignment = 8

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """Zeroed memory."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        try:
            raw = np.zeros(count + 64, np.uint8)
        except MemoryError as error:
            raise EngineError(
                f"no memory for {count} bytes of {list(shape)} {kind}; build with a smaller "
                "--max-len"
            ) from error
        start = -raw.ctypes.data % 64
        host = raw[start : start + count].view(kind).reshape(shape)
        return Buffer(host.ctypes.data, tuple(shape), kind, host, raw)

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        """Copy from a host array."""
        assert target.host is not None
        np.copyto(target.host, source)

    def download(self, source: Buffer, target: np.ndarray) -> None:
        """Copy to a host array."""
        assert source.host is not None
        np.copyto(target, source.host)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy between buffers."""
        assert source.host is not None and target.host is not None
        np.copyto(target.host, source.host)

    def clear(self, target: Buffer, axis: int, start: int) -> None:
        """Fill with zeros from index `start` of `axis` on."""
        assert target.host is not None
        target.host[(slice(None),) * axis + (slice(start, None),)] = 0

    def reader(self, source: Buffer) -> HostReader:
        """Reads `source`."""
        return HostReader(source)

    def record(self, work: Callable[[], None]) -> Recorded:
        """Keeps `work`."""
        return Recorded(work)

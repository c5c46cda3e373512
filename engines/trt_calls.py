"""Passes of TensorRT engines: a context that runs, and buffers that do not lie as it wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_export.engines.backend import Buffer, Call
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.errors import EngineError
from spec_export.engines.trt_api import TensorRt


class TrtCall:
    """A context with everything set.

    Args:
        api: the library, for what it says of an error.
        device: whose stream it runs on.
        context: the execution context.
        keep: what the context has the addresses of.
    """

    def __init__(self, api: TensorRt, device: CudaDevice, context: Any, keep: object) -> None:
        self._api, self._device, self._execute = api, device, context.execute_async_v3
        held: list[object] = [context, keep]
        device.when_gone(self, held.clear)  # a context must outlive what it has enqueued

    def enqueue(self) -> None:
        """Run once."""
        if not self._execute(self._device.stream):
            raise EngineError(f"{self._api.name} {self._api.version} failed: {self._api.reasons()}")


class StagedCall:
    """A call, for buffers that do not lie where the library wants its tensors.

    Args:
        device: makes the copies.
        before: (source, target) copied before the call.
        call: the call.
        after: (source, target) copied after it.
    """

    def __init__(
        self,
        device: CudaDevice,
        before: Sequence[tuple[Buffer, Buffer]],
        call: Call,
        after: Sequence[tuple[Buffer, Buffer]],
    ) -> None:
        self._copy, self._before, self._call, self._after = device.copy, before, call, after

    def enqueue(self) -> None:
        """Copy in, run once, copy out."""
        for source, target in self._before:
            self._copy(source, target)
        self._call.enqueue()
        for source, target in self._after:
            self._copy(source, target)

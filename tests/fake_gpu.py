"""An opened bundle on the GPU device over the fake CUDA runtime, computed by its own engines.

The engines run on the CPU, at the addresses of the fake device memory, when its stream runs. So
everything between a session and a GPU is as it will be: uploads through page-locked memory, rounds
captured as CUDA graphs, the next round enqueued before the last was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from spec_export.engines.backend import Buffer, Engine
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.cuda_api import CudaApi
from spec_export.runtime import OpenedBundle
from tests.fake_cudart import FakeCudart


class LateCall:
    """An engine's call that runs when the stream comes to it; it keeps no memory alive."""

    def __init__(self, engine: Engine, role: str, buffers: Mapping[str, Buffer], device) -> None:
        self._call = engine.bind(role, {k: replace(b, owner=None) for k, b in buffers.items()})
        named = {**engine.inputs, **engine.outputs}
        self._touched = [(b.address, b.nbytes) for k, b in buffers.items() if k in named]
        self._device, self._keep = device, dict(buffers)

    def enqueue(self) -> None:
        cudart = self._device.api.runtime
        cudart.launch(self._device.stream, self._call.enqueue, *self._touched)


class LateEngine:
    """An engine on the fake GPU."""

    def __init__(self, engine: Engine, device: CudaDevice) -> None:
        self._engine, self._device = engine, device
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> LateCall:
        return LateCall(self._engine, role, buffers, self._device)


class LateEngines(Mapping[str, Engine]):
    """The sampling engines, each when it is asked for."""

    def __init__(self, engines: Mapping[str, Engine], device: CudaDevice) -> None:
        self._engines, self._device = engines, device

    def __getitem__(self, name: str) -> LateEngine:
        return LateEngine(self._engines[name], self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)


def on_fake_gpu(opened: OpenedBundle) -> tuple[OpenedBundle, FakeCudart]:
    """The same bundle on a GPU that is none, and that GPU's runtime."""
    cudart = FakeCudart()
    cudart.free = cudart.total = 1 << 30
    device = CudaDevice(api=CudaApi(cudart))

    moved = replace(
        opened,
        device=device,
        target=LateEngine(opened.target, device),
        draft=None if opened.draft is None else LateEngine(opened.draft, device),
        sampling=LateEngines(opened.sampling, device),
    )
    return moved, cudart

"""ONNX Runtime on an NVIDIA GPU, through its CUDA provider.

The provider runs on the stream of our device, does not wait at the end of a pass, and keeps a CUDA
graph for each bound call: `enable_cuda_graph` with a `gpu_graph_id` of its own. It runs on the
stream it was opened with and on no other, so a round cannot be captured around it; `record` keeps
the work and enqueues it anew, one replayed graph after another.

Not run so far: no machine with a GPU was at hand. What is tested is everything around the
provider, with the CPU provider and ordinary memory in its place.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import _pybind_state as native

from spec_export.engines.backend import Device
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.errors import EngineError
from spec_export.engines.graphs import ModelSpec, SamplingSpec
from spec_export.engines.host import Recorded
from spec_export.engines.manifest import DeviceSpec, GpuSpec
from spec_export.engines.ort import OrtBackend, OrtEngine, open_session

PROVIDER = "CUDAExecutionProvider"
_HALF = ("float16", "bfloat16")


class KeepingDevice(CudaDevice):
    """A GPU whose recorded work is enqueued anew each time."""

    def record(self, work: Callable[[], None]) -> Recorded:  # type: ignore[override]
        """Keeps `work`."""
        return Recorded(work)


class OrtCudaBackend(OrtBackend):
    """ONNX Runtime, CUDA execution provider.

    Args:
        threads: of the host, for what the provider leaves to it.
        device: the GPU; the first one unless given.
        provider: in whose place another can be put for a test.
        place: the library's name of the device's memory.

    Raises:
        EngineError: the installed onnxruntime has no CUDA provider, or there is no GPU.
        MissingExtra: cuda-python is not installed.
    """

    name = "onnxruntime-cuda"

    def __init__(
        self,
        threads: int | None = None,
        *,
        device: Device | None = None,
        provider: str = PROVIDER,
        place: Any = None,
    ) -> None:
        super().__init__(threads)
        if provider not in ort.get_available_providers():
            raise EngineError(
                f"onnxruntime {ort.__version__} has no {provider} (it has "
                f"{', '.join(ort.get_available_providers())}): pip uninstall onnxruntime, then pip "
                "install onnxruntime-gpu (x86-64); for a Jetson NVIDIA builds its own wheels"
            )
        gpu = native.OrtDevice(native.OrtDevice.cuda(), native.OrtDevice.default_memory(), 0)
        self._place = gpu if place is None else place
        self._provider = provider
        self.device = KeepingDevice() if device is None else device
        self._graph_ids = itertools.count(1)

    def _lower_attention(self, model: Any, spec: ModelSpec, capacity: int) -> int:
        """`GroupQueryAttention` of this provider takes half precision alone; else nothing is."""
        from spec_export.engines import lower

        return lower.lower_attention(model, spec, capacity) if spec.dtype in _HALF else 0

    def open_model(self, file: Path, spec: ModelSpec) -> OrtEngine:
        """Open a session for every role of a model."""
        return self._opened(file, spec)

    def open_sampling(self, file: Path, spec: SamplingSpec) -> OrtEngine:
        """Open a session for a sampling graph."""
        return self._opened(file, spec)

    def describe(self) -> DeviceSpec:
        """This processor, this library and the GPU."""
        found = super().describe()
        if not isinstance(self.device, CudaDevice):
            return found
        gpu = self.device.gpu
        return replace(found, gpu=GpuSpec(gpu.name, gpu.compute_capability, gpu.driver, gpu.cuda))

    def _opened(self, file: Path, spec: ModelSpec | SamplingSpec) -> OrtEngine:
        try:
            session = self._session(file, "1")
        except EngineError as error:
            warnings.warn(
                f"{file.parent.name}/{file.name} runs without CUDA graphs: {error}", stacklevel=2
            )
            return OrtEngine(self._session(file, "0"), spec, self._place, self._run_options)
        return OrtEngine(session, spec, self._place, self._captured_options)

    def _session(self, file: Path, graphs: str) -> ort.InferenceSession:
        provider: list[str | tuple[str, dict[str, str]]] = [self._provider]
        if isinstance(self.device, CudaDevice):
            chosen = {
                "user_compute_stream": str(self.device.stream),
                "enable_cuda_graph": graphs,
            }
            provider = [(self._provider, chosen), "CPUExecutionProvider"]
        return open_session(file, ort.SessionOptions(), self.threads, provider)

    def _run_options(self) -> Any:
        options = ort.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def _captured_options(self) -> Any:
        """One graph for each bound call: it replays with the addresses it was captured with."""
        options = self._run_options()
        options.add_run_config_entry("gpu_graph_id", str(next(self._graph_ids)))
        return options

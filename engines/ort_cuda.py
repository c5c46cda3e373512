"""ONNX Runtime on an NVIDIA GPU, through its CUDA provider.

The provider runs on the stream of our device, does not wait at the end of a pass, and keeps a CUDA
graph for each bound call: `enable_cuda_graph` with a `gpu_graph_id` of its own. It runs on the
stream it was opened with and on no other, so a round cannot be captured around it; `record` keeps
the work and enqueues it anew, one replayed graph after another.

The first run of a bound call captures, in each thread anew, on that stream and in CUDA's global
mode (`cuda_graph.cc` of the library): whatever another thread enqueued meanwhile would become part
of the graph, and an allocation or a wait would spoil it. So one lock of the device is held for
every call of ours to CUDA and every one to the provider: sessions in several threads take turns,
also while one waits for its tokens.

A captured graph lives as long as the session of the library, which all our sessions share, and each
of ours binds calls, hence graphs, of its own: a process that makes them without end keeps the
graphs of all of them. Reuse sessions.

Not run on a GPU so far. What is tested is everything around the
provider, with the CPU provider and ordinary memory in its place.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import _pybind_state as native

from spec_export.engines.backend import Buffer, Call, Device
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.cuda_api import CudaApi, load_api
from spec_export.engines.errors import EngineError
from spec_export.engines.graphs import ModelSpec, SamplingSpec
from spec_export.engines.host import Recorded
from spec_export.engines.manifest import DeviceSpec, GpuSpec
from spec_export.engines.ort import OrtBackend, OrtEngine, open_session

PROVIDER = "CUDAExecutionProvider"
_HALF = ("float16", "bfloat16")


class _LockedApi(CudaApi):
    """Checked calls, one at a time and none while somebody else holds the lock."""

    def __init__(self, api: CudaApi, lock: threading.RLock) -> None:
        super().__init__(api.runtime)
        self._lock = lock

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function when it is this thread's turn."""
        with self._lock:
            return super().call(name, *arguments)

    def attempt(self, name: str, *arguments: Any) -> Any:
        """Call what may fail when it is this thread's turn."""
        with self._lock:
            return super().attempt(name, *arguments)


class KeepingDevice(CudaDevice):
    """A GPU whose recorded work is enqueued anew each time.

    Attributes:
        lock: held for every call to CUDA, and by whoever has a library enqueue; a thread may take
            it again.
    """

    def __init__(self, index: int = 0, api: CudaApi | None = None) -> None:
        self.lock = threading.RLock()
        super().__init__(index, _LockedApi(load_api() if api is None else api, self.lock))

    def record(self, work: Callable[[], None]) -> Recorded:  # type: ignore[override]
        """Keeps `work`."""
        return Recorded(work)


class _LockedCall:
    """A bound session that runs when it is this thread's turn: it may capture."""

    def __init__(self, call: Call, lock: threading.RLock) -> None:
        self._call, self._lock = call, lock

    def enqueue(self) -> None:
        """Run once."""
        with self._lock:
            self._call.enqueue()


class OrtCudaEngine(OrtEngine):
    """A session on the GPU.

    Attributes:
        keeps_graphs: whether `enable_cuda_graph` stayed on.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: ModelSpec | SamplingSpec,
        place: Any,
        options: Callable[[], Any],
        lock: threading.RLock,
        *,
        keeps_graphs: bool,
    ) -> None:
        super().__init__(session, spec, place, options)
        self._lock, self.keeps_graphs = lock, keeps_graphs

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> Call:  # type: ignore[override]
        """Bind `buffers` by tensor name for `role`."""
        with self._lock:
            return _LockedCall(super().bind(role, buffers), self._lock)


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
        own = self.device
        self._lock = own.lock if isinstance(own, KeepingDevice) else threading.RLock()
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

    def _opened(self, file: Path, spec: ModelSpec | SamplingSpec) -> OrtCudaEngine:
        options, graphs = self._captured_options, "1"
        try:
            session = self._session(file, graphs)
        except EngineError as error:
            warnings.warn(
                f"{file.parent.name}/{file.name} runs without CUDA graphs: {error}", stacklevel=3
            )
            options, graphs = self._run_options, "0"
            session = self._session(file, graphs)
        said = session.get_provider_options().get(self._provider, {})
        keeps = said.get("enable_cuda_graph", graphs) == "1"
        return OrtCudaEngine(session, spec, self._place, options, self._lock, keeps_graphs=keeps)

    def _session(self, file: Path, graphs: str) -> ort.InferenceSession:
        provider: list[str | tuple[str, dict[str, str]]] = [self._provider]
        if isinstance(self.device, CudaDevice):
            chosen = {
                "user_compute_stream": str(self.device.stream),
                "enable_cuda_graph": graphs,
            }
            provider = [(self._provider, chosen), "CPUExecutionProvider"]
        with self._lock:  # it allocates
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

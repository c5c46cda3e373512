"""ONNX Runtime's CUDA backend, with the CPU provider and ordinary memory where the GPU would be."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from spec_export.engines import ort_cuda
from spec_export.engines.build import read_exported
from spec_export.engines.compare import compare_engines
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.cuda_api import CudaApi
from spec_export.engines.errors import EngineError
from spec_export.engines.host import HostDevice
from spec_export.engines.ort import HOST, OrtBackend
from spec_export.engines.ort_cuda import KeepingDevice, OrtCudaBackend
from tests.fake_cudart import FakeCudart
from tests.tiny_models import TINY

CAPACITY, MAX_LEN = 96, 64


@pytest.fixture
def backend() -> OrtCudaBackend:
    return OrtCudaBackend(1, device=HostDevice(), provider="CPUExecutionProvider", place=HOST)


@pytest.fixture(scope="module", params=["float16", "float32"])
def target(request, export_pair, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "exported"
    path = export_pair(str(TINY / "target"), "none", out, dtype=request.param).path
    spec = read_exported(path).models["target"]
    return path / spec.file, pinned(spec)


def pinned(spec):
    numbers = {"chunk": 32, "gamma+1": 5}
    roles = tuple(
        replace(
            role,
            rows=numbers.get(role.rows, role.rows),
            logit_rows=numbers.get(role.logit_rows, role.logit_rows),
        )
        for role in spec.roles
    )
    values = {"C": CAPACITY}
    return replace(
        spec,
        roles=roles,
        inputs=tuple(tensor.pinned(values) for tensor in spec.inputs),
        outputs=tuple(tensor.pinned(values) for tensor in spec.outputs),
        states=tuple(
            replace(state, dims=tuple(values.get(dim, dim) for dim in state.dims))
            for state in spec.states
        ),
    )


def test_its_lowering_computes_the_standard_graph(target, backend, tmp_path):
    """Half precision becomes GroupQueryAttention, with lengths that never leave the device."""
    graph, spec = target
    compiled = backend.compile_model(graph, spec, CAPACITY, tmp_path / "target", True)
    file = tmp_path / "target" / compiled.file
    operators = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
    if spec.dtype == "float16":
        assert operators.count("GroupQueryAttention") == spec.layers
        assert "Shape" not in operators, "a shape is computed on the host"
    else:
        assert operators.count("Attention") == spec.layers
        assert "GroupQueryAttention" not in operators
    engine = backend.open_model(file, spec)
    standard = OrtBackend(1).open_mapped(graph, spec)
    found = compare_engines(
        backend.device, engine, standard, spec, MAX_LEN, standard_device=HostDevice()
    )
    assert found.agrees, found.describe()


def test_each_call_has_a_graph_of_its_own(backend):
    identities = {backend._captured_options().get_run_config_entry("gpu_graph_id") for _ in "abc"}
    assert len(identities) == 3
    options = backend._captured_options()
    assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"


def test_it_describes_the_gpu(backend):
    assert backend.describe().gpu is None, "ordinary memory is none"
    device = KeepingDevice(api=CudaApi(FakeCudart()))
    moved = OrtCudaBackend(1, device=device, provider="CPUExecutionProvider", place=HOST)
    found = moved.describe()
    assert found.backend == "onnxruntime-cuda"
    assert found.gpu is not None and found.gpu.compute_capability == "8.7"


def test_a_session_is_opened_on_the_stream_of_the_device(monkeypatch, tmp_path):
    asked = []
    device = KeepingDevice(api=CudaApi(FakeCudart()))
    backend = OrtCudaBackend(1, device=device, provider="CPUExecutionProvider", place=HOST)
    monkeypatch.setattr(ort_cuda, "open_session", lambda *args: asked.append(args[3]))
    backend._session(tmp_path / "model.onnx", "1")
    assert asked == [
        [
            (
                "CPUExecutionProvider",
                {"user_compute_stream": str(device.stream), "enable_cuda_graph": "1"},
            ),
            "CPUExecutionProvider",
        ]
    ]


def test_a_graph_the_provider_cannot_capture_is_opened_without_and_says_so(
    monkeypatch, backend, tmp_path, target
):
    graph, spec = target
    opened = ort_cuda.open_session
    tried = []

    def refuse_first(*arguments):
        tried.append(arguments)
        if len(tried) == 1:
            raise EngineError("this session cannot use the graph capture feature")
        return opened(*arguments)

    monkeypatch.setattr(ort_cuda, "open_session", refuse_first)
    with pytest.warns(UserWarning, match="runs without CUDA graphs: this session cannot"):
        engine = backend.open_model(graph, spec)
    assert not engine.keeps_graphs
    assert backend.open_model(graph, spec).keeps_graphs


def test_recorded_work_is_enqueued_anew():
    """The provider stays on the stream it was opened with, so nothing can be captured around it."""
    cudart = FakeCudart()
    device, runs = KeepingDevice(api=CudaApi(cudart)), []
    assert isinstance(device, CudaDevice)
    call = device.record(lambda: runs.append(device.stream))
    call.enqueue()
    call.enqueue()
    assert runs == [device.stream] * 2
    assert "cudaStreamBeginCapture" not in cudart.calls


class CapturingCudart(FakeCudart):
    """Notes calls of other threads while a library captures in the global mode."""

    capturing: int | None = None

    def _logged(self, name, function, arguments):
        if self.capturing not in (None, threading.get_ident()):
            self.faults.append(f"{name} within a capture of another thread")
        return super()._logged(name, function, arguments)


class CapturingRun:
    """A call of the library that captures while `meanwhile` goes on in another thread."""

    def __init__(self, cudart: CapturingCudart, meanwhile) -> None:
        self._cudart = cudart
        self._other = threading.Thread(target=meanwhile)

    def enqueue(self) -> None:
        self._cudart.capturing = threading.get_ident()
        self._other.start()
        self._other.join(0.3)  # it has to wait; where it does not, it is done long before
        self._cudart.capturing = None

    def finish(self) -> None:
        self._other.join()


@pytest.mark.parametrize("what", ["upload", "copy", "clear", "read", "allocate", "free", "run"])
def test_a_capture_of_the_library_is_not_entered_by_another_thread(what):
    """It captures on the stream that everything is enqueued on, on the first run of a call."""
    cudart = CapturingCudart()
    device = KeepingDevice(api=CudaApi(cudart))
    a, b = (device.allocate((4,), np.int64) for _ in range(2))
    held = [device.allocate((4,), np.int64)]
    reader = device.reader(a)
    inner = SimpleNamespace(enqueue=lambda: device.copy(a, b))

    def free() -> None:
        held.clear()
        gc.collect()

    def read() -> None:
        reader.start()
        reader.wait()

    meanwhile = {
        "upload": lambda: device.upload(a, np.arange(4)),
        "copy": lambda: device.copy(a, b),
        "clear": lambda: device.clear(a, 0, 0),
        "read": read,
        "allocate": lambda: device.allocate((4,), np.int64),
        "free": free,
        "run": ort_cuda._LockedCall(inner, device.lock).enqueue,
    }[what]
    run = CapturingRun(cudart, meanwhile)
    before = len(cudart.calls)
    ort_cuda._LockedCall(run, device.lock).enqueue()
    run.finish()
    assert len(cudart.calls) > before, "nothing was tried"
    assert cudart.faults == []


def test_a_session_is_opened_and_runs_in_its_turn(backend, target):
    """With the lock of the device, which a thread may take again."""
    graph, spec = target
    held = []

    class Counted:
        def __enter__(self):
            held.append(1)

        def __exit__(self, *_):
            held.append(-1)

    backend._lock = Counted()
    engine = backend.open_model(graph, spec)
    assert sum(held) == 0 and len(held) == 2
    assert engine._lock is backend._lock
    call = ort_cuda._LockedCall(SimpleNamespace(enqueue=lambda: held.append(5)), Counted())
    call.enqueue()
    assert held[2:] == [1, 5, -1]


def test_without_the_provider_it_says_which_package_has_it():
    if "CUDAExecutionProvider" in ort_cuda.ort.get_available_providers():
        pytest.skip("this onnxruntime has the CUDA provider")
    with pytest.raises(EngineError, match=r"has no CUDAExecutionProvider .* onnxruntime-gpu"):
        OrtCudaBackend()


def test_tokens_are_drawn_by_the_same_engines(backend, export_pair, tmp_path):
    """A sampling graph goes through the same binding."""
    exported = export_pair(str(TINY / "target"), "none", tmp_path / "exported").path
    graphs = read_exported(exported)
    name = "sample_greedy"
    spec = graphs.sampling[name]
    symbols = [dim for tensor in spec.inputs for dim in tensor.dims if isinstance(dim, str)]
    pins = dict.fromkeys(symbols, 1)
    backend.compile_sampling(exported / spec.file, pins, tmp_path / "sample.onnx")
    spec = replace(
        spec,
        inputs=tuple(tensor.pinned(pins) for tensor in spec.inputs),
        outputs=tuple(tensor.pinned(pins) for tensor in spec.outputs),
    )
    engine = backend.open_sampling(tmp_path / "sample.onnx", spec)
    device = backend.device
    shapes = {tensor.name: tensor.dims for tensor in (*spec.inputs, *spec.outputs)}
    buffers = {
        tensor.name: device.allocate(shapes[tensor.name], tensor.dtype)
        for tensor in (*spec.inputs, *spec.outputs)
    }
    logits = np.zeros(shapes["logits"], np.float32)
    logits[..., 11] = 1
    device.upload(buffers["logits"], logits)
    engine.bind("run", buffers).enqueue()
    tokens = np.zeros(shapes["tokens"], np.int64)
    device.download(buffers["tokens"], tokens)
    assert tokens.ravel()[0] == 11

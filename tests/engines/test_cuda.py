"""The GPU device over a CUDA runtime that runs everything late: order, capture, who frees what."""

from __future__ import annotations

import ast
import gc
import importlib.util
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spec_export.engines.backend import Buffer, Device
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.cuda_api import CudaApi, find_gpu
from spec_export.engines.cuda_staging import SLOT_BYTES, SLOTS
from spec_export.engines.errors import EngineError
from tests.fake_cudart import FakeCudart, cudaError_t

ENGINES = Path(__file__).resolve().parents[2] / "engines"
_FUNCTION = r"cuda(?!Error|DevAttr)[A-Z]\w+"
CUDA_MODULES = ("cuda.py", "cuda_api.py", "cuda_staging.py")


@pytest.fixture
def cudart():
    fake = FakeCudart()
    yield fake
    gc.collect()
    assert fake.faults == []


@pytest.fixture
def device(cudart) -> CudaDevice:
    return CudaDevice(api=CudaApi(cudart))


def read(device: CudaDevice, buffer: Buffer) -> np.ndarray:
    found = np.empty(buffer.shape, buffer.dtype)
    device.download(buffer, found)
    return found


def filled(device: CudaDevice, values: np.ndarray) -> Buffer:
    buffer = device.allocate(values.shape, values.dtype)
    device.upload(buffer, values)
    return buffer


# --- memory and copies ----------------------------------------------------------------------------


def test_it_is_a_device(device):
    protocol: Device = device
    assert protocol.is_deferred
    assert device.gpu.name == "Fake GPU" and device.gpu.compute_capability == "8.7"


def test_memory_is_zero_and_aligned_as_tensorrt_wants_it(device):
    for shape in ((3, 5), (1,), (0, 4)):
        buffer = device.allocate(shape, np.float16)
        assert buffer.address and buffer.address % 256 == 0
        assert buffer.shape == shape and buffer.host is None
        assert not read(device, buffer).any()


def test_a_source_may_change_as_soon_as_upload_returns(device):
    """The copy runs late; what was given must have been taken before."""
    source = np.arange(6, dtype=np.int64)
    buffer = device.allocate((6,), np.int64)
    device.upload(buffer, source)
    source[:] = -1
    assert read(device, buffer).tolist() == [0, 1, 2, 3, 4, 5]


def test_more_uploads_than_slots_wait_for_the_oldest(device):
    buffers = [device.allocate((1,), np.int64) for _ in range(3 * SLOTS)]
    value = np.zeros(1, np.int64)
    for i, buffer in enumerate(buffers):
        value[0] = i
        device.upload(buffer, value)
    assert [int(read(device, buffer)[0]) for buffer in buffers] == list(range(3 * SLOTS))


def test_an_upload_larger_than_the_ring_goes_in_pieces(device):
    values = np.random.default_rng(0).integers(0, 255, (SLOTS + 3, SLOT_BYTES + 5), dtype=np.uint8)
    assert np.array_equal(read(device, filled(device, values)), values)


def test_an_upload_waits_for_nothing(device, cudart):
    buffer = device.allocate((4,), np.int64)
    cudart.calls.clear()
    device.upload(buffer, np.arange(4))
    assert "cudaStreamSynchronize" not in cudart.calls
    assert cudart.calls == ["cudaEventSynchronize", "cudaMemcpyAsync", "cudaEventRecord"]


def test_other_types_and_strides_are_converted(device):
    buffer = device.allocate((2, 3), np.int64)
    device.upload(buffer, np.arange(6, dtype=np.int32).reshape(3, 2).T)
    assert read(device, buffer).tolist() == [[0, 2, 4], [1, 3, 5]]
    found = np.zeros((3, 2), np.float64).T
    device.download(buffer, found)
    assert found.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_copies_and_clears_keep_their_order(device):
    a = filled(device, np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    b = device.allocate((2, 3, 4), np.float32)
    device.copy(a, b)
    device.clear(a, 1, 1)
    expected = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert np.array_equal(read(device, b), expected)
    expected[:, 1:] = 0
    assert np.array_equal(read(device, a), expected)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_clear_zeroes_what_lies_past_an_index_and_nothing_else(axis, device):
    expected = np.arange(1, 121, dtype=np.float16).reshape(2, 3, 4, 5)
    buffer = filled(device, expected)
    device.clear(buffer, axis, 1)
    expected[(slice(None),) * axis + (slice(1, None),)] = 0
    assert np.array_equal(read(device, buffer), expected)


def test_clearing_past_the_end_does_nothing(device):
    buffer = filled(device, np.ones((2, 3), np.float32))
    device.clear(buffer, 1, 3)
    assert read(device, buffer).all()


def test_shapes_that_differ_are_refused(device):
    buffer = device.allocate((2, 3), np.float32)
    for move in (device.upload, device.download):
        with pytest.raises(EngineError, match="shapes differ"):
            move(buffer, np.zeros((3, 2), np.float32))
    with pytest.raises(EngineError, match="shapes differ"):
        device.copy(buffer, device.allocate((6,), np.float32))


def test_too_little_memory_says_what_is_wanted_and_free(device, cudart):
    cudart.free = 1000
    with pytest.raises(EngineError, match=r"4096 bytes of \[1024\] float32: 1000 of .* --max-len"):
        device.allocate((1024,), np.float32)
    assert device.allocate((10,), np.float32).nbytes == 40


def test_memory_in_a_cycle_is_collected_before_an_allocation_fails(device, cudart):
    cudart.free = 6000
    held = {"buffer": device.allocate((1024,), np.float32)}
    held["self"] = held
    gc.disable()
    try:
        del held
        assert device.allocate((1024,), np.float32).nbytes == 4096
    finally:
        gc.enable()


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_has_what_was_there_when_it_started(device):
    buffer = filled(device, np.array([7], np.int64))
    reader = device.reader(buffer)
    reader.start()
    device.upload(buffer, np.array([8], np.int64))
    assert reader.host.tolist() == [0], "nothing has run yet"
    reader.wait()
    assert reader.host.tolist() == [7]
    reader.start()
    reader.wait()
    assert reader.host.tolist() == [8]


def test_waiting_for_a_reader_does_not_wait_for_what_came_after(device):
    buffer, ran = filled(device, np.array([1], np.int64)), []
    reader = device.reader(buffer)
    reader.start()
    device.api.runtime.launch(device.stream, lambda: ran.append(1))
    reader.wait()
    assert not ran
    device.synchronize()
    assert ran == [1]


# --- recorded work --------------------------------------------------------------------------------


class Adds:
    """Adds one to a buffer of int64, on the device's stream."""

    def __init__(self, device: CudaDevice, buffer: Buffer) -> None:
        self._device, self._buffer = device, buffer

    def enqueue(self) -> None:
        # By its address alone, as a kernel does: what runs late keeps nothing alive.
        cudart, address, count = self._device.api.runtime, self._buffer.address, self._buffer.nbytes

        def run() -> None:
            cudart.memory[address].view(np.int64)[:] += 1

        cudart.launch(self._device.stream, run, (address, count))


def test_recorded_work_runs_once_and_then_at_each_launch(device):
    a = filled(device, np.array([1, 2], np.int64))
    b = device.allocate((2,), np.int64)
    add = Adds(device, a)

    def work() -> None:
        add.enqueue()
        device.copy(a, b)

    call = device.record(work)
    assert read(device, b).tolist() == [2, 3]
    call.enqueue()
    call.enqueue()
    assert read(device, b).tolist() == [4, 5]


def test_a_launch_reads_what_lies_at_its_addresses(device):
    """What the runtime checks a capture by: change an input, and the output follows."""
    a, b = filled(device, np.array([1], np.int64)), device.allocate((1,), np.int64)
    call = device.record(lambda: device.copy(a, b))
    device.upload(a, np.array([9], np.int64))
    call.enqueue()
    assert read(device, b).tolist() == [9]


def test_a_launch_looks_nothing_up_and_calls_cuda_once(device, cudart):
    a = device.allocate((1,), np.int64)
    call = device.record(Adds(device, a).enqueue)
    cudart.calls.clear()
    call.enqueue()
    assert cudart.calls == ["cudaGraphLaunch"]


@pytest.mark.parametrize(
    "what", ["upload", "download", "allocate", "synchronize", "read", "record"]
)
def test_what_cannot_be_recorded_says_so(what, device):
    a, host = device.allocate((1,), np.int64), np.zeros(1, np.int64)
    reader = device.reader(a)
    forbidden = {
        "upload": lambda: device.upload(a, host),
        "download": lambda: device.download(a, host),
        "allocate": lambda: device.allocate((1,), np.int64),
        "synchronize": device.synchronize,
        "read": reader.start,
        "record": lambda: device.record(lambda: None),
    }[what]
    runs = []

    def work() -> None:
        runs.append(1)
        if len(runs) == 2:
            forbidden()

    with pytest.raises(EngineError, match=f"{what} inside recorded work"):
        device.record(work)
    assert_usable(device)


def test_an_error_in_recorded_work_is_its_own_and_the_device_goes_on(device):
    runs = []

    def work() -> None:
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        device.record(work)
    assert_usable(device)


def test_a_failed_warm_up_captures_nothing(device, cudart):
    def work() -> None:
        raise EngineError("the pass failed")

    with pytest.raises(EngineError, match="the pass failed"):
        device.record(work)
    assert "cudaStreamBeginCapture" not in cudart.calls
    assert_usable(device)


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamCreateWithFlags",
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphGetNodes",
        "cudaGraphInstantiate",
    ],
)
def test_each_failure_of_a_capture_names_its_call(name, device, cudart):
    a = device.allocate((1,), np.int64)
    before = cudart.alive()["handles"]
    cudart.fail[name] = cudaError_t.cudaErrorStreamCaptureInvalidated
    with pytest.raises(
        EngineError, match=f"{name} failed with .*Invalidated: the text of.*--no-pipeline"
    ):
        device.record(Adds(device, a).enqueue)
    gc.collect()
    # An end of a capture that fails is the one whose graph nobody has a handle of.
    lost = 1 if name == "cudaGraphGetNodes" else 0
    assert cudart.alive()["handles"] <= before + lost
    assert_usable(device)


def test_recording_nothing_is_an_error(device):
    with pytest.raises(EngineError, match="nothing was enqueued"):
        device.record(lambda: None)


def assert_usable(device: CudaDevice) -> None:
    """Ordinary work, and a capture, after one that failed."""
    a = filled(device, np.array([5], np.int64))
    call = device.record(Adds(device, a).enqueue)
    call.enqueue()
    assert read(device, a).tolist() == [7]


def test_a_thread_records_only_its_own_work(device):
    """Another thread enqueues in the middle of a capture: it runs, and is not in the graph."""
    a, b = (filled(device, np.zeros(1, np.int64)) for _ in range(2))
    add_a, add_b, runs = Adds(device, a), Adds(device, b), []

    def work() -> None:
        add_a.enqueue()
        runs.append(device.stream)
        if len(runs) == 2:
            other = threading.Thread(target=add_b.enqueue)
            other.start()
            other.join()
            device_of_other.append(read_elsewhere(device, b))

    device_of_other: list[int] = []
    call = device.record(work)
    assert runs[0] != runs[1], "a capture has a stream of its own"
    assert device_of_other == [1]
    call.enqueue()
    assert read(device, a).tolist() == [2] and read(device, b).tolist() == [1]


def read_elsewhere(device: CudaDevice, buffer: Buffer) -> int:
    found: list[int] = []
    reading = threading.Thread(target=lambda: found.append(int(read(device, buffer)[0])))
    reading.start()
    reading.join()
    return found[0]


def test_each_thread_chooses_the_gpu_once(device, cudart):
    cudart.calls.clear()
    threading.Thread(target=lambda: [device.synchronize() for _ in range(3)]).start()
    gc.collect()
    assert cudart.calls.count("cudaSetDevice") <= 1


# --- who frees what -------------------------------------------------------------------------------


def test_memory_is_freed_only_after_the_work_that_uses_it(device, cudart):
    a, b = filled(device, np.array([3], np.int64)), device.allocate((1,), np.int64)
    device.copy(a, b)
    cudart.calls.clear()
    del a
    assert cudart.calls == ["cudaStreamSynchronize", "cudaFree"]
    assert read(device, b).tolist() == [3]


def test_nothing_is_freed_inside_a_capture(device, cudart):
    """Collecting a buffer in the middle of a capture would spoil it."""
    a, held = device.allocate((1,), np.int64), [device.allocate((1,), np.int64)]
    add, runs = Adds(device, a), []

    def work() -> None:
        runs.append(1)
        add.enqueue()
        if len(runs) == 2:
            cudart.calls.clear()
            held.clear()
            assert "cudaFree" not in cudart.calls

    device.record(work)
    assert "cudaFree" in cudart.calls


def test_a_graph_keeps_the_memory_whose_addresses_it_has(device, cudart):
    a, b = filled(device, np.array([4], np.int64)), device.allocate((1,), np.int64)

    def work(source: Buffer = a) -> None:
        device.copy(source, b)

    call = device.record(work)
    del a, work
    gc.collect()
    call.enqueue()
    assert read(device, b).tolist() == [4]


def test_a_graph_that_runs_is_destroyed_afterwards(device, cudart):
    a = device.allocate((1,), np.int64)
    call = device.record(Adds(device, a).enqueue)
    call.enqueue()
    cudart.calls.clear()
    del call
    assert cudart.calls.index("cudaStreamSynchronize") < cudart.calls.index("cudaGraphExecDestroy")


def test_a_reader_dropped_under_way_frees_its_memory_afterwards(device, cudart):
    reader = device.reader(filled(device, np.arange(3)))
    reader.start()
    host = reader.host
    del reader
    gc.collect()
    assert host.tolist() == [0, 1, 2], "the array stays valid while somebody has it"
    before = cudart.alive()["memory"]
    del host
    assert cudart.alive()["memory"] == before - 1


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_nothing_is_left_when_everything_is_gone(in_a_cycle):
    """In a cycle the device may be taken apart before its memory."""
    cudart = FakeCudart()
    device = CudaDevice(api=CudaApi(cudart))
    a = filled(device, np.arange(3))
    parts: dict[str, object] = {
        "device": device,
        "buffer": a,
        "reader": device.reader(a),
        "call": device.record(Adds(device, a).enqueue),
    }
    if in_a_cycle:
        parts["self"] = parts
    parts["call"].enqueue()  # type: ignore[attr-defined]
    del device, a, parts
    gc.collect()
    assert cudart.alive() == {"memory": 0, "handles": 0}
    assert cudart.faults == []


def test_the_fake_finds_a_use_after_free():
    """Negative control of the detector that the tests above rest on."""
    cudart = FakeCudart()
    device = CudaDevice(api=CudaApi(cudart))
    a = device.allocate((1,), np.int64)
    device.synchronize()
    Adds(device, a).enqueue()
    cudart.cudaFree(a.address)
    with pytest.raises(EngineError, match=r"IllegalAddress.*start it anew"):
        device.synchronize()
    assert len(cudart.faults) == 1


# --- what is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"driver": 0}, "no NVIDIA driver was found"),
        ({"driver": 12040}, r"serves CUDA 12.4, cuda-bindings is of CUDA 13.0.*cuda-bindings<13'"),
        ({"devices": 0}, "NVIDIA driver shows no GPU: .*NoDevice.*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_machine_without_a_gpu_says_what_is_missing(machine, message):
    with pytest.raises(EngineError, match=message):
        CudaDevice(api=CudaApi(FakeCudart(**machine)))


def test_another_gpu_than_there_are():
    with pytest.raises(EngineError, match="GPU 2 was asked for and the driver sees 1"):
        CudaDevice(2, api=CudaApi(FakeCudart()))


# --- the library as it is installed ---------------------------------------------------------------


def functions_used() -> dict[str, int]:
    """Every CUDA function the package calls, with how many arguments it gives."""
    found: dict[str, int] = {}
    for file in CUDA_MODULES:
        for node in ast.walk(ast.parse((ENGINES / file).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            first, given = node.args[0], len(node.args) - 1
            if (
                isinstance(first, ast.Attribute) and first.attr == "attempt"
            ):  # partial(attempt, ...)
                first, given = node.args[1], given - 1
            if isinstance(first, ast.Constant) and re.fullmatch(_FUNCTION, str(first.value)):
                found[str(first.value)] = given
    for name in ("cudaGetErrorName", "cudaGetErrorString"):
        found[name] = 1
    return found | {"cudaGetLastError": 0}


def installed():
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    return pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")


def test_the_table_of_functions_is_not_empty():
    used = functions_used()
    assert used["cudaMemcpyAsync"] == 5 and used["cudaFree"] == 1 and len(used) > 25


@pytest.mark.parametrize("name", sorted(functions_used()))
def test_each_function_exists_as_it_is_called(name):
    """cuda-bindings gives the signature as the first line of each function's text."""
    text = getattr(installed(), name).__doc__.splitlines()[0]
    inner = text[text.index("(") + 1 : text.rindex(")")]
    parameters = [part for part in inner.split(",") if part.strip()]
    needed = [part for part in parameters if "=" not in part]
    assert len(needed) <= functions_used()[name] <= len(parameters), text
    assert hasattr(FakeCudart, name), "the fake runtime has all of them"


def test_each_constant_exists():
    runtime, used = installed(), SimpleNamespace(**vars(FakeCudart))
    for name in ("cudaStreamNonBlocking", "cudaEventDisableTiming"):
        assert int(getattr(runtime, name)) == getattr(used, name)
    for kind in ("cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode", "cudaDeviceAttr"):
        for member in getattr(used, kind):
            assert int(getattr(getattr(runtime, kind), member.name)) == member.value, member


def test_the_installed_library_answers():
    """Without a driver this is the sentence about it; with one, a description."""
    api = CudaApi(installed())
    if api.attempt("cudaGetDeviceCount"):
        assert "." in find_gpu(api).compute_capability
    else:
        with pytest.raises(EngineError, match="driver"):
            find_gpu(api)

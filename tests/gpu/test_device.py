"""The GPU device on a GPU: what the fake runtime cannot vouch for."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from spec_export.engines.backend import Buffer
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.errors import EngineError

pytestmark = pytest.mark.gpu


def read(device: CudaDevice, buffer: Buffer) -> np.ndarray:
    found = np.empty(buffer.shape, buffer.dtype)
    device.download(buffer, found)
    return found


def filled(device: CudaDevice, values: np.ndarray) -> Buffer:
    buffer = device.allocate(values.shape, values.dtype)
    device.upload(buffer, values)
    return buffer


def test_memory_copies_readers_and_a_capture(gpu, steps, monkeypatch):
    monkeypatch.setattr("spec_export.engines.cuda.CudaDevice", lambda: gpu)
    shown, values = steps.device.device_itself()
    assert values["bytes_per_s"] > 0, shown


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_clear_zeroes_what_lies_past_an_index(axis, gpu):
    expected = np.arange(1, 61, dtype=np.float16).reshape(3, 4, 5)
    buffer = filled(gpu, expected)
    gpu.clear(buffer, axis, 1)
    expected[(slice(None),) * axis + (slice(1, None),)] = 0
    assert np.array_equal(read(gpu, buffer), expected)


def test_a_capture_is_launched_with_its_addresses(gpu):
    a, b = filled(gpu, np.array([1], np.int64)), gpu.allocate((1,), np.int64)
    call = gpu.record(lambda: gpu.copy(a, b))
    for value in (7, 8):
        gpu.upload(a, np.array([value], np.int64))
        call.enqueue()
        assert read(gpu, b).tolist() == [value]


@pytest.mark.parametrize("what", ["upload", "allocate", "synchronize"])
def test_what_cannot_be_recorded_leaves_the_device_usable(what, gpu):
    a, runs = gpu.allocate((1,), np.int64), []
    forbidden = {
        "upload": lambda: gpu.upload(a, np.zeros(1, np.int64)),
        "allocate": lambda: gpu.allocate((1,), np.int64),
        "synchronize": gpu.synchronize,
    }[what]

    def work() -> None:
        runs.append(1)
        if len(runs) == 2:
            forbidden()

    with pytest.raises(EngineError, match="inside recorded work"):
        gpu.record(work)
    test_a_capture_is_launched_with_its_addresses(gpu)


def test_a_buffer_collected_in_a_capture_does_not_spoil_it(gpu):
    a, held = gpu.allocate((1,), np.int64), [gpu.allocate((1,), np.int64)]

    def work() -> None:
        gpu.clear(a, 0, 0)
        held.clear()
        gc.collect()

    gpu.record(work).enqueue()
    gpu.synchronize()


def test_another_thread_goes_on_during_a_capture(gpu):
    a, b, seen, runs = filled(gpu, np.ones(1)), filled(gpu, np.zeros(1)), [], []

    def elsewhere() -> None:
        gpu.upload(b, np.full(1, 5.0))
        seen.append(float(read(gpu, b)[0]))

    def work() -> None:
        runs.append(1)
        gpu.clear(a, 0, 0)
        if len(runs) == 2:
            other = threading.Thread(target=elsewhere)
            other.start()
            other.join()

    gpu.record(work).enqueue()
    assert seen == [5.0]
    assert read(gpu, a).tolist() == [0.0]


def test_memory_comes_back(gpu):
    gc.collect()
    gpu.synchronize()
    before, _ = gpu.free_bytes()
    buffer = gpu.allocate((64 << 20,), np.uint8)
    assert gpu.free_bytes()[0] <= before - (60 << 20)
    del buffer
    assert gpu.free_bytes()[0] >= before - (4 << 20)


def test_too_much_memory_is_one_message(gpu):
    _, total = gpu.free_bytes()
    with pytest.raises(EngineError, match=r"no device memory for .* --max-len"):
        gpu.allocate((2 * total,), np.uint8)
    assert read(gpu, gpu.allocate((4,), np.uint8)).tolist() == [0] * 4


@pytest.mark.parametrize("way", ["rounds", "drawn rounds", "plain steps"])
def test_rounds_without_an_engine_library(way, gpu, steps, tiny_bundle, monkeypatch):
    """The runtime's own part of a round, captured and pipelined."""
    monkeypatch.setattr("spec_export.engines.cuda.CudaDevice", lambda: gpu)
    shown, values = steps.rounds.rounds_without_engines(tiny_bundle, way)
    assert values["wall_us"] > 0, shown

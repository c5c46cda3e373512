"""The machine, and its GPU held against numpy."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from gpu_checks.report import Skip


def machine() -> tuple[str, dict[str, Any]]:
    """What is here."""
    from spec_export.machine import look
    from spec_export.system import System

    facts = look(System())
    gpu = facts.gpu.name if facts.gpu else "no GPU"
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    return f"{gpu}; {facts.processor}; {packages}", dataclasses.asdict(facts)


def open_device() -> Any:
    """The GPU, or a skip that says what is missing."""
    from spec_export.engines.cuda import CudaDevice
    from spec_export.engines.errors import SpecExportError

    try:
        return CudaDevice()
    except SpecExportError as error:
        raise Skip(str(error)) from error


def device_itself() -> tuple[str, dict[str, Any]]:
    """Memory, copies, clears, readers and a capture, against numpy; and its bandwidth."""
    import numpy as np

    device, rng = open_device(), np.random.default_rng(0)
    values = rng.integers(0, 9, (3, 5, 257)).astype(np.int64)
    a, b = (device.allocate(values.shape, np.int64) for _ in range(2))
    found = np.empty_like(values)
    device.download(a, found)
    assert not found.any(), "memory is not zeroed"
    big = rng.integers(0, 255, 9_000_001, dtype=np.uint8)
    large = device.allocate(big.shape, np.uint8)
    device.upload(large, big)
    back = np.empty_like(big)
    device.download(large, back)
    assert np.array_equal(back, big), "an upload in pieces came out different"
    device.upload(a, values)
    call = device.record(lambda: device.copy(a, b))
    device.upload(a, values + 1)
    call.enqueue()
    reader = device.reader(b)
    reader.start()
    device.clear(b, 1, 2)
    reader.wait()
    assert np.array_equal(reader.host, values + 1), "a capture does not read its input"
    expected = values + 1
    expected[:, 2:] = 0
    device.download(b, found)
    assert np.array_equal(found, expected), "clear zeroed something else"
    for i in range(200):  # more than there are slots: each must have waited for its turn
        device.upload(a, values + i)
    device.download(a, found)
    assert np.array_equal(found, values + 199), "uploads overtook one another"
    copied = bandwidth(device)
    launch = 1e3 * clock(device, call.enqueue, 200)
    shown = f"copies {copied / 1e9:.0f} GB/s read and written, launch {launch:.1f} us"
    return shown, {"bytes_per_s": copied, "launch_us": launch, "nominal": device.gpu.bandwidth}


def bandwidth(device: Any) -> float:
    """Bytes read and written per second by copies within the device."""
    import numpy as np

    if not hasattr(device, "api"):
        a, b = np.zeros(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
        return 2 * a.nbytes / (1e-3 * clock(device, lambda: np.copyto(a, b), 5))
    count = min(1 << 30, device.free_bytes()[0] // 8)
    a, b = (device.allocate((count,), np.uint8) for _ in range(2))
    return 2 * count / (1e-3 * clock(device, lambda: device.copy(a, b), 10))


def clock(device: Any, work: Callable[[], None], times: int) -> float:
    """Milliseconds of device time for one of `times`; the median of three tries."""
    return statistics.median(_clock(device, work, times) for _ in range(3))


def _clock(device: Any, work: Callable[[], None], times: int) -> float:
    work()
    if not hasattr(device, "api"):
        started = time.perf_counter()
        for _ in range(times):
            work()
        return 1e3 * (time.perf_counter() - started) / times
    call, stream = device.api.call, device.current()
    events = [call("cudaEventCreateWithFlags", 0) for _ in range(2)]
    device.synchronize()
    call("cudaEventRecord", events[0], stream)
    for _ in range(times):
        work()
    call("cudaEventRecord", events[1], stream)
    device.synchronize()
    spent = float(call("cudaEventElapsedTime", *events)) / times
    for event in events:
        call("cudaEventDestroy", event)
    return spent

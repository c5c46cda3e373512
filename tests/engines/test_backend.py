"""Buffers, and what an engine refuses to bind."""

from __future__ import annotations

import numpy as np
import pytest

from spec_export.engines.backend import Buffer
from spec_export.engines.bundle import open_bundle
from spec_export.engines.errors import BundleError, EngineError
from spec_export.engines.host import HostDevice
from spec_export.engines.ort import OrtBackend
from spec_export.engines.passes import allocate_caches, bind_role, cache_bytes
from spec_export.engines.reference import ReferenceBackend
from spec_export.runtime.opened import make_backend

BACKENDS = {"onnxruntime": OrtBackend, "onnx.reference": ReferenceBackend}


def line(count: int = 12) -> Buffer:
    buffer = HostDevice().allocate((count,), np.int64)
    buffer.host[:] = np.arange(count)
    return buffer


def test_memory_is_zeroed_and_aligned():
    for shape, dtype in (((3, 5), np.float32), ((), np.int64), ((0, 4), np.float16), ((7,), bool)):
        buffer = HostDevice().allocate(shape, dtype)
        assert buffer.address % 64 == 0 or not buffer.nbytes
        assert (buffer.shape, buffer.dtype) == (shape, np.dtype(dtype))
        assert buffer.nbytes == buffer.host.nbytes
        assert not buffer.host.any()


def test_memory_there_is_not_is_one_sentence():
    """onnxruntime-genai 550: bytes and the remedy, instead of a killed process."""
    with pytest.raises(EngineError, match=r"no memory for 4611686018427387904 bytes.*--max-len"):
        HostDevice().allocate((1 << 60,), np.float32)


def test_views_share_memory_and_know_their_address():
    whole = line()
    part = whole.part(3, 7)
    assert part.address == whole.address + 3 * 8
    part.host[0] = 99
    assert whole.host[3] == 99
    square = part.shaped(2, 2)
    assert (square.address, square.shape) == (part.address, (2, 2))
    assert np.shares_memory(square.host, whole.host)
    narrow = whole.viewed(np.int32)
    assert (narrow.shape, narrow.nbytes, narrow.address) == ((24,), 96, whole.address)
    rows = square.part(1, 2)
    assert rows.address == square.address + 16 and rows.shape == (1, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda b: b.part(-1, 3),
        lambda b: b.part(3, 13),
        lambda b: b.part(5, 4),
        lambda b: b.shaped(5),
        lambda b: b.shaped(3, 4).viewed(np.int32),
        lambda b: b.part(0, 1).viewed(np.dtype("V3")),
    ],
)
def test_a_view_past_the_end_is_refused(wrong):
    with pytest.raises((IndexError, ValueError)):
        wrong(line())


def test_a_device_copies_and_clears():
    device = HostDevice()
    source, target = line(), device.allocate((12,), np.int64)
    device.copy(source, target)
    assert target.host.tolist() == list(range(12))
    device.upload(target, np.arange(12)[::-1])
    found = np.empty(12, np.int64)
    device.download(target, found)
    assert found.tolist() == list(range(11, -1, -1))
    cache = device.allocate((1, 2, 5, 3), np.float32)
    cache.host.fill(7)
    device.clear(cache, 2, 3)
    assert cache.host[:, :, 3:].max() == 0 and cache.host[:, :, :3].min() == 7


@pytest.fixture(params=BACKENDS)
def engine(request, tiny_bundle):
    """The tiny target in one of the engine libraries, and what is needed to bind it."""
    bundle, backend = open_bundle(tiny_bundle), BACKENDS[request.param]()
    spec = bundle.manifest.models["target"]
    file = "target/standard.onnx" if request.param == "onnx.reference" else spec.file
    return backend.device, backend.open_model(bundle.file(file), spec), spec


def buffers_of(engine) -> dict[str, Buffer]:
    device, opened, spec = engine
    return dict(bind_role(device, opened, spec, "verify", allocate_caches(device, spec)).buffers)


def test_caches_are_one_buffer_each(engine):
    device, _, spec = engine
    caches = allocate_caches(device, spec)
    for state in spec.states:
        assert caches[state.input] is caches[state.output]
    assert sum(caches[state.input].nbytes for state in spec.states) == cache_bytes(spec)


def test_separate_past_and_present_are_refused(engine):
    """onnxruntime-genai 1604: two buffers where one is meant give garbage, silently."""
    device, opened, _ = engine
    buffers = buffers_of(engine)
    present = buffers["present.1.key"]
    buffers["present.1.key"] = device.allocate(present.shape, present.dtype)
    with pytest.raises(EngineError, match=r"present\.1\.key must be the same memory as past_key"):
        opened.bind("verify", buffers)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("logits", (1, 4, 1031), np.float32),
        ("logits", (1, 5, 1031), np.float64),
        ("input_ids", (1, 6), np.int64),
        ("input_ids", (5,), np.int64),
        ("kv_len", (1,), np.int32),
        ("past_key_values.0.key", (1, 4, 144, 32), np.float32),
    ],
)
def test_a_buffer_of_another_shape_or_type_is_named(engine, name, shape, dtype):
    device, opened, _ = engine
    buffers = buffers_of(engine) | {name: device.allocate(shape, dtype)}
    with pytest.raises(EngineError, match=rf"role verify: {name} is .*bound was "):
        opened.bind("verify", buffers)


def test_a_buffer_that_is_missing_is_named(engine):
    buffers = buffers_of(engine)
    del buffers["kv_len"]
    with pytest.raises(EngineError, match="role verify: nothing is bound to kv_len"):
        engine[1].bind("verify", buffers)


def test_an_unknown_role_is_refused_with_those_there_are(engine):
    with pytest.raises(EngineError, match=r"no role 'tree'.*prefill, verify, decode, exact_decode"):
        engine[1].bind("tree", buffers_of(engine))


@pytest.mark.parametrize("backend", BACKENDS.values())
def test_a_file_that_is_no_engine_is_refused(backend, tmp_path, tiny_bundle):
    spec = open_bundle(tiny_bundle).manifest.models["target"]
    file = tmp_path / "model.onnx"
    file.write_bytes(b"no graph")
    with pytest.raises(EngineError, match="cannot open"):
        backend().open_model(file, spec)


def test_an_unknown_backend_is_refused():
    with pytest.raises(BundleError, match="'openvino' is unknown; this version has: onnxruntime, "):
        make_backend("openvino")

"""TensorRT engines at run time: one context a call, set up once, checked against the manifest."""

from __future__ import annotations

import ast
import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spec_export.engines.backend import Buffer
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.cuda_api import CudaApi, find_gpu, load_api
from spec_export.engines.errors import EngineError, SpecExportError
from spec_export.engines.graphs import ModelSpec, RoleSpec, SamplingSpec, StateSpec, TensorSpec
from spec_export.engines.passes import allocate_caches, bind_role
from spec_export.engines.trt_api import load
from spec_export.engines.trt_calls import StagedCall, TrtCall
from spec_export.engines.trt_engine import Profile, Scratch, deserialized, open_engine
from tests.fake_cudart import FakeCudart
from tests.fake_trt import (
    Arrays,
    DataType,
    FakeEngine,
    Tensor,
    TensorIOMode,
    TensorLocation,
    engine_file,
    fake_library,
)

V, C = 7, 12
IN, OUT = TensorIOMode.INPUT, TensorIOMode.OUTPUT
CACHE = StateSpec("past", "present", "self", 2, "float16", (1, 2, C, 4), None, True)
SPEC = ModelSpec(
    file="target/model.engine",
    architecture="Toy",
    dtype="float16",
    vocabulary=V,
    max_position=64,
    layers=1,
    inputs=(
        TensorSpec("input_ids", "int64", (1, "T")),
        TensorSpec("kv_len", "int64", (1,)),
        TensorSpec("logit_rows", "int64", ("R",)),
        TensorSpec("past", "float16", CACHE.dims),
    ),
    outputs=(
        TensorSpec("logits", "float32", (1, "R", V)),
        TensorSpec("present", "float16", CACHE.dims),
    ),
    states=(CACHE,),
    taps=(),
    roles=(RoleSpec("verify", 5, 5, "chain"), RoleSpec("decode", 1, 1, "chain")),
    parameters_bytes=0,
)
WIDTHS = {"verify": 5, "decode": 1}


def toy_pass(arrays: Arrays) -> None:
    """Writes the tokens into the cache at `kv_len`, and their sum with the past as logits."""
    rows, at = arrays["input_ids"].shape[1], int(arrays["kv_len"][0])
    arrays["past"][0, :, at : at + rows] = arrays["input_ids"][0, :, None]
    seen = arrays["past"][0, 0, :, 0].astype(np.float32)
    for i, row in enumerate(arrays["logit_rows"]):
        arrays["logits"][0, i] = seen[: at + int(row) + 1].sum()


def tensors(*widths: int) -> tuple[Tensor, ...]:
    """Of the toy, with a profile for each width."""
    cache = ((1, 2, C, 4),) * len(widths)
    return (
        Tensor("input_ids", DataType.INT64, IN, tuple((1, w) for w in widths)),
        Tensor("kv_len", DataType.INT64, IN, ((1,),) * len(widths)),
        Tensor("logit_rows", DataType.INT64, IN, tuple((w,) for w in widths)),
        Tensor("past", DataType.HALF, IN, cache),
        Tensor("logits", DataType.FLOAT, OUT, tuple((1, w, V) for w in widths)),
        Tensor("present", DataType.HALF, OUT, cache, alias="past"),
    )


class Toy:
    """A device, a library and a file that opens as the toy."""

    def __init__(self, folder: Path, *, shared: bool = True, **library: object) -> None:
        self.cudart = FakeCudart()
        self.device = CudaDevice(api=CudaApi(self.cudart))
        self.scratch = Scratch(self.device)
        self.folder = folder
        if shared:
            self.engines = {"both": self.engine(5, 1, memory=(3000, 1000))}
            self.profiles = {"verify": self.file("both"), "decode": self.file("both", 1)}
        else:
            self.engines = {
                "verify": self.engine(5, memory=(3000,)),
                "decode": self.engine(1, memory=(1000,)),
            }
            self.profiles = {name: self.file(name) for name in self.engines}
        self.api = fake_library(self.engines, **library)  # type: ignore[arg-type]

    def engine(self, *widths: int, memory: tuple[int, ...]) -> FakeEngine:
        return FakeEngine(self.cudart, tensors(*widths), memory, toy_pass)

    def file(self, name: str, index: int = 0) -> Profile:
        path = self.folder / f"{name}.engine"
        path.write_bytes(engine_file(name))
        return Profile(path, index)

    def open(self, spec: ModelSpec = SPEC):
        return open_engine(self.api, self.device, self.scratch, spec, self.profiles)

    def read(self, buffer: Buffer) -> np.ndarray:
        found = np.empty(buffer.shape, buffer.dtype)
        self.device.download(buffer, found)
        return found


@pytest.fixture
def toy(tmp_path):
    made = Toy(tmp_path)
    yield made
    assert made.cudart.faults == []


# --- passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_each_role_runs_in_its_profile_over_one_cache(shared, tmp_path):
    toy = Toy(tmp_path, shared=shared)
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    verify, decode = (
        bind_role(toy.device, engine, SPEC, role, caches) for role in ("verify", "decode")
    )
    toy.device.upload(verify.buffers["input_ids"], np.array([[1, 2, 3, 4, 5]]))
    toy.device.upload(decode.buffers["input_ids"], np.array([[10]]))
    toy.device.upload(decode.buffers["kv_len"], np.array([5]))
    verify.call.enqueue()
    decode.call.enqueue()
    assert toy.read(verify.buffers["logits"])[0, :, 0].tolist() == [1, 3, 6, 10, 15]
    assert toy.read(decode.buffers["logits"])[0, :, 0].tolist() == [25]
    made = [context for engine in toy.engines.values() for context in engine.made]
    assert sorted(context.profile for context in made) == ([0, 1] if shared else [0, 0])


def test_a_pass_is_one_call_on_the_stream_of_the_device(toy):
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    bound = bind_role(toy.device, engine, SPEC, "verify", caches)
    (context,) = toy.engines["both"].made
    toy.cudart.calls.clear()
    context.log.clear()
    bound.call.enqueue()
    assert isinstance(bound.call, TrtCall)
    assert (context.log, toy.cudart.calls) == (["execute_async_v3"], [])


def test_passes_are_captured_and_launched_with_their_addresses(toy):
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    bound = bind_role(toy.device, engine, SPEC, "verify", caches)
    graph = toy.device.record(bound.call.enqueue)
    toy.device.upload(bound.buffers["input_ids"], np.array([[5, 4, 3, 2, 1]]))
    graph.enqueue()
    assert toy.read(bound.buffers["logits"])[0, :, 0].tolist() == [5, 9, 12, 14, 15]


def test_two_sessions_over_one_engine_do_not_meet(toy):
    engine = toy.open()
    bound = [
        bind_role(toy.device, engine, SPEC, "decode", allocate_caches(toy.device, SPEC))
        for _ in range(2)
    ]
    for i, role in enumerate(bound):
        toy.device.upload(role.buffers["input_ids"], np.array([[i + 1]]))
    for role in bound:
        role.call.enqueue()
    assert [toy.read(role.buffers["logits"])[0, 0, 0] for role in bound] == [1, 2]


def test_kernels_compiled_for_one_context_serve_the_next(toy):
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    for role in ("verify", "decode", "verify"):
        bind_role(toy.device, engine, SPEC, role, caches)
    found = toy.engines["both"].caches
    assert len(found) == 3 and len(set(map(id, found))) == 1


def test_a_pass_that_fails_says_what_the_library_said(toy):
    engine = toy.open()
    bound = bind_role(toy.device, engine, SPEC, "decode", allocate_caches(toy.device, SPEC))
    toy.engines["both"].fail.add("execute")
    with pytest.raises(EngineError, match=r"tensorrt-rtx 1.7.1 failed: the kernel was refused"):
        bound.call.enqueue()


# --- memory ---------------------------------------------------------------------------------------


def test_contexts_share_scratch_of_the_largest_need(toy):
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    # The small one first: what is known of the other counts.
    calls = [bind_role(toy.device, engine, SPEC, r, caches).call for r in ("decode", "verify")]
    first, second = toy.engines["both"].made
    assert first.memory == second.memory and first.memory[1] == 3000
    assert len(calls) == 2


def test_a_larger_need_later_leaves_the_first_address_alone(toy):
    """It may be part of a graph that was captured."""
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    bound = bind_role(toy.device, engine, SPEC, "decode", caches)
    (context,) = toy.engines["both"].made
    before = context.memory
    assert toy.scratch.block(9000).nbytes == 9000
    assert context.memory == before
    gc.collect()
    bound.call.enqueue()
    toy.device.synchronize()


def test_a_context_outlives_what_it_enqueued(toy):
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    bound = bind_role(toy.device, engine, SPEC, "verify", caches)
    bound.call.enqueue()
    toy.cudart.calls.clear()
    del bound, caches, engine
    gc.collect()
    assert toy.cudart.calls[0] == "cudaStreamSynchronize"
    assert toy.cudart.faults == []


def test_buffers_at_odd_addresses_go_through_memory_beside_them(toy):
    """TensorRT takes multiples of 256 bytes alone; a slice of a line is none."""
    engine, caches = toy.open(), allocate_caches(toy.device, SPEC)
    line, logits = toy.device.allocate((40,), np.int64), toy.device.allocate((1, 2, V), np.float32)
    given = {
        "input_ids": line.part(3, 4).shaped(1, 1),
        "kv_len": line.part(7, 8),
        "logits": logits.shaped(2, V).part(1, 2).shaped(1, 1, V),
    }
    bound = bind_role(toy.device, engine, SPEC, "decode", caches, given)
    assert isinstance(bound.call, StagedCall)
    toy.device.upload(line.part(3, 4), np.array([6]))
    graph = toy.device.record(bound.call.enqueue)
    toy.device.upload(line.part(3, 4), np.array([8]))
    toy.device.upload(line.part(7, 8), np.array([1]))
    graph.enqueue()
    assert toy.read(logits)[0, :, 0].tolist() == [0, 14]


def test_a_cache_at_an_odd_address_is_refused(toy):
    odd = toy.device.allocate((2 * C * 4 + 4,), np.float16).part(4, 2 * C * 4 + 4)
    cache = odd.shaped(1, 2, C, 4)
    with pytest.raises(EngineError, match="the cache past is not at a multiple of 256"):
        bind_role(toy.device, toy.open(), SPEC, "decode", {"past": cache, "present": cache})


def test_a_cache_in_two_places_is_refused(toy):
    """Separate past and present give garbage, and no error, from the library itself."""
    caches = {name: toy.device.allocate((1, 2, C, 4), np.float16) for name in ("past", "present")}
    with pytest.raises(EngineError, match="present must be the same memory as past"):
        bind_role(toy.device, toy.open(), SPEC, "decode", caches)


# --- libraries that have less ---------------------------------------------------------------------


def test_without_runtime_configurations_a_context_is_made_by_its_strategy(tmp_path):
    toy = Toy(tmp_path, features=frozenset({"aliases"}), name="tensorrt")
    engine = toy.open()
    bind_role(toy.device, engine, SPEC, "decode", allocate_caches(toy.device, SPEC)).call.enqueue()
    assert toy.engines["both"].made[0].memory[1] == 3000, "the whole engine's need"
    toy.device.synchronize()


# --- what does not fit ----------------------------------------------------------------------------


def changed(toy: Toy, name: str, /, **fields: object) -> None:
    engine = toy.engines["both"]
    engine.tensors = tuple(
        replace(tensor, **fields) if tensor.name == name else tensor for tensor in engine.tensors
    )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("logits", {"dtype": DataType.HALF}, "logits is float16, the manifest says float32"),
        ("present", {"alias": None}, "writes present in place of nothing, the manifest says past"),
        ("kv_len", {"location": TensorLocation.HOST}, "wants kv_len on the host"),
        ("kv_len", {"name": "lengths"}, "has an input lengths that the manifest has not"),
        ("kv_len", {"mode": OUT}, "has an output kv_len that the manifest has not"),
    ],
)
def test_an_engine_that_is_not_what_the_manifest_says_is_refused(name, fields, message, toy):
    changed(toy, name, **fields)
    with pytest.raises(EngineError, match=message):
        toy.open()


def test_an_engine_without_an_output_is_refused(toy):
    engine = toy.engines["both"]
    engine.tensors = tuple(tensor for tensor in engine.tensors if tensor.name != "logits")
    with pytest.raises(EngineError, match="no output logits"):
        toy.open()


def test_a_manifest_that_lies_about_shapes_is_refused(toy):
    changed(toy, "logits", shapes=((1, 5, V + 1), (1, 1, V + 1)))
    engine = toy.open()
    with pytest.raises(EngineError, match=r"makes logits \[1, 1, 8\], the manifest says"):
        bind_role(toy.device, engine, SPEC, "decode", allocate_caches(toy.device, SPEC))


def test_a_shape_the_profile_has_not_is_refused(toy):
    spec = replace(SPEC, roles=(RoleSpec("verify", 4, 4, "chain"), SPEC.roles[1]))
    engine = toy.open(spec)
    with pytest.raises(EngineError, match=r"role verify: refused \[1, 4\] for input_ids"):
        bind_role(toy.device, engine, spec, "verify", allocate_caches(toy.device, spec))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("context", "no execution context"),
        ("profile", "refused profile 1"),
        ("address", "refused the address of"),
        ("binding", "role decode: the binding gave up"),
    ],
)
def test_what_the_library_refuses_is_named(what, message, toy):
    engine = toy.open()
    toy.engines["both"].fail.add(what)
    with pytest.raises(EngineError, match=message):
        bind_role(toy.device, engine, SPEC, "decode", allocate_caches(toy.device, SPEC))


def test_a_buffer_that_is_missing_or_of_another_type_is_refused(toy):
    engine, buffers = toy.open(), dict(allocate_caches(toy.device, SPEC))
    with pytest.raises(EngineError, match="nothing is bound to input_ids"):
        engine.bind("decode", buffers)
    buffers["input_ids"] = toy.device.allocate((1, 1), np.int32)
    with pytest.raises(EngineError, match=r"input_ids is int64 .* bound was int32"):
        engine.bind("decode", buffers)
    with pytest.raises(EngineError, match="no role 'prefill'; this engine has verify, decode"):
        engine.bind("prefill", buffers)


def test_a_role_without_a_profile_is_refused(toy):
    del toy.profiles["decode"]
    with pytest.raises(EngineError, match="nothing is compiled for the role decode"):
        toy.open()
    toy.profiles["decode"] = toy.file("both", 2)
    with pytest.raises(EngineError, match=r"both.engine has 2 profiles, .* number 2"):
        toy.open()


def test_a_sampling_graph_has_one_role(toy):
    spec = SamplingSpec("sampling/x", (TensorSpec("a", "int64", (4,)),), ())
    spec = replace(spec, outputs=(TensorSpec("b", "int64", (4,)),))

    def add(arrays: Arrays) -> None:
        arrays["b"][:] = arrays["a"] + 1

    both = (Tensor("a", DataType.INT64, IN, ((4,),)), Tensor("b", DataType.INT64, OUT, ((4,),)))
    toy.engines["sampling"] = FakeEngine(toy.cudart, both, (0,), add)
    opened = open_engine(toy.api, toy.device, toy.scratch, spec, {"run": toy.file("sampling")})
    a, b = (toy.device.allocate((4,), np.int64) for _ in range(2))
    opened.bind("run", {"a": a, "b": b}).enqueue()
    assert toy.read(b).tolist() == [1, 1, 1, 1]


# --- files ----------------------------------------------------------------------------------------

REBUILD = r"spec-export build EXPORTED -o BUNDLE --backend tensorrt-rtx"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read: cannot mmap an empty file"),
        (b"not an engine", f"magicTag failed.*{REBUILD}"),
        (engine_file("both")[:-3], f"magicTag failed.*{REBUILD}"),
        (engine_file("other version"), f"239 expected, 241 found.*{REBUILD}"),
    ],
)
def test_a_file_that_is_no_engine_for_this_library(content, message, toy):
    toy.profiles["decode"].file.write_bytes(content)
    with pytest.raises(EngineError, match=message):
        toy.open()


def test_a_file_that_is_not_there(toy):
    toy.profiles["decode"].file.unlink()
    with pytest.raises(EngineError, match=r"both.engine cannot be read: .*No such file"):
        toy.open()


# --- the library as it is installed ---------------------------------------------------------------


def test_each_call_exists_in_the_installed_library():
    """What this package calls on an engine, a context and a configuration."""
    module = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    owners = {
        "engine": module.ICudaEngine,
        "context": module.IExecutionContext,
        "config": module.IRuntimeConfig,
        "module": module,
    }
    folder = Path(__file__).resolve().parents[2] / "engines"
    names = ("trt_engine.py", "trt_calls.py")
    source = "\n".join((folder / name).read_text("utf-8") for name in names)
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(source.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in owners
    }
    assert ("context", "execute_async_v3") in used and len(used) > 15
    assert [name for name in sorted(used) if not hasattr(owners[name[0]], name[1])] == []
    for name in ("USER_MANAGED",):
        assert hasattr(module.ExecutionContextAllocationStrategy, name)
    assert hasattr(module.CudaGraphStrategy, "DISABLED")
    assert hasattr(module.DynamicShapesKernelSpecializationStrategy, "EAGER")


@pytest.fixture(scope="module")
def rtx():
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    return load("tensorrt-rtx")


@pytest.fixture(scope="module")
def real_engine(rtx) -> bytes:
    """Of one layer; building needs no GPU."""
    builder = rtx.builder()
    network = rtx.network(builder)
    x = network.add_input("x", rtx.module.float16, (1, 8))
    y = network.add_activation(x, rtx.module.ActivationType.RELU).get_output(0)
    y.name = "y"
    network.mark_output(y)
    built = builder.build_serialized_network(network, builder.create_builder_config())
    assert built is not None, rtx.reasons()
    return bytes(built)


@pytest.mark.parametrize("kept", [1, 63, 64, 1000])
def test_the_real_library_refuses_a_truncated_engine(kept, rtx, real_engine, tmp_path):
    """It finds this before it looks for a GPU."""
    file = tmp_path / "target" / "model.engine"
    file.parent.mkdir()
    file.write_bytes(real_engine[:kept])
    with pytest.raises(EngineError, match=f"cannot open target/model.engine: .*{REBUILD}"):
        deserialized(rtx, file)


def test_the_real_library_refuses_what_is_no_engine(rtx, real_engine, tmp_path):
    file = tmp_path / "model.engine"
    changed = bytearray(real_engine)
    changed[24:32] = b"\xff" * 8
    file.write_bytes(bytes(changed))
    with pytest.raises(EngineError, match=f"cannot open .*{REBUILD}"):
        deserialized(rtx, file)


def test_a_whole_engine_wants_a_gpu(rtx, real_engine, tmp_path):
    """Without a driver the library says so, and with one the engine opens."""
    file = tmp_path / "model.engine"
    file.write_bytes(real_engine)
    try:
        find_gpu(load_api())
    except SpecExportError:
        with pytest.raises(EngineError, match="driver"):
            deserialized(rtx, file)
    else:
        assert deserialized(rtx, file).num_io_tensors == 2

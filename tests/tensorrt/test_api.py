"""The table of what differs between the two libraries, and the code that rests on it.

Standard TensorRT cannot be installed here. Its path is taken with tensorrt_rtx behind a module that
lacks what `FEATURES` says standard TensorRT lacks: the same calls, but the branches of the other
library.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_export import compiling
from spec_export.engines import trt_api
from spec_export.engines.build import BuildOptions, build_bundle, pinned_models, read_exported
from spec_export.engines.cuda_api import CudaApi
from spec_export.engines.errors import BuildError, EngineError, MissingExtra
from spec_export.engines.trt import TrtBackend
from spec_export.engines.trt_api import FEATURES, NEEDED, TensorRt, describe
from spec_export.engines.trt_build import (
    TimingCache,
    TrtOptions,
    compile_engine,
    missing_kernel,
)
from spec_export.engines.trt_memory import DeviceMemory, check_memory, estimate, shared_memory
from spec_export.engines.trt_quiet import quiet_stderr
from tests.fake_cudart import FakeCudart

RTX_ONLY = ("compute_capability", "runtime_cache", "graph_strategy", "kernel_specialization")


class Without:
    """A library less some of its members, `class.attribute`."""

    def __init__(self, module: Any, members: list[str], version: str) -> None:
        self._module, self.__version__ = module, version
        for owner in {member.split(".")[0] for member in members}:
            lost = {m.split(".")[1] for m in members if m.startswith(f"{owner}.")}
            whole = getattr(module, owner)
            kept = {name: getattr(whole, name) for name in dir(whole) if name not in lost}
            setattr(self, owner, SimpleNamespace(**kept))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def without(api: TensorRt, features: tuple[str, ...], version: str = "11.4.0") -> Any:
    return Without(api.module, [FEATURES[name].member for name in features], version)


def test_everything_in_the_table_is_in_tensorrt_rtx(api):
    assert api.features == set(FEATURES)
    assert all(feature.source and feature.use for feature in FEATURES.values())


def test_features_are_looked_for_and_not_concluded_from_a_version(api):
    found = describe("tensorrt", without(api, RTX_ONLY, "99.0"))
    assert found.features == set(FEATURES) - set(RTX_ONLY)
    assert found.compute_capabilities() == {}


def test_the_document_lists_every_difference_with_its_source():
    text = (Path(__file__).parents[2] / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    for feature in FEATURES.values():
        assert f"`{feature.member}`" in text, feature.member


def test_gpus_to_build_for_are_named_as_users_know_them(api):
    assert list(api.compute_capabilities()) == ["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"]


@pytest.mark.parametrize("missing", NEEDED)
def test_a_tensorrt_of_jetpack_6_is_refused_in_one_message(api, missing):
    """Edge-LLM 140: says the version found and the version needed."""
    with pytest.raises(EngineError) as caught:
        describe("tensorrt", without(api, (missing,), "10.3.0"))
    for word in ("10.3.0", "10.15", "JetPack", FEATURES[missing].member):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("spec_export.engines.extras.find_spec", lambda name: None)
    trt_api.load.cache_clear()
    with pytest.raises(MissingExtra, match=r"extra \[tensorrt\]"):
        trt_api.load("tensorrt")


def test_a_library_without_its_shared_objects_is_one_sentence(monkeypatch):
    """The wheel `tensorrt` is a shell that loads its libraries when it is imported."""

    def fails(name: str) -> None:
        raise OSError("libnvinfer.so.10: cannot open shared object file\nTraceback")

    monkeypatch.setattr("spec_export.engines.extras.find_spec", lambda name: object())
    monkeypatch.setattr(trt_api.importlib, "import_module", fails)
    trt_api.load.cache_clear()
    with pytest.raises(EngineError, match=r"libnvinfer.so.10.*JetPack") as caught:
        trt_api.load("tensorrt")
    assert "\n" not in str(caught.value)


# --- the path of standard TensorRT ---------------------------------------------------------------


@pytest.fixture
def standard(api, monkeypatch) -> TensorRt:
    """Standard TensorRT, as far as the table tells it from tensorrt-rtx."""
    found = describe("tensorrt", without(api, RTX_ONLY))
    monkeypatch.setattr(trt_api, "load", lambda name: found)
    return found


@pytest.mark.filterwarnings("ignore:Use Deprecated")  # timing caches do nothing on tensorrt-rtx
def test_a_bundle_is_built_with_its_options_and_a_timing_cache(standard, prepared, tmp_path: Path):
    cache = tmp_path / "times"
    options = TrtOptions(workspace_bytes=1 << 30, timing_cache=cache, optimization_level=2)
    backend = TrtBackend("tensorrt", options)
    shapes = BuildOptions(gamma=2, max_len=64, chunk=16)
    manifest = build_bundle(prepared(), tmp_path / "bundle", backend, shapes).manifest
    assert manifest.device.backend == "tensorrt" and manifest.device.version == "11.4.0"
    assert manifest.compiler is not None
    assert manifest.compiler.compute_capabilities == ()
    assert manifest.compiler.options == {
        "workspace": str(1 << 30),
        "builder-optimization-level": "2",
    }
    assert cache.stat().st_size > 0
    assert manifest.compiler.timing_cache_sha256 == TrtBackend("tensorrt", options)._times.sha256
    assert not list(tmp_path.glob(".times*"))


@pytest.mark.filterwarnings("ignore:Use Deprecated")
def test_the_timing_cache_is_saved_after_the_sampling_graphs(
    standard, prepared_draft, tiny_pair_exported, tmp_path, monkeypatch
):
    """What the manifest hashes is the file."""

    def grow(self: TimingCache, config: Any) -> None:
        self._content += b"one more time;"

    monkeypatch.setattr(TimingCache, "keep", grow)
    monkeypatch.setattr(TimingCache, "attach", lambda self, config: None)
    cache = tmp_path / "times"
    backend = TrtBackend("tensorrt", TrtOptions(timing_cache=cache))
    graph, spec = prepared_draft("float16", None)
    backend.compile_model(graph, spec, 80, tmp_path / "draft", False)
    compile_greedy(backend, tiny_pair_exported, tmp_path)
    made = backend.compiler().timing_cache_sha256
    assert cache.read_bytes() == 2 * b"one more time;"
    assert made == hashlib.sha256(cache.read_bytes()).hexdigest()


def compile_greedy(backend: TrtBackend, exported: Path, out: Path) -> None:
    """One small sampling graph."""
    spec = read_exported(exported).sampling["sample_greedy"]
    pins = {dim: 1 for tensor in spec.inputs for dim in tensor.dims if isinstance(dim, str)}
    backend.compile_sampling(exported / spec.file, pins, out / "greedy.engine")


def test_other_gpus_are_refused_by_standard_tensorrt(standard):
    with pytest.raises(BuildError, match="--compute-capability is for --backend tensorrt-rtx"):
        TrtBackend("tensorrt", TrtOptions(compute_capabilities=("8.9",)))


def test_a_timing_cache_of_something_else_is_refused(standard, prepared, tmp_path):
    class Refusing:
        def create_timing_cache(self, content: bytes) -> None:
            return None

    times = TrtBackend("tensorrt", TrtOptions(timing_cache=tmp_path / "times"))._times
    with pytest.raises(BuildError, match="is not of this library and GPU; remove it"):
        times.attach(Refusing())


def test_an_optimization_level_beyond_the_last_is_refused(standard):
    with pytest.raises(BuildError, match="--builder-optimization-level 6 is outside 0 to 5"):
        TrtBackend("tensorrt", TrtOptions(optimization_level=6))


def refusing(monkeypatch, refused: dict[int, tuple[str, ...]]) -> None:
    """A library without attention of so many heads for these GPUs."""
    import onnx

    def missing(api: TensorRt, model: bytes, options: TrtOptions, gpu: str | None) -> str | None:
        query = onnx.load_from_string(model).graph.input[0]
        heads = query.type.tensor_type.shape.dim[1].dim_value
        return "there is no fused kernel" if gpu in refused[heads] else None

    monkeypatch.setattr("spec_export.engines.trt_plan.missing_kernel", missing)


def compiled_pair(backend: TrtBackend, exported: Path, out: Path) -> None:
    """Target and draft, of 8 and 4 heads, as a bundle in `out`."""
    options, graphs = BuildOptions(gamma=4, max_len=64, chunk=16), read_exported(exported)
    for name, pinned in pinned_models(graphs, options).items():
        spec = replace(graphs.models[name], roles=pinned.roles)
        backend.compile_model(exported / spec.file, spec, 80, out / name, False)


def test_a_bundle_is_for_the_gpus_that_run_both_models(
    api, prepared, tiny_pair_exported, tmp_path, monkeypatch
):
    """Sampling graphs too; a GPU here that one model has no kernel for does not run it."""
    refusing(monkeypatch, {8: ("7.5",), 4: ("12.1",)})
    backend = TrtBackend("tensorrt-rtx")
    gpu = SimpleNamespace(compute_capability="12.1")
    backend.__dict__["device"] = SimpleNamespace(gpu=gpu)
    assert backend.can_run
    compiled_pair(backend, prepared(), tmp_path)
    served = ("8.0", "8.6", "8.9", "12.0")
    assert backend.compiler().compute_capabilities == served
    assert not backend.can_run
    assert backend.cannot_run == (
        f"the GPU here has compute capability 12.1, and what is built is for {', '.join(served)}"
    )
    gpu.compute_capability = "8.9"
    assert backend.can_run
    found = []
    monkeypatch.setattr("spec_export.engines.trt.compile_engine", lambda *a: found.append(a[5]))
    compile_greedy(backend, tiny_pair_exported, tmp_path)
    assert found == [served]


def test_models_that_no_gpu_runs_both_of_are_refused(api, prepared, tmp_path, monkeypatch):
    known = tuple(api.compute_capabilities())
    refusing(monkeypatch, {8: tuple(x for x in known if x != "8.9"), 4: ("8.9",)})
    with pytest.raises(BuildError) as caught:
        compiled_pair(TrtBackend("tensorrt-rtx"), prepared(), tmp_path)
    for word in ("compute capability 8.9", "no fused kernel", "the other model is for 8.9 alone"):
        assert word in str(caught.value)


def test_gpus_of_one_bundle_say_nothing_about_the_next(api, prepared, tmp_path, monkeypatch):
    backend = TrtBackend("tensorrt-rtx")
    refusing(monkeypatch, {8: ("7.5",), 4: ()})
    compiled_pair(backend, prepared(), tmp_path / "first")
    refusing(monkeypatch, {8: (), 4: ()})
    compiled_pair(backend, prepared(), tmp_path / "second")
    assert backend.compiler().compute_capabilities == tuple(api.compute_capabilities())


# --- what probes print ----------------------------------------------------------------------------


def probe_of_two_heads() -> bytes:
    from spec_export.engines.trt_prepare import AttentionShape, attention_model

    return attention_model(AttentionShape(2, 2, 64), 1, 64, "float16")


def test_a_probe_without_a_kernel_prints_nothing(api, capfd):
    """The library writes `Internal Error: MyelinCheckException` past its log."""
    reason = missing_kernel(api, probe_of_two_heads(), TrtOptions(), "8.9")
    assert reason == "there is no fused kernel"
    os.write(2, b"after the probe\n")
    assert capfd.readouterr().err == "after the probe\n"


def test_what_is_printed_before_a_probe_fails_is_not_lost(capfd):
    def probe() -> None:
        with quiet_stderr():
            os.write(2, b"the cause\n")
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        probe()
    os.write(2, b"after it\n")
    assert capfd.readouterr().err == "the cause\nafter it\n"


def test_a_build_that_fails_prints_what_it_has_to_say(api, tmp_path, capfd):
    times, model, out = TimingCache(api), probe_of_two_heads(), tmp_path / "engine"
    with pytest.raises(BuildError, match="cannot compile"):
        compile_engine(api, model, None, [], TrtOptions(), ("8.9",), times, out)
    assert "MyelinCheckException" in capfd.readouterr().err


# --- memory that the GPU shares -------------------------------------------------------------------

MEMINFO = "MemTotal: 8000000 kB\nMemAvailable: {} kB\nSwapFree: {} kB\n"


def test_a_build_that_shared_memory_cannot_hold_is_refused():
    """What fits to run may not fit to build, on a board whose GPU has no memory of its own."""
    needed = DeviceMemory(1 << 30, 0, 0, 0, building=3 << 30)
    free, for_build = shared_memory(MEMINFO.format(2 << 20, 0), 1 << 30)
    assert (free, for_build) == (2 << 30, 2 << 30)
    with pytest.raises(BuildError, match=r"at least 3\.00 GiB.*2\.00 GiB.*swap"):
        check_memory(needed, None, free, for_build)
    _, with_swap = shared_memory(MEMINFO.format(2 << 20, 1 << 20), 1 << 30)
    check_memory(needed, None, free, with_swap)
    check_memory(needed, None, free)
    assert shared_memory("", 1 << 30) == (1 << 30, 1 << 30)


@pytest.mark.parametrize("is_integrated", [True, False])
def test_whether_the_gpu_shares_memory_is_asked_of_cuda(monkeypatch, is_integrated):
    cudart = FakeCudart()
    cudart.free = 3 << 30
    success = cudart.cudaError_t.cudaSuccess
    monkeypatch.setattr(cudart, "cudaDeviceGetAttribute", lambda *_: (success, is_integrated))
    monkeypatch.setattr("spec_export.engines.cuda_api.load_api", lambda: CudaApi(cudart))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    assert compiling._free_memory() == (3 << 30, 3 << 30 if is_integrated else None)


def test_the_peak_of_a_build_is_of_the_largest_model(prepared):
    options, graphs = BuildOptions(gamma=4, max_len=64, chunk=16), read_exported(prepared())
    found = estimate(pinned_models(graphs, options), prepared())
    assert found.building == 3 * max(spec.parameters_bytes for spec in graphs.models.values())


# --- roles without a kernel ----------------------------------------------------------------------


def test_one_row_of_two_heads_becomes_two_rows(api, prepared, tmp_path):
    """TensorRT has no kernel for it; 4 heads and more have one. The rest of the graph stays."""
    import onnx

    from spec_export.engines import trt_plan

    exported = prepared()
    options = BuildOptions(gamma=4, max_len=64, chunk=16)
    spec = pinned_models(read_exported(exported), options)["draft"]
    capacity = int(spec.states[0].dims[2])
    model = trt_plan_model(exported / spec.file, capacity)
    for value in model.graph.value_info:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 4 and dims[1].dim_value == 4:
            dims[1].dim_value = 2
    asked = TrtOptions(compute_capabilities=("8.9",))
    plan = trt_plan.plan_roles(api, asked, model, spec, capacity)
    rows = {role.name: (role.rows, role.logit_rows) for role in plan.roles}
    assert rows == {"prefill": (16, 1), "catch_up": (2, 1), "step": (2, 2)}
    (note,) = plan.notes
    assert "step: 2 rows, the second one junk" in note and "2 heads" in note and "8.9" in note
    assert isinstance(model, onnx.ModelProto)


def test_steps_are_compiled_for_two_rows_where_that_is_asked_for(prepared, tmp_path):
    exported = prepared()
    options = BuildOptions(gamma=4, max_len=64, chunk=16)
    spec = pinned_models(read_exported(exported), options)["target"]
    described = replace(read_exported(exported).models["target"], roles=spec.roles)
    sizes = []
    for single_row in (True, False):
        asked = TrtOptions(compute_capabilities=("8.9",), single_row=single_row)
        backend = TrtBackend("tensorrt-rtx", asked)
        made = backend.compile_model(exported / spec.file, described, 80, tmp_path, False)
        sizes.append((tmp_path / made.file).stat().st_size)
        assert made.roles is not None and made.engine is not None
    assert {role.name: role.rows for role in made.roles}["decode"] == 2
    assert "decode: 2 rows" in made.lowered[-1]
    assert backend.compiler().options == {"no-single-row": "yes"}
    assert sizes[1] < sizes[0]


def trt_plan_model(graph: Path, capacity: int) -> Any:
    from spec_export.engines.trt_prepare import read_pinned

    return read_pinned(graph, {"C": capacity})


def test_float32_attention_is_refused_with_the_remedy(api, tiny_pair_exported, tmp_path):
    spec = read_exported(tiny_pair_exported).models["target"]
    with pytest.raises(BuildError, match=r"no fused attention for float32.*--dtype float16"):
        TrtBackend("tensorrt-rtx").compile_model(
            tiny_pair_exported / spec.file, spec, 64, tmp_path, False
        )


@pytest.mark.parametrize(
    ("dtype", "weights", "capability", "named"),
    [
        ("float16", "int4", "7.5", "int4 weights"),
        ("float16", "fp8", "8.6", "fp8 weights"),
        ("bfloat16", None, "7.5", "bfloat16 attention"),
    ],
)
def test_a_gpu_without_the_arithmetic_is_named(
    api, prepared_draft, tmp_path, dtype, weights, capability, named
):
    graph, spec = prepared_draft(dtype, weights)
    backend = TrtBackend("tensorrt-rtx", TrtOptions(compute_capabilities=("8.9", capability)))
    with pytest.raises(BuildError) as caught:
        backend.compile_model(graph, spec, 80, tmp_path, False)
    assert f"compute capability {capability}" in str(caught.value)
    assert named in str(caught.value)

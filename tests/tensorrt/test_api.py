"""The table of what differs between the two libraries, and the code that rests on it.

Standard TensorRT cannot be installed here. Its path is taken with tensorrt_rtx behind a module that
lacks what `FEATURES` says standard TensorRT lacks: the same calls, but the branches of the other
library.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_export.engines import trt_api
from spec_export.engines.build import BuildOptions, build_bundle, pinned_models, read_exported
from spec_export.engines.errors import BuildError, EngineError, MissingExtra
from spec_export.engines.trt import TrtBackend
from spec_export.engines.trt_api import FEATURES, NEEDED, TensorRt, describe
from spec_export.engines.trt_build import TrtOptions

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
    """Report 37: says the version found and the version needed."""
    with pytest.raises(EngineError) as caught:
        describe("tensorrt", without(api, (missing,), "10.3.0"))
    for word in ("10.3.0", "10.15", "JetPack", FEATURES[missing].member):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("spec_export.engines.extras.find_spec", lambda name: None)
    trt_api.load.cache_clear()
    with pytest.raises(MissingExtra, match=r"spec-export\[tensorrt\]"):
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
    api, prepared, tmp_path, dtype, weights, capability, named
):
    exported = prepared(dtype, weights)
    options = BuildOptions(gamma=4, max_len=64, chunk=16)
    spec = pinned_models(read_exported(exported), options)["target"]
    described = replace(read_exported(exported).models["target"], roles=spec.roles)
    backend = TrtBackend("tensorrt-rtx", TrtOptions(compute_capabilities=("8.9", capability)))
    with pytest.raises(BuildError) as caught:
        backend.compile_model(exported / spec.file, described, 80, tmp_path, False)
    assert f"compute capability {capability}" in str(caught.value)
    assert named in str(caught.value)

"""Checking a bundle without graphs, built where it cannot run, as TensorRT bundles are.

The engines run here: they are ONNX Runtime's, under another name, with their graphs left out.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.engines.backend import Compiled
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.bundle import VerifiedFiles, open_bundle
from spec_export.engines.certify import certify, record
from spec_export.engines.errors import BundleError, EngineError, IntegrityError
from spec_export.engines.graphs import ModelSpec
from spec_export.engines.manifest import DeviceSpec, EngineSpec
from spec_export.engines.ort import OrtBackend
from tests.precisions import derive

OPTIONS = BuildOptions(gamma=2, max_len=64, chunk=16, narrower=(1,))


class Compiling(OrtBackend):
    """Leaves no graph that others could read, and says how it compiled."""

    def __init__(self, *, runs: bool = True, weights: str | None = None) -> None:
        super().__init__()
        self.can_run, self._weights = runs, weights
        self.spelled_out: tuple[str, ...] = ()

    def compile_model(
        self, graph: Path, spec: ModelSpec, capacity: int, out: Path, link: bool
    ) -> Compiled:
        made = super().compile_model(graph, spec, capacity, out, link)
        (out / made.file).rename(out / "model.engine")
        engine = EngineSpec(spec.dtype, self._weights, {}, spec.layers, 2 * spec.layers)  # type: ignore[arg-type]
        return replace(made, file="model.engine", engine=engine)

    def unfused(self, file: Path) -> tuple[str, ...]:
        return self.spelled_out if file.parent.name == "target" else ()


def here(_: DeviceSpec) -> OrtBackend:
    return Compiling()


def built(exported: Path, out: Path, *, prepared: Path | None = None, weights=None) -> Path:
    """A bundle built ahead of time."""
    backend = Compiling(runs=False, weights=weights)
    bundle = build_bundle(prepared or exported, out / "bundle", backend, OPTIONS, source=exported)
    assert bundle.manifest.exactness.kind == "unprobed"
    return bundle.path


@pytest.fixture(scope="module")
def ahead(tiny_pair_exported, tmp_path_factory) -> Path:
    return built(tiny_pair_exported, tmp_path_factory.mktemp("ahead"))


def test_without_the_graphs_it_says_what_was_not_compared(ahead):
    found = certify(ahead, here)
    assert found.uncompared == ("target", "draft") and found.engines == {}
    assert found.passed and found.probed.kind == "width_invariant"


def test_with_them_every_role_is_compared(ahead, tiny_pair_exported):
    found = certify(ahead, here, exported=tiny_pair_exported)
    assert found.passed and found.uncompared == ()
    roles = 5 + 3  # prefill, two verify passes, two plain ones; prefill, catch_up, step
    assert sum(result.passes for result in found.engines.values()) == 3 * roles
    for result in found.engines.values():
        assert result.argmax_agreement == 1
        assert 0 < result.worst_cache <= result.cache_tolerance


def test_other_graphs_than_it_was_built_from_are_refused(ahead, tiny_pair_exported, tmp_path):
    other = shutil.copytree(tiny_pair_exported, tmp_path / "other")
    weights = other / "draft" / "model.onnx.data"
    content = bytearray(weights.read_bytes())
    content[5000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"draft/model\.onnx\.data is not what bundle was"):
        certify(ahead, here, exported=other)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_an_engine_of_another_precision_is_held_against_what_was_exported(
    tiny_pair_exported, tmp_path, weights
):
    """Half precision against float32; small weights against the same small weights."""
    prepared = derive(tiny_pair_exported, tmp_path / "prepared", "float16", weights=weights)
    path = built(tiny_pair_exported, tmp_path, prepared=prepared, weights=weights)
    found = certify(path, here, exported=tiny_pair_exported)
    assert found.passed, found.failures
    assert found.engines["target"].worst_logit > 0


def test_spelled_out_attention_fails_the_check_with_its_layer_and_a_remedy(ahead):
    """TensorRT 4738."""
    backend = Compiling()
    backend.spelled_out = ("node_attend_3 (softmax_1)",)
    found = certify(ahead, lambda _: backend)
    (failure,) = found.failures
    for word in ("node_attend_3", "target", "not fused", "--dtype"):
        assert word in failure


def test_an_inspector_that_shows_nothing_is_told_and_fails_nothing(ahead, monkeypatch):
    def silent(self: Compiling, file: Path) -> tuple[str, ...]:
        raise EngineError("the inspector lists no layers")

    monkeypatch.setattr(Compiling, "unfused", silent)
    found = certify(ahead, here)
    assert found.passed
    assert found.fusion["target"] == "not seen: the inspector lists no layers"


def test_what_was_found_is_recorded_and_the_bundle_has_another_hash(
    ahead, tiny_pair_exported, tmp_path
):
    path = shutil.copytree(ahead, tmp_path / "bundle")
    before = open_bundle(path, VerifiedFiles(None))
    found = certify(path, here, exported=tiny_pair_exported)
    renamed = record(path, found)
    after = open_bundle(path, VerifiedFiles(None))
    assert after.sha256 == renamed != before.sha256
    assert after.manifest.exactness == found.probed
    assert replace(after.manifest, exactness=before.manifest.exactness) == before.manifest
    assert not list(path.glob(".manifest*"))


def test_nothing_is_recorded_when_the_bundle_changed_meanwhile(ahead, tmp_path):
    path = shutil.copytree(ahead, tmp_path / "bundle")
    found = certify(path, here)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"draft": "draft"', '"draft": "other"'))
    with pytest.raises(BundleError, match="changed meanwhile"):
        record(path, found)

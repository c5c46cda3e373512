"""What a build decides and refuses, and what it leaves in the bundle."""

from __future__ import annotations

import pytest

from spec_export.engines.build import (
    BuildOptions,
    build_bundle,
    capacity_for,
    check_options,
    read_exported,
)
from spec_export.engines.bundle import open_bundle
from spec_export.engines.consistency import check_manifest
from spec_export.engines.errors import BuildError
from spec_export.engines.ort import OrtBackend
from spec_export.engines.standard import STANDARD_GRAPH
from spec_export.runtime import Session
from tests.decoding import trace


def test_the_default_context_is_bounded():
    """onnxruntime-genai 550: a model's 128k positions took all memory by default."""
    assert BuildOptions().max_len == 1024


@pytest.mark.parametrize(
    ("max_len", "chunk", "gamma", "capacity"),
    [
        (128, 32, 4, 160),
        (128, 2, 4, 144),  # two rounds are the widest: 138
        (128, 2, 16, 176),  # 162
        (2, 2, 0, 16),
        (96, 20, 8, 128),
        (96, 16, 8, 128),
    ],
)
def test_the_capacity_holds_the_context_and_what_is_under_way(max_len, chunk, gamma, capacity):
    assert capacity_for(BuildOptions(gamma, max_len, chunk), gamma) == capacity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions(gamma=0), "--gamma 0 is outside 1 to 16"),
        (BuildOptions(gamma=17), "--gamma 17 is outside 1 to 16"),
        (BuildOptions(gamma=-1), "--gamma -1 is outside 1 to 16"),
        (BuildOptions(max_len=513), "--max-len 513: the target has 512 positions"),
        (BuildOptions(max_len=1, chunk=2), "--max-len 1: "),
        (BuildOptions(max_len=128, chunk=1), "--chunk 1 is outside 2 to 4096"),
        (BuildOptions(max_len=128, chunk=4097), "--chunk 4097 is outside"),
    ],
)
def test_options_that_cannot_be_served_are_refused(options, message, tiny_pair_exported, tmp_path):
    with pytest.raises(BuildError, match=message):
        build_bundle(tiny_pair_exported, tmp_path / "bundle", OrtBackend(), options)
    assert not list(tmp_path.iterdir())


def test_without_a_draft_gamma_is_not_asked_about(tiny_exported):
    check_options(BuildOptions(gamma=99, max_len=64), read_exported(tiny_exported("none")))


@pytest.mark.parametrize(
    ("options"),
    [
        BuildOptions(gamma=1, max_len=2, chunk=2),
        BuildOptions(gamma=16, max_len=512, chunk=4),
        BuildOptions(gamma=16, max_len=8, chunk=64),
    ],
)
def test_the_ends_of_every_range_work(options, tiny_exported, tmp_path, open_once):
    bundle = build_bundle(tiny_exported("pair"), tmp_path / "bundle", OrtBackend(), options)
    opened = open_once(bundle.path)
    session = Session(opened)
    count = min(options.max_len - 1, 60)
    found = trace(session, [9], count, options.gamma)
    assert found.tokens[:count] == trace(session, [9], count, 0).tokens[:count]


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
def test_a_bundle_holds_what_its_method_needs(draft, build_tiny):
    bundle = open_bundle(build_tiny(draft))
    manifest = bundle.manifest
    check_manifest(manifest, "manifest")
    methods = {"pair": "model", "ngram": "ngram", "none": "none"}
    assert manifest.method == methods[draft]
    assert manifest.gamma == (0 if draft == "none" else 4)
    assert set(manifest.models) == ({"target", "draft"} if draft == "pair" else {"target"})
    roles = {role.name: (role.rows, role.logit_rows) for role in manifest.models["target"].roles}
    expected = {"prefill": (32, 2), "decode": (1, 1), "exact_decode": (2, 2)}
    assert roles == expected | ({} if draft == "none" else {"verify": (5, 5)})
    files = set(manifest.files)
    for name in manifest.models:
        assert {f"{name}/model.onnx", f"{name}/model.onnx.data", f"{name}/{STANDARD_GRAPH}"} < files
    assert any(file.startswith("sampling/propose") for file in files) == (draft == "pair")
    assert any(file.startswith("sampling/accept") for file in files) == (draft != "none")
    assert manifest.device == OrtBackend().describe()
    parity = manifest.parity["target"]
    assert parity.argmax_agreement == 1 and parity.worst_logit <= parity.tolerance


def test_no_path_of_the_building_machine_is_recorded(tiny_bundle, tiny_pair_exported):
    for file in (tiny_bundle / "manifest.json", tiny_pair_exported / "graphs.json"):
        text = file.read_text(encoding="utf-8")
        assert str(tiny_pair_exported) not in text
        assert "/data/tiny" not in text
    assert open_bundle(tiny_bundle).manifest.source == {"target": "target", "draft": "draft"}


def test_a_self_check_that_fails_leaves_no_bundle(tiny_exported, tmp_path):
    def failing(path, memory) -> None:
        assert (path / "manifest.json").is_file()
        raise BuildError("the self-check failed")

    options = BuildOptions(gamma=1, max_len=16, chunk=8)
    with pytest.raises(BuildError, match="the self-check failed"):
        build_bundle(
            tiny_exported("ngram"),
            tmp_path / "bundle",
            OrtBackend(),
            options,
            self_check=failing,
        )
    assert not list(tmp_path.iterdir())

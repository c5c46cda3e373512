"""`inspect` of all three kinds and `check`."""

from __future__ import annotations

import json
import shutil

import pytest

from spec_export.engines.compare import Comparison
from spec_export.engines.manifest import ExactnessSpec

# --- inspect --------------------------------------------------------------------------------------


def test_inspect_a_bundle(cli, tiny_bundle, open_once):
    called = cli("inspect", tiny_bundle)
    assert called.code == 0
    opened = open_once(tiny_bundle)
    assert opened.bundle.sha256 in called.out
    for file, listed in opened.manifest.files.items():
        assert file in called.out and listed.sha256[:16] in called.out
    for word in (
        "model (a drafting model), gamma 4",
        "128 tokens",
        "exact_decode",
        "catch_up",
        "one session's caches",
        "GroupQueryAttention",
        "width_invariant",
        "LlamaForCausalLM",
        opened.manifest.device.version,
    ):
        assert word in called.out


def test_inspect_an_exported_directory(cli, tiny_pair_exported):
    called = cli("inspect", tiny_pair_exported)
    assert called.code == 0
    for word in (
        "gamma+1 rows",
        "opset",
        "a token of context",
        "target/model.onnx.data",
        "of torch",
    ):
        assert word in called.out


def test_inspect_an_onnx_file(cli, tiny_pair_exported):
    called = cli("inspect", tiny_pair_exported / "target" / "model.onnx")
    assert called.code == 0
    for word in (
        "input_ids: int64 [1, T]",
        "past_key_values.0.key: float",
        "TensorScatter 8",
        "opset standard 24",
        "model.onnx.data (6.",
    ):
        assert word in called.out


def test_inspect_says_which_external_data_is_missing(cli, tiny_pair_exported, tmp_path):
    file = shutil.copy(tiny_pair_exported / "target" / "model.onnx", tmp_path)
    assert "model.onnx.data (missing)" in cli("inspect", file).out


@pytest.mark.parametrize("kind", ["bundle", "exported", "onnx"])
def test_inspect_as_json(cli, tiny_bundle, tiny_pair_exported, kind):
    path = {
        "bundle": tiny_bundle,
        "exported": tiny_pair_exported,
        "onnx": tiny_bundle / "sampling" / "accept_greedy.5.onnx",
    }[kind]
    called = cli("inspect", path, "--json")
    assert called.code == 0
    assert json.loads(called.out)["kind"] == kind
    assert called.out.count("\n") == 1


def test_inspect_refuses_what_is_none_of_the_three(cli, tmp_path):
    assert "none of" in cli("inspect", tmp_path).refused()
    assert "does not exist" in cli("inspect", tmp_path / "nowhere").refused()
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\xff")
    assert "broken.onnx is not a complete ONNX file" in cli("inspect", broken).refused()


# --- check ----------------------------------------------------------------------------------------


def test_check_prints_a_certificate(cli, tiny_bundle, open_once):
    called = cli("check", tiny_bundle)
    assert called.code == 0, called.err
    opened = open_once(tiny_bundle)
    device = opened.manifest.device
    for word in (
        "passed",
        opened.bundle.sha256,
        f"onnxruntime {device.version}",
        device.processor,
        f"{device.threads} thread",
        "width_invariant",
        "target: the engine computes its standard graph",
        "draft: the engine computes its standard graph",
    ):
        assert word in called.out
    assert "this is a certificate for this device" not in called.out


def test_check_hashes_what_was_verified_before(cli, tiny_bundle, monkeypatch):
    """The memory of verified files makes opening quick; a check may not rest on it."""
    assert cli("inspect", tiny_bundle).code == 0  # remembers every file
    hashed = []
    from spec_export.engines import bundle

    original = bundle.hash_file
    monkeypatch.setattr(bundle, "hash_file", lambda *a: hashed.append(a[0].name) or original(*a))
    assert cli("check", tiny_bundle).code == 0
    listed = json.loads((tiny_bundle / "manifest.json").read_text())["files"]
    assert sorted(hashed) == sorted([*(n.split("/")[-1] for n in listed), "manifest.json"])


def test_check_on_another_device_says_whose_certificate_it_is(cli, tiny_bundle, open_once):
    threads = open_once(tiny_bundle).manifest.device.threads + 1
    called = cli("check", tiny_bundle, "--threads", threads)
    assert called.code == 0
    assert "this is a certificate for this device" in called.out
    found = json.loads(cli("check", tiny_bundle, "--threads", threads, "--json").out)
    assert (found["passed"], found["is_other_device"]) == (True, True)
    assert found["device"]["threads"] == threads


def test_check_fails_where_exactness_is_less_than_recorded(cli, tiny_bundle, monkeypatch):
    less = ExactnessSpec("row_invariant", (2, 5), (0,), 10, "row 0 of T=5 has other bits")
    monkeypatch.setattr("spec_export.engines.certify.probe_exactness", lambda *_: less)
    called = cli("check", tiny_bundle)
    assert called.code == 1
    assert "FAILED" in called.out
    assert "row_invariant here, the manifest records width_invariant" in called.out


def test_check_fails_where_an_engine_does_not_compute_its_graph(cli, tiny_bundle, monkeypatch):
    wrong = Comparison(11, 3.5, 0.001, 0.2, None, "role verify, kv_len 64", 0.0, 0.001)
    monkeypatch.setattr("spec_export.engines.certify.compare_with_standard", lambda *_: wrong)
    called = cli("check", tiny_bundle, "--json")
    assert called.code == 1
    found = json.loads(called.out)
    assert not found["passed"]
    assert len(found["failures"]) == 2 and "role verify" in found["failures"][0]

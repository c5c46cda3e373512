"""The script for a GPU, taken through its steps on a GPU that is none.

So that it does not fail on its first real one for a slip of its own. The figures mean nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.cuda_api import CudaApi
from spec_export.engines.host import HostDevice
from spec_export.runtime import Request, Sampling, Session, generate
from tests.fake_cudart import FakeCudart
from tests.fake_gpu import on_fake_gpu

SCRIPT = Path(__file__).resolve().parents[1] / "bench/gpu_check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


@pytest.fixture
def session(tiny_bundle, open_once):
    moved, cudart = on_fake_gpu(open_once(tiny_bundle))
    yield Session(moved)
    assert cudart.faults == []


@pytest.fixture
def fake_device(monkeypatch, check):
    cudart = FakeCudart()
    cudart.free = cudart.total = 1 << 30
    device = CudaDevice(api=CudaApi(cudart))
    monkeypatch.setattr(check, "open_device", lambda: device)
    yield device
    assert cudart.faults == []


def test_the_device_is_held_against_numpy(check, fake_device):
    shown, values = check.device_itself()
    assert "GB/s" in shown and values["launch_us"] > 0


@pytest.mark.parametrize("step", ["identity", "capture", "host_gap", "passes"])
def test_each_step_of_a_bundle_runs(step, check, session):
    shown, values = getattr(check, step)(session)
    assert shown and isinstance(values, dict)
    json.dumps(values)


def test_rounds_are_timed_without_an_engine_library(check, fake_device, tiny_bundle):
    shown, values = check.rounds_without_engines(tiny_bundle)
    assert "a round" in shown and values["busy_us"] > 0


def test_the_law_and_the_speed_up_of_a_bundle(check, session):
    check.law(session.opened, 60)
    shown, values = check.speed_up(session, 12)
    assert values["speedup"] > 0 and "tokens/s" in shown


@pytest.fixture(scope="module")
def torch_engine():
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location(
        "torch_engine", SCRIPT.with_name("torch_engine.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_computes_every_graph_of_a_bundle(
    torch_engine, tiny_exported, tiny_bundle, open_once, tmp_path
):
    """Building compares each role with ONNX Runtime; the text is drawn by its sampling graphs."""
    opened = open_once(tiny_bundle)
    manifest = opened.manifest
    backend = torch_engine.TorchBackend(HostDevice())
    options = BuildOptions(gamma=manifest.gamma, max_len=manifest.max_len, chunk=manifest.chunk)
    bundle = build_bundle(tiny_exported("pair"), tmp_path / "bundle", backend, options)
    models = {
        name: backend.open_model(bundle.file(spec.file), spec)
        for name, spec in bundle.manifest.models.items()
    }
    sampling = {
        name: backend.open_sampling(bundle.file(spec.file), spec)
        for name, spec in bundle.manifest.sampling.items()
    }
    moved = replace(
        opened,
        bundle=bundle,
        device=backend.device,
        target=models["target"],
        draft=models["draft"],
        sampling=sampling,
    )
    request = Request(max_tokens=20, ignore_end=True, sampling=Sampling(0.8, 5, top_k=40))
    prompt = opened.text.encode("And the king said")
    texts = [
        [token for piece in generate(Session(one), prompt, request) for token in piece.tokens]
        for one in (opened, moved)
    ]
    assert texts[0] == texts[1]


def test_a_wrong_text_is_found(check, session, monkeypatch):
    """Negative control."""
    from spec_export.runtime import compare

    wrong = compare.SelfCheck(tokens=9, accepted=3, departs_at=4, is_promised=True)
    monkeypatch.setattr(compare, "check_session", lambda *_, **__: wrong)
    with pytest.raises(AssertionError, match="token 4 differs"):
        check.identity(session)


def test_a_report_goes_on_and_tells_the_kinds_of_ends_apart(check, capsys):
    report = check.Report(60, [])

    def skips():
        raise check.Skip("torch is not installed")

    assert report.run("good", lambda: ("fine", {}))
    assert report.run("slow", lambda: ("slow", {"missed": True}))
    assert not report.run("absent", skips)
    assert not report.run("wrong", lambda: 1 / 0)
    assert report.finish() == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [step["status"] for step in found["steps"]] == ["ok", "missed", "skipped", "FAILED"]
    assert found["failed"] == ["wrong"]


def test_a_missed_target_is_no_failure(check):
    report = check.Report(60, [])
    report.run("slow", lambda: ("slow", {"missed": True}))
    assert report.finish() == 0


def test_no_step_begins_after_the_time_is_up(check):
    report = check.Report(-1, [])
    assert not report.run("late", lambda: pytest.fail("it ran"))
    assert report.steps[0].detail == "no time left"


def test_the_cuda_functions_it_calls_exist():
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    names = {
        node.args[0].value
        for node in ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("cuda")
    }
    assert "cudaEventElapsedTime" in names
    assert [name for name in names if not hasattr(runtime, name)] == []

"""The script for a GPU, taken through its steps on a GPU that is none.

So that it does not fail on its first real one for a slip of its own. The figures mean nothing.
"""

from __future__ import annotations

import ast
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.cuda_api import CudaApi
from spec_export.engines.host import HostDevice, Recorded
from spec_export.runtime import Request, Sampling, Session, generate
from tests.fake_cudart import FakeCudart
from tests.fake_gpu import on_fake_gpu
from tests.gpu_check_script import BENCH, load_gpu_check


@pytest.fixture(scope="module")
def check():
    return load_gpu_check()


@pytest.fixture
def session(tiny_bundle, open_once):
    moved, cudart = on_fake_gpu(open_once(tiny_bundle))
    yield Session(moved)
    assert cudart.faults == []


@pytest.fixture
def fake_device(monkeypatch):
    cudart = FakeCudart()
    cudart.free = cudart.total = 1 << 30
    device = CudaDevice(api=CudaApi(cudart))
    monkeypatch.setattr("spec_export.engines.cuda.CudaDevice", lambda: device)
    yield device
    assert cudart.faults == []


def test_the_device_is_held_against_numpy(check, fake_device):
    shown, values = check.device.device_itself()
    assert "GB/s" in shown and values["launch_us"] > 0


@pytest.mark.parametrize(
    ("part", "step"), [("texts", "identity"), ("rounds", "capture"), ("rounds", "host_gap")]
)
def test_each_step_of_a_bundle_runs(part, step, check, session):
    shown, values = getattr(getattr(check, part), step)(session)
    assert shown and isinstance(values, dict)
    json.dumps(values)


@pytest.mark.parametrize("way", ["rounds", "drawn rounds", "plain steps"])
def test_rounds_are_timed_without_an_engine_library(way, check, fake_device, tiny_bundle):
    shown, values = check.rounds.rounds_without_engines(tiny_bundle, way)
    assert "each" in shown and values["busy_us"] > 0


@pytest.mark.parametrize(
    ("way", "key"),
    [("rounds", ("verify", 4)), ("drawn rounds", ("verify", 4)), ("plain steps", None)],
)
def test_a_gap_is_measured_on_rounds_of_one_kind_that_run_ahead(way, key, check, session):
    """It mixed rounds and plain steps, and a recording was among them."""
    kinds, recordings = [], []
    pipeline, timed = session._pipeline, check.rounds.Timed
    start, record = pipeline._start, pipeline._record

    def begin(role: str, n_draft: int, unread: int = 0):
        kinds.append((role, n_draft, unread > 0))
        return start(role, n_draft, unread)

    def noted(*arguments):
        recordings.append(len(kinds))
        return record(*arguments)

    pipeline._start, pipeline._record = begin, noted
    measured: list[int] = []
    check.rounds.Timed = lambda *arguments: measured.append(len(kinds)) or timed(*arguments)
    try:
        _, values = check.rounds.host_gap(session, way)
    finally:
        check.rounds.Timed = timed
    during = kinds[measured[0] :]
    expected = key or (session._plain, 0)
    assert during == [(*expected, True)] * values["count"], "each was begun ahead"
    assert recordings and max(recordings) <= measured[0]


def test_the_gap_of_a_look_up_is_not_measured(check, tiny_ngram_bundle, open_once):
    """Its rounds never run ahead; its plain steps do."""
    moved, _ = on_fake_gpu(open_once(tiny_ngram_bundle))
    session = Session(moved)
    with pytest.raises(check.Skip, match="never run ahead"):
        check.rounds.host_gap(session)
    _, values = check.rounds.host_gap(session, "plain steps")
    assert values["count"] >= check.rounds.LEAST_ROUNDS


def test_a_device_that_keeps_the_work_captures_nothing(check, session, monkeypatch):
    """The row said ok for onnxruntime-cuda, whose device records no graph."""
    monkeypatch.setattr(session._device, "record", Recorded)
    with pytest.raises(check.Skip, match="keeps the work and enqueues it anew"):
        check.rounds.capture(session)


def test_the_librarys_own_graphs_are_told_apart_from_ours(check, session):
    def engines(**kept: bool) -> SimpleNamespace:
        made = {name: SimpleNamespace(keeps_graphs=on) for name, on in kept.items()}
        sampling = SimpleNamespace(_open={"sample": made["sample"]})
        opened = SimpleNamespace(target=made["target"], draft=None, sampling=sampling)
        return SimpleNamespace(opened=opened)

    shown, values = check.rounds.provider_graphs(engines(target=True, sample=False))
    assert shown == "enable_cuda_graph is on in 1 of 2 engines; off in sample"
    assert values["missed"]
    assert not check.rounds.provider_graphs(engines(target=True, sample=True))[1]["missed"]
    with pytest.raises(check.Skip, match="leaves graphs to the device"):
        check.rounds.provider_graphs(session)


@pytest.mark.parametrize("rule", ["reject", "invariant"])
def test_texts_of_sessions_are_of_the_targets_law(rule, check, session):
    """Only toys and single sampling graphs were held against a law, never what a session emits."""
    _, values = check.texts.session_law(session, rule, 150)
    assert values["ahead"] > 0
    assert ("verify", 2) in session._rounds._recorded


def test_sessions_that_emit_another_law_are_found(check, tiny_bundle, open_once):
    """Negative control: a flatter law."""
    with pytest.raises(AssertionError, match="rule reject"):
        check.texts.session_law(Session(open_once(tiny_bundle)), "reject", 400, temperature=2.0)


def test_small_cells_are_one_cell(check):
    statistic, limit = check.texts.chi_square([50.0, 46.0, 3.0, 1.0], [50, 46, 1, 3])
    assert statistic == 0 and limit == check.texts.chi_square([50.0, 50.0], [50, 50])[1] > 10


def test_what_a_pass_reads_is_weights_and_whole_caches(check, session, tiny_exported):
    """Caches were left out, and an embedding that is only looked up in was counted."""
    graph = tiny_exported("pair") / session._spec.file
    shown, values = check.passes.pass_times(session, graph)
    assert values["caches_bytes"] == sum(
        session._caches[state.input].nbytes for state in session._spec.states
    )
    assert "caches at full capacity" in shown and "does not count" in shown
    json.dumps(values)


def test_an_embedding_that_is_only_looked_up_in_does_not_count(check, tmp_path):
    def graph(tied: bool) -> Path:
        table = numpy_helper.from_array(np.zeros((7, 3), np.float32), "table")
        head = numpy_helper.from_array(np.zeros((3, 5), np.float16), "head")
        nodes = [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("MatMul", ["rows", "head"], ["logits"]),
        ]
        if tied:
            nodes.append(helper.make_node("Transpose", ["table"], ["turned"]))
        made = helper.make_graph(nodes, "g", [], [], [table, head])
        file = tmp_path / f"{tied}.onnx"
        onnx.save(helper.make_model(made), file)
        return file

    assert check.passes.read_bytes(graph(tied=False)) == (30, 84)
    assert check.passes.read_bytes(graph(tied=True)) == (114, 0)


def test_device_memory_is_that_of_engines_and_of_sessions(check, tiny_bundle, open_once):
    """Nothing said what an opened bundle takes, so layouts could not be compared."""
    moved, cudart = on_fake_gpu(open_once(tiny_bundle))
    held = []

    def open_engines(_: Path):
        held.append(moved.device.allocate((1000,), np.uint8))
        return moved

    session, shown, taken = check.bundles.open_measured(
        tiny_bundle, lambda: moved.device.free_bytes()[0], open_engines
    )
    assert taken["engines"] == 1000 and "another session" in shown
    assert taken["first_session"] >= taken["caches"] == moved.session_bytes() > 0
    assert taken["other_session"] >= taken["caches"]
    assert session.opened is moved and cudart.faults == []


def test_the_law_and_the_speed_up_of_a_bundle(check, session):
    check.texts.law(session.opened, 60)
    shown, values = check.texts.speed_up(session, 12)
    assert values["speedup"] > 0 and "tokens/s" in shown


@pytest.fixture(scope="module")
def torch_engine(check):
    pytest.importorskip("torch")
    return importlib.import_module("gpu_checks.torch_engine")


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
        check.texts.identity(session)


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
        for part in (BENCH / "gpu_checks").glob("*.py")
        for node in ast.walk(ast.parse(part.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("cuda")
    }
    assert "cudaEventElapsedTime" in names
    assert [name for name in names if not hasattr(runtime, name)] == []

"""The tiny pair in float16, built and run on a GPU by every engine library that is there."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from spec_export.engines.bundle import VerifiedFiles
from spec_export.engines.certify import certify
from spec_export.engines.errors import SpecExportError
from spec_export.runtime import Request, Sampling, Session, generate, open_runtime
from spec_export.runtime.opened import make_backend

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def session(gpu_bundle) -> Session:
    return Session(open_runtime(gpu_bundle, memory=VerifiedFiles(None)))


def text(session: Session, **request) -> list[int]:
    prompt = session.opened.text.encode("And the king said unto him")
    asked = Request(max_tokens=48, ignore_end=True, **request)
    return [token for piece in generate(session, prompt, asked) for token in piece.tokens]


def test_every_role_computes_its_standard_graph(gpu_bundle, half_exported, steps):
    steps.bundles.parity(gpu_bundle, half_exported)


def test_the_greedy_text_is_that_of_plain_decoding(session, steps):
    steps.texts.identity(session)


def test_the_bundle_emits_the_targets_law(session, steps):
    steps.texts.law(session.opened, 3000)


@pytest.mark.parametrize("rule", ["reject", "invariant"])
def test_texts_are_of_the_targets_law(rule, session, steps):
    """As they are served: recorded, and begun before the last round was read."""
    steps.texts.session_law(session, rule, 300)


def test_an_early_exit_is_not_seen_in_the_text(session):
    """The host looks at drafts between the calls of a round, which is then no recording."""
    for sampling in (Sampling(), Sampling(1.0, 3)):
        expected = text(session, sampling=sampling)
        for least in (0.1, 0.3, 0.99):
            assert text(session, sampling=sampling, draft_confidence=least) == expected


def test_the_librarys_own_graphs_stay_on(session, steps):
    if session.opened.manifest.device.backend != "onnxruntime-cuda":
        pytest.skip("the device captures rounds")
    _, values = steps.rounds.provider_graphs(session)
    assert all(values["on"].values()), values


def test_two_threads_on_one_gpu_keep_apart(session):
    """Sessions of their own, first runs included; onnxruntime captures on the shared stream."""
    expected, found = text(session), {}

    def other(name: int) -> None:
        found[name] = [text(Session(session.opened)) for _ in range(2)]

    threads = [threading.Thread(target=other, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [expected, expected] for name in range(3)}


def test_rounds_are_captured(session, steps):
    text(session)
    if session.opened.manifest.device.backend == "onnxruntime-cuda":
        pytest.skip("onnxruntime captures its own graphs, one for each call")
    steps.rounds.capture(session)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 3), Sampling(0.9, 3, rule="block")])
def test_pipelining_changes_no_text(sampling, session):
    plain = Session(session.opened, pipelined=False)
    assert text(session, sampling=sampling) == text(plain, sampling=sampling)


def test_two_sessions_on_one_gpu_keep_apart(session):
    expected = text(session)
    others = [Session(session.opened) for _ in range(2)]
    assert [text(other) for other in others] == [expected, expected]


def test_a_text_repeats_itself(session):
    assert text(session) == text(session)


def test_the_certificate(gpu_bundle):
    found = certify(gpu_bundle, lambda device: make_backend(device.backend, device.threads))
    assert found.passed, found.failures


def test_a_truncated_engine_is_refused(gpu_bundle, tmp_path):
    """By its size in the manifest, before any library sees it."""
    broken = tmp_path / "bundle"
    shutil.copytree(gpu_bundle, broken)
    model = next(iter((broken / "target").glob("model.*")))
    model.write_bytes(Path(model).read_bytes()[:-100])
    with pytest.raises(SpecExportError, match="model"):
        open_runtime(broken, memory=VerifiedFiles(None))

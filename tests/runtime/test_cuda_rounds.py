"""Whole texts on the GPU device, over the fake CUDA runtime (`tests.fake_gpu`)."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest

from spec_export.runtime import Request, Sampling, Session, generate
from tests.fake_gpu import on_fake_gpu

PROMPT = "the cat sat on the mat, the cat sat on"


def text(session: Session, request: Request) -> list[int]:
    prompt = session.opened.text.encode(PROMPT)
    return [token for piece in generate(session, prompt, request) for token in piece.tokens]


@pytest.mark.parametrize("draft", ["pair", "ngram"])
@pytest.mark.parametrize(
    "request_",
    [
        Request(max_tokens=40, ignore_end=True),
        Request(max_tokens=40, ignore_end=True, sampling=Sampling(temperature=0.9, seed=3)),
        Request(max_tokens=40, ignore_end=True, gamma=0),
    ],
    ids=["greedy", "drawn", "plain"],
)
def test_a_text_on_the_gpu_device_is_the_text_on_the_cpu(draft, request_, build_tiny, open_once):
    opened = open_once(build_tiny(draft))
    expected = text(Session(opened), request_)
    moved, cudart = on_fake_gpu(opened)
    session = Session(moved)
    assert [text(session, request_) for _ in range(2)] == [expected, expected]
    assert cudart.faults == []
    assert "cudaGraphLaunch" in cudart.calls


def test_a_launched_round_makes_no_call_that_waits_but_its_read(tiny_bundle, open_once):
    """Between two reads there are uploads, one launch and a copy to the host, and nothing else."""
    moved, cudart = on_fake_gpu(open_once(tiny_bundle))
    session = Session(moved)
    request = Request(max_tokens=30, ignore_end=True)
    text(session, request)
    cudart.calls.clear()
    text(session, request)
    calls = cudart.calls
    launches = [i for i, name in enumerate(calls) if name == "cudaGraphLaunch"]
    assert len(launches) > 3
    for start, stop in itertools.pairwise(launches):
        between = set(calls[start + 1 : stop])
        assert between <= {"cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"}


def test_nothing_is_left_of_a_session_that_is_gone(tiny_bundle, open_once):
    moved, cudart = on_fake_gpu(open_once(tiny_bundle))
    before = cudart.alive()["memory"]
    session = Session(moved)
    text(session, Request(max_tokens=20, ignore_end=True))
    assert cudart.alive()["memory"] > before
    del session
    gc.collect()
    moved.device.synchronize()  # type: ignore[attr-defined]
    assert cudart.alive()["memory"] == before
    assert cudart.faults == []


def test_two_sessions_on_one_gpu_keep_apart(tiny_bundle, open_once):
    opened = open_once(tiny_bundle)
    moved, cudart = on_fake_gpu(opened)
    requests = [Request(max_tokens=n, ignore_end=True) for n in (25, 33)]
    expected = [text(Session(opened), request) for request in requests]
    sessions = [Session(moved) for _ in requests]
    prompt = opened.text.encode(PROMPT)
    streams = [generate(s, prompt, r) for s, r in zip(sessions, requests, strict=True)]
    found: list[list[int]] = [[], []]
    under_way = {0, 1}
    while under_way:
        for i in list(under_way):
            piece = next(streams[i], None)
            if piece is None:
                under_way.discard(i)
            else:
                found[i] += piece.tokens
    assert found == expected
    assert cudart.faults == []


def test_sessions_in_two_threads_capture_only_their_own_work(tiny_bundle, open_once):
    """Each records its rounds while the other enqueues, on the stream that both share."""
    opened = open_once(tiny_bundle)
    moved, cudart = on_fake_gpu(opened)
    requests = [Request(max_tokens=n, ignore_end=True) for n in (30, 37)]
    requests.append(Request(max_tokens=33, ignore_end=True, sampling=Sampling(0.9, 7)))
    expected = [[text(Session(opened), request)] * 3 for request in requests]
    found: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        session = Session(moved)
        found[i] = [text(session, requests[i]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(requests))] == expected
    assert cudart.faults == []

"""What an opened bundle says of its engines, and how plain steps are run on it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from spec_export.engines.bundle import VerifiedFiles
from spec_export.runtime import Request, Sampling, Session, open_runtime
from spec_export.runtime.stream import plain_role
from tests.decoding import decode, same_bits, trace


def with_exactness(opened, kind: str):
    manifest = opened.manifest
    exactness = replace(manifest.exactness, kind=kind)
    bundle = replace(opened.bundle, manifest=replace(manifest, exactness=exactness))
    return replace(opened, bundle=bundle, exactness=kind)


@pytest.mark.parametrize(
    ("kind", "role"),
    [("width_invariant", "exact_decode"), ("row_invariant", "verify"), ("none", "decode")],
)
def test_plain_steps_are_exact_where_the_engine_can(kind, role, tiny_bundle, open_once):
    opened = with_exactness(open_once(tiny_bundle), kind)
    assert plain_role(opened, Request()) == role
    assert plain_role(opened, Request(fast_plain=True)) == "decode"


def test_plain_steps_at_the_verify_width_have_the_same_bits(tiny_bundle, open_once):
    """How an engine that is only `row_invariant` decodes exactly."""
    opened = open_once(tiny_bundle)
    prompt = opened.text.encode("And it came to pass")
    wide = trace(Session(opened), prompt, 30, 0, "verify")
    two = trace(Session(opened), prompt, 30, 0, "exact_decode")
    assert wide.tokens == two.tokens
    assert same_bits(wide.logits, two.logits)


def test_without_a_verify_pass_plain_steps_take_two_rows(tiny_plain_bundle, open_once):
    session = Session(open_once(tiny_plain_bundle))
    session.begin(Sampling(), "verify")
    session.prefill([5, 6])
    session.first()
    assert session.plain().tokens


def test_another_thread_count_has_not_been_probed(tiny_bundle):
    """The claim is for one machine, library and thread count, and says so."""
    built = open_runtime(tiny_bundle, memory=VerifiedFiles(None))
    assert built.exactness == "width_invariant"
    threads = built.manifest.device.threads + 1
    other = open_runtime(tiny_bundle, memory=VerifiedFiles(None), threads=threads)
    assert other.exactness == "unprobed"
    prompt = built.text.encode("And it came to pass")
    request = {"max_tokens": 20, "ignore_end": True}
    assert decode(other, prompt, **request).tokens == decode(built, prompt, **request).tokens


def test_sessions_in_two_threads_are_two_separate_ones(tiny_bundle, open_once):
    """One set of engines, one session each: nothing of a session is in what they share."""
    opened = open_once(tiny_bundle)
    prompts = [opened.text.encode(text) for text in ("In the beginning", "And the king said")]

    def text(at: int) -> list[int]:
        sampling = Sampling(1.0, at)
        return trace(Session(opened), prompts[at], 100, 4, sampling=sampling).tokens

    expected, found = [text(0), text(1)], [[], []]

    def run(at: int) -> None:
        found[at] = text(at)

    threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected

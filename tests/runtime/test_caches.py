"""What the caches hold after refused drafts, and what lies past them, never shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spec_export.engines.errors import EngineError, NonFiniteError
from spec_export.runtime import Request, Sampling, Session, generate
from spec_export.runtime.drafts import ModelDraft
from tests.decoding import logits_of, same_bits, trace

TEXT = "And it came to pass, when the king heard the words"


def cache_rows(session: Session) -> list[np.ndarray]:
    """The target's committed cache rows, a copy."""
    kept = len(session.history) - 1
    return [session._caches[state.input].host[:, :, :kept].copy() for state in session._spec.states]


def spoil_past_lengths(session: Session, value: float) -> None:
    """Fill what no committed token stands in, in both models."""
    for state in session._spec.states:
        session._caches[state.input].host[:, :, max(0, len(session.history) - 1) :] = value
    draft = session.draft
    if isinstance(draft, ModelDraft):
        for state in draft._spec.states:
            draft._caches[state.input].host[:, :, draft.length :] = value


@pytest.mark.parametrize("draft", ["pair", "random", "self", "ngram"])
def test_after_rejections_the_caches_are_those_of_a_fresh_prefill(draft, build_tiny, open_once):
    """openvino.genai 3675's kind: a state length that is wrong after some rounds."""
    opened = open_once(build_tiny(draft))
    session, fresh = Session(opened), Session(opened)
    rounds = trace(session, opened.text.encode(TEXT), 70, 4).accepted
    assert draft == "self" or any(accepted < drafted for drafted, accepted in rounds)
    history = list(session.history)
    session.plain()
    after_rounds = logits_of(session, "exact_decode")[0].copy()
    session.rewind(len(history))
    fresh.prefill(history)
    assert same_bits(after_rounds, logits_of(fresh, "prefill")[0])
    for ours, theirs in zip(cache_rows(session), cache_rows(fresh), strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("draft", ["pair", "self", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_past_the_lengths_change_nothing(draft, temperature, build_tiny, open_once):
    """Junk a rejection left must be masked away by every pass, the drafting model's too."""
    opened = open_once(build_tiny(draft))
    sampling = Sampling(temperature, 3)
    clean = trace(Session(opened), opened.text.encode(TEXT), 40, 4, sampling=sampling)
    session = Session(opened)
    prepare = session.draft.prepare

    def spoiled(n):
        spoil_past_lengths(session, 1e4)
        return prepare(n)

    session.draft.prepare = spoiled
    spoil_past_lengths(session, 1e4)
    found = trace(session, opened.text.encode(TEXT), 40, 4, sampling=sampling)
    assert found.tokens == clean.tokens
    assert found.accepted == clean.accepted
    assert same_bits(found.logits, clean.logits)


def test_the_spoiled_rows_would_have_shown(build_tiny, open_once):
    """Negative control: one committed row filled the same way does change the text's logits."""
    opened = open_once(build_tiny("pair"))
    session = Session(opened)
    session.prefill(opened.text.encode(TEXT))
    session.first()
    before = session.plain() and logits_of(session, "exact_decode")[0].copy()
    session.rewind(len(session.history) - 1)
    session._caches[session._spec.states[0].input].host[:, :, 3] = 1e4
    session.plain()
    assert not same_bits(before, logits_of(session, "exact_decode")[0])


class FailingOnce:
    """A call that breaks on its first run: NaN in what it writes, or an error after writing it."""

    def __init__(self, session: Session, role: str, *, raises: bool) -> None:
        self.inner, self.session, self.role = session._roles[role].call, session, role
        self.raises, self.left = raises, 1

    def enqueue(self) -> None:
        self.inner.enqueue()
        if self.left:
            self.left -= 1
            self.session._roles[self.role].buffers["logits"].host.fill(np.nan)
            spoil_past_lengths(self.session, np.nan)
            if self.raises:
                raise EngineError("the device went away")


def run_rounds(session: Session, count: int) -> None:
    for _ in range(count):
        session.round(session.gamma)


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("raises", [False, True])
def test_a_pass_that_breaks_is_reported_and_the_text_goes_on(
    draft, temperature, raises, build_tiny, open_once
):
    """NaN is an error and not a token, and the session continues as if the pass had not been."""
    opened = open_once(build_tiny(draft))
    gamma, sampling = opened.manifest.gamma, Sampling(temperature, 7)
    prompt = opened.text.encode(TEXT)
    clean = trace(Session(opened), prompt, 30, gamma, sampling=sampling)
    session = Session(opened)
    role = "verify" if gamma else "exact_decode"
    session.begin(sampling)
    session.prefill(prompt)
    session.first()
    while len(session.history) < len(prompt) + 10:
        session.round(gamma)
    before = list(session.history)
    bound = session._roles[role]
    session._roles[role] = replace(bound, call=FailingOnce(session, role, raises=raises))
    session._rounds._made.clear()
    with pytest.raises(EngineError) as failure:
        run_rounds(session, 20)  # look-up may find nothing at first
    assert isinstance(failure.value, NonFiniteError) != raises
    assert session.history[: len(before)] == before
    while len(session.history) < len(prompt) + 30:
        session.round(gamma)
    assert session.history[len(prompt) :][:30] == clean.tokens[:30]


def test_a_draft_that_fails_is_reported_and_the_text_goes_on(build_tiny, open_once):
    """Midway through a round's drafts; the caches may hold anything past their lengths."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(TEXT)
    clean = trace(Session(opened), prompt, 30, 4)
    session = Session(opened)
    session.prefill(prompt)
    session.first()
    session.round(4)
    before, inner = list(session.history), session.draft._passes[2].call
    failing = FailingOnce(session, "verify", raises=True)
    session.draft._passes[2] = replace(session.draft._passes[2], call=failing)
    session._rounds._made.clear()
    with pytest.raises(EngineError, match="the device went away"):
        session.round(4)
    assert session.history == before
    session.draft._passes[2] = replace(session.draft._passes[2], call=inner)
    session._rounds._made.clear()
    while len(session.history) < len(prompt) + 30:
        session.round(4)
    assert session.history[len(prompt) :][:30] == clean.tokens[:30]


def test_nan_in_a_committed_row_is_reported_until_the_text_is_given_up(build_tiny, open_once):
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(TEXT)
    session = Session(opened)
    expected = trace(Session(opened), prompt, 20, 4)
    session.prefill(prompt)
    session.first()
    session._caches[session._spec.states[2].input].host[:, :, 1] = np.nan
    for _ in range(3):
        with pytest.raises(NonFiniteError, match="NaN or infinity at token"):
            session.round(4)
    assert len(session.history) == len(prompt) + 1
    found = trace(session, prompt, 20, 4)
    assert found.tokens == expected.tokens
    assert same_bits(found.logits, expected.logits)


def test_a_drafting_model_that_breaks_down_costs_speed_only(build_tiny, open_once):
    """NaN in the draft's cache: at temperature 0 its drafts are wrong, and refused."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(TEXT)
    clean = trace(Session(opened), prompt, 30, 4)
    session = Session(opened)
    prepare = session.draft.prepare

    def broken(n):
        for state in session.draft._spec.states:
            session.draft._caches[state.input].host.fill(np.nan)
        return prepare(n)

    session.draft.prepare = broken
    found = trace(session, prompt, 30, 4)
    assert found.tokens[:30] == clean.tokens[:30]
    sampled = trace(session, prompt, 30, 4, sampling=Sampling(1.0, 2))
    assert all(accepted == 0 for _, accepted in sampled.accepted)


def test_an_error_ends_the_stream_and_not_the_session(build_tiny, open_once):
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(TEXT)
    session = Session(opened)
    request = Request(max_tokens=20, ignore_end=True)
    whole = [token for piece in generate(session, prompt, request) for token in piece.tokens]
    bound = session._roles["verify"]
    failing = FailingOnce(session, "verify", raises=False)
    session._roles["verify"] = replace(bound, call=failing)
    session._rounds._made.clear()
    pieces = []
    with pytest.raises(NonFiniteError):
        pieces.extend(generate(session, prompt, request))
    again = [token for piece in generate(session, prompt, request) for token in piece.tokens]
    assert again == whole


def test_caches_of_a_new_session_are_zero_and_as_large_as_stated(build_tiny, open_once):
    """onnxruntime-genai 550: a default context took all memory, unannounced."""
    opened = open_once(build_tiny("pair"))
    session = Session(opened)
    draft = session.draft
    buffers = [session._caches[s.input] for s in session._spec.states]
    buffers += [draft._caches[s.input] for s in draft._spec.states]
    assert sum(buffer.nbytes for buffer in buffers) == opened.session_bytes()
    assert not any(buffer.host.any() for buffer in buffers)

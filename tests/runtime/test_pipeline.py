"""Rounds on a device that works later: recorded, enqueued ahead, and never seen in the texts.

The device is a CPU behind a queue that runs no more than is waited for (`tests.deferred_device`).
Whatever is compared, the other side is an ordinary session on the same engines.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from spec_export.engines.errors import EngineError, NonFiniteError
from spec_export.runtime import Request, Sampling, Session, generate
from spec_export.runtime.pipeline import assert_room
from spec_export.runtime.sampling import Rule
from tests.decoding import decode, with_end_ids
from tests.deferred_device import DeferredDevice, deferred, seen

PROMPT = "And the king said unto him"
SAMPLINGS = {
    "greedy": Sampling(),
    "reject": Sampling(1.0, 3, rule="reject"),
    "block": Sampling(1.0, 3, rule="block"),
    "invariant": Sampling(1.0, 3),
    "filters": Sampling(0.9, 3, rule="reject", top_k=40, top_p=0.9, min_p=0.01),
    "greedy draft": Sampling(1.0, 3, draft="greedy", rule="reject"),
    "listed": Sampling(0.7, 3, banned_tokens=(5, 6)),
    "penalties": Sampling(1.0, 3, frequency_penalty=0.5, no_repeat_ngram=3),
    "alternatives": Sampling(1.0, 3, top_logprobs=3),
}
AHEAD = set(SAMPLINGS) - {"penalties", "alternatives"}  # these have to see the text first


def texts_of(session: Session, prompt: list[int], **request):
    found = decode(session, prompt, max_tokens=30, ignore_end=True, **request)
    return found.tokens, found.logprobs, found.stats.accepted_at


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("draft", ["pair", "self", "ngram", "none"])
def test_the_text_is_the_same(draft, name, build_tiny, open_once):
    """Pipelined, recorded only, neither; whatever part of the queue has run when."""
    opened = open_once(build_tiny(draft))
    prompt = opened.text.encode(PROMPT)
    request = {"sampling": SAMPLINGS[name]}
    expected = texts_of(Session(opened), prompt, **request)
    for seed in (None, 1):
        later = deferred(opened, None if seed is None else np.random.default_rng(seed))
        for pipelined in (True, False):
            session = Session(later, pipelined=pipelined)
            for _ in range(2):
                assert texts_of(session, prompt, **request) == expected, (seed, pipelined)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_next_round_is_enqueued_before_the_last_is_read(name, build_tiny, open_once):
    """One small copy a round; between its start and its wait lies the whole next round."""
    opened = deferred(open_once(build_tiny("self")))
    device, session = opened.device, Session(opened)
    assert isinstance(device, DeferredDevice)
    pieces = generate(
        session,
        opened.text.encode(PROMPT),
        Request(max_tokens=60, ignore_end=True, sampling=SAMPLINGS[name]),
    )
    for piece in itertools.islice(pieces, 4):
        assert piece.tokens
    device.log.clear()
    for _ in range(3):
        next(pieces)
    verbs = [verb for verb in device.log if verb != "upload"]
    if name in AHEAD:
        assert verbs == ["launch", "start", "wait"] * 3
        assert session._pipeline._ahead is not None
        assert device._queue, "the round that runs ahead has not been waited for"
    else:
        assert verbs.count("launch") == verbs.count("start") == verbs.count("wait") == 3
        assert session._pipeline._ahead is None
    assert device.counts["recorded"] == 1


def test_a_round_uploads_its_noise_once(build_tiny, open_once):
    opened = deferred(open_once(build_tiny("pair")))
    session = Session(opened)
    session.begin(Sampling(1.0, 3, rule="reject"))
    session.prefill(opened.text.encode(PROMPT))
    session.first()
    session.round(4, then=4)
    opened.device.log.clear()
    session.round(4, then=4)
    assert Counter(opened.device.log)["upload"] == 1


@pytest.mark.parametrize("draft", ["pair", "self", "none"])
@pytest.mark.parametrize("name", ["greedy", "reject", "invariant"])
def test_every_stop_leaves_the_text_as_it_would_be(draft, name, build_tiny, open_once):
    """Limits at every length, and end tokens at every place: what ran ahead is forgotten.

    The session then goes on from where it stopped as one does that never ran ahead.
    """
    opened = open_once(build_tiny(draft))
    later = deferred(opened)
    prompt, sampling = opened.text.encode(PROMPT), SAMPLINGS[name]
    ours, theirs = Session(later), Session(opened)
    for limit in range(1, 27):
        request = {"max_tokens": limit, "ignore_end": True, "sampling": sampling}
        assert decode(ours, prompt, **request).tokens == decode(theirs, prompt, **request).tokens
        assert ours.history == theirs.history
    whole = decode(theirs, prompt, max_tokens=60, ignore_end=True, sampling=sampling).tokens
    for place in range(26):
        if whole[place] in whole[:place]:
            continue
        session = Session(with_end_ids(later, whole[place]))
        found = decode(session, prompt, max_tokens=60, sampling=sampling)
        assert (found.tokens, found.finish) == (whole[: place + 1], "stop")
        assert session.history == prompt + whole[: place + 1]
        if name != "reject":  # whose noise depends on where rounds began
            gamma = session.gamma
            while len(session.history) < len(prompt) + 30:
                session.round(gamma, then=gamma)
            assert session.history[len(prompt) :][:30] == whole[:30]


def test_the_schedule_may_change_at_any_round(build_tiny, open_once):
    """What was enqueued for another number of drafts is dropped, and its noise used again."""
    opened = open_once(build_tiny("pair"))
    prompt, sampling = opened.text.encode(PROMPT), SAMPLINGS["reject"]
    schedule = np.random.default_rng(5).integers(0, 5, 40).tolist()

    def text(session: Session, *, announced: bool) -> list[int]:
        session.begin(sampling)
        session.prefill(prompt)
        session.first()
        for n, then in itertools.pairwise(schedule):
            guess = then if announced else (n if n else None)
            session.round(n, then=guess)
        return list(session.history)

    plain = text(Session(opened), announced=False)
    assert text(Session(deferred(opened)), announced=True) == plain
    assert text(Session(deferred(opened)), announced=False) == plain


@pytest.mark.parametrize("draft", ["pair", "none"])
def test_the_context_fills_to_its_last_token(draft, build_tiny, open_once):
    """Two rounds are counted against the capacity; nothing is written past it."""
    opened = open_once(build_tiny(draft, gamma=4, max_len=48, chunk=2))
    prompt = opened.text.encode(PROMPT)
    for sampling in (Sampling(), Sampling(1.0, 2)):
        expected = decode(Session(opened), prompt, ignore_end=True, sampling=sampling)
        found = decode(Session(deferred(opened)), prompt, ignore_end=True, sampling=sampling)
        assert found.tokens == expected.tokens
        assert len(prompt) + len(found.tokens) == 48
        assert found.finish == "length"


def test_a_pipeline_leaves_nothing_behind(build_tiny, open_once):
    """A session that goes while a round is under way, and one that takes up another text."""
    opened = deferred(open_once(build_tiny("pair")))
    prompt = opened.text.encode(PROMPT)
    session = Session(opened)
    request = Request(max_tokens=60, ignore_end=True)
    expected = decode(session, prompt, max_tokens=20, ignore_end=True).tokens
    for _ in range(3):
        pieces = generate(session, prompt, request)
        for _ in range(4):
            next(pieces)
        assert session._pipeline._ahead is not None
        del pieces
        assert decode(session, prompt, max_tokens=20, ignore_end=True).tokens == expected
    pieces = generate(session, prompt, request)
    for _ in range(4):
        next(pieces)
    del pieces, session
    assert decode(Session(opened), prompt, max_tokens=20, ignore_end=True).tokens == expected


@pytest.mark.parametrize("verb", ["launch", "start", "wait", "enqueue"])
@pytest.mark.parametrize("after", range(1, 8))
def test_an_error_anywhere_is_reported_once_and_the_text_goes_on(
    verb, after, build_tiny, open_once
):
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(PROMPT)
    whole = texts_of(Session(opened), prompt)[0]
    later = deferred(opened)
    session = Session(later)
    session.prefill(prompt)
    session.first()
    later.device.fail_at, later.device.fail_in = verb, after
    errors = 0
    while len(session.history) < len(prompt) + 30:
        try:
            session.round(4, then=4)
        except EngineError:
            errors += 1
    assert errors == 1
    assert session.history[len(prompt) :][:30] == whole[:30]


def test_a_row_that_breaks_while_a_round_runs_ahead(build_tiny, open_once):
    """The round ahead has read what broke; it is forgotten, and the text before stays."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(PROMPT)
    whole = texts_of(Session(opened), prompt)[0]
    later = deferred(opened)
    session = Session(later)
    session.prefill(prompt)
    session.first()
    for _ in range(2):
        session.round(4, then=4)
    cache = session._caches[session._spec.states[0].input]
    broken = len(session.history)  # a row past the text, which the round ahead is to write

    def spoil() -> None:
        seen(cache)[:, :, broken - 2] = np.nan

    later.device._push("spoil", spoil)
    kept = list(session.history)
    session.round(4, then=4)  # was enqueued before
    with pytest.raises(NonFiniteError):
        rounds_ahead(session, 3)
    assert session.history[: len(kept)] == kept
    session.rewind(len(prompt))
    session.rewind(0)
    assert texts_of(session, prompt)[0] == whole


def rounds_ahead(session: Session, count: int) -> None:
    for _ in range(count):
        session.round(4, then=4)


class Frozen:
    """A recording that writes one report and reads nothing."""

    def __init__(self, device: DeferredDevice) -> None:
        self._device, self._report = device, seen(device.report).copy()

    def enqueue(self) -> None:
        device = self._device
        device._push("launch", lambda: np.copyto(seen(device.report), self._report))


class FrozenDevice(DeferredDevice):
    """Its recordings do once more what they did: nothing that changes reaches them."""

    def record(self, work):
        super().record(work)
        self._run(len(self._queue))
        return Frozen(self)


def test_a_recording_that_reads_nothing_is_refused(build_tiny, open_once):
    """Negative control of the check that every recording goes through."""
    opened = deferred(open_once(build_tiny("pair")))
    opened.device.__class__ = FrozenDevice
    session = Session(opened)
    opened.device.report = session._buffers.report
    session.prefill(opened.text.encode(PROMPT))
    session.first()
    with pytest.raises(EngineError, match="does not do what it was recorded from"):
        session.round(4)


@pytest.mark.parametrize("rule", ["reject", "invariant"])
def test_the_law_holds_on_a_device_that_works_later(rule: Rule, build_tiny, open_once):
    from spec_export.runtime.law import _check_rule, no_progress

    opened = deferred(open_once(build_tiny("pair")))
    assert _check_rule(opened, rule, 600, no_progress).holds


class RefusingDevice(DeferredDevice):
    """Runs everything and records nothing."""

    def record(self, work):
        work()
        raise EngineError("this cannot be captured")


def test_a_round_that_cannot_be_recorded_runs_call_by_call_and_says_so(build_tiny, open_once):
    """A build decodes through such a session: where capture was refused, none could be built."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(PROMPT)
    for name in ("greedy", "reject", "invariant"):
        later = deferred(opened)
        later.device.__class__ = RefusingDevice
        session, request = Session(later), {"sampling": SAMPLINGS[name]}
        assert texts_of(session, prompt, **request) == texts_of(Session(opened), prompt, **request)
        assert all("this cannot be captured" in remark for remark in session.remarks)
        rounds = len(session.remarks)
        assert rounds > 0
        texts_of(session, prompt, **request)
        assert len(session.remarks) == rounds, "it is tried once"


class DeafEngine:
    """Negative control: what comes out never moves, so nothing can be shown of a recording."""

    def enqueue(self) -> None:
        pass


def test_a_recording_that_cannot_be_shown_to_read_anything_is_refused(build_tiny, open_once):
    opened = deferred(open_once(build_tiny("pair")))
    session = Session(opened)
    session.prefill(opened.text.encode(PROMPT))
    session.first()
    for name, bound in list(session._roles.items()):
        session._roles[name] = type(bound)(DeafEngine(), bound.buffers, bound.rows)
    session._rounds._advance = DeafEngine()
    session._rounds.sampling.accept["verify"] = DeafEngine()
    with pytest.raises(EngineError, match="does not do what it was recorded from"):
        session.round(4)


def test_no_pass_gets_past_the_capacity(build_tiny, open_once):
    """Checked in every build of Python: an engine might drop the rows without a word."""
    capacity = open_once(build_tiny("pair")).manifest.capacity
    assert_room(capacity - 4, 5, capacity)
    with pytest.raises(EngineError, match="does not fit the cache"):
        assert_room(capacity - 3, 5, capacity)

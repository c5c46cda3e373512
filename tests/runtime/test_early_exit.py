"""Rounds that draft no further than the draft is sure: nothing of it is seen in the text.

That the law is the target's is shown by enumeration and with the graphs in
`tests/export/test_sampling_early_exit.py`; here sessions run as they are used.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.errors import EngineError, RequestError
from spec_export.engines.ort import OrtBackend
from spec_export.runtime import Grammar, OpenedBundle, Request, Sampling, Session, generate
from spec_export.runtime.adaptive import EarlyExit, GammaCosts
from spec_export.runtime.drafts import ModelDraft
from spec_export.runtime.rounds import Rounds
from tests.decoding import decode, logits_of, with_end_ids
from tests.deferred_device import deferred
from tests.fake_gpu import on_fake_gpu
from tests.runtime import test_sampling as law_of_three

PROMPT = "And the king said unto him"
THRESHOLDS = (0.0, 0.1, 0.3, 0.6, 0.99, 1.0)
SAMPLINGS = {
    "greedy": Sampling(),
    "penalties": Sampling(frequency_penalty=0.5, no_repeat_ngram=3),
    "invariant": Sampling(1.0, 3),
    "filters": Sampling(0.9, 3, top_k=40, top_p=0.9, min_p=0.01),
    "greedy draft": Sampling(1.0, 3, draft="greedy"),
    "reject": Sampling(1.0, 3, rule="reject"),
    "block": Sampling(1.0, 3, rule="block"),
    "one-hot": Sampling(1.0, 3, rule="reject", draft="greedy"),
}
FREE = ("greedy", "penalties", "invariant", "filters", "greedy draft")  # of drafts


@pytest.fixture(scope="module")
def opened(tiny_exported, open_once, tmp_path_factory) -> OpenedBundle:
    """The tiny pair with a verify pass for 1, 2 and 4 drafts."""
    out = tmp_path_factory.mktemp("early") / "bundle"
    options = BuildOptions(gamma=4, narrower=(1, 2), max_len=128, chunk=32)
    bundle: Path = build_bundle(tiny_exported("pair"), out, OrtBackend(), options).path
    return open_once(bundle)


@pytest.fixture
def prompt(opened) -> list[int]:
    return opened.text.encode(PROMPT)


def stop_at(monkeypatch, *lengths: int) -> list[int]:
    """Have rounds of more than one draft stop at these lengths in turn, whatever the draft says.

    Returns the rows that were looked at since, as they are.
    """
    turn, looked = itertools.cycle(lengths), []
    wanted = [next(turn)]

    def confidence(self: ModelDraft, i: int) -> float:
        looked.append(i)
        return 1.0 if i + 1 < wanted[0] else 0.0

    real = Rounds.draft

    def draft(self: Rounds, most: int, least: float) -> int:
        found = real(self, most, least)
        wanted[0] = next(turn)
        return found

    monkeypatch.setattr(ModelDraft, "confidence", confidence)
    monkeypatch.setattr(Rounds, "draft", draft)
    return looked


# --- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FREE)
def test_the_text_does_not_depend_on_the_threshold(name, opened, prompt):
    """Bits of logprobs included; other numbers of drafts, and other passes, are what was taken."""
    request = {"sampling": SAMPLINGS[name], "max_tokens": 90, "ignore_end": True}
    plain = decode(opened, prompt, gamma=0, **request)
    session, drafted = Session(opened), []
    for threshold in THRESHOLDS:
        found = decode(session, prompt, draft_confidence=threshold, **request)
        assert found.tokens == plain.tokens and found.text == plain.text
        assert found.logprobs == plain.logprobs
        drafted.append(found.stats.drafted)
    assert sorted(drafted, reverse=True) == drafted and len(set(drafted)) >= 4


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_round_that_stops_is_one_that_was_asked_for_fewer(
    name, length, opened, prompt, monkeypatch
):
    """At every row: the same drafts, noise and verify pass, so the same text under every rule."""
    wanted, asked = Session(opened), Session(opened)
    for session in (wanted, asked):
        session.begin(SAMPLINGS[name], draft_confidence=0.5 if session is asked else 0.0)
        session.prefill(prompt)
        session.first()
    expected = [(wanted.round(length).tokens.copy(), wanted.result.n_draft) for _ in range(15)]
    looked = stop_at(monkeypatch, length)
    for tokens, n_draft in expected:
        result = asked.round(4)
        assert (result.tokens, result.n_draft) == (tokens, n_draft)
        assert result.is_early == (length < 4)
    assert looked == [*range(min(length, 3))] * 15
    assert asked.history == wanted.history


@pytest.mark.parametrize("name", ["reject", "block", "invariant"])
def test_lengths_that_change_from_round_to_round(name, opened, prompt, monkeypatch):
    """And rounds without drafts between them."""
    schedule = [3, 1, 4, 2, 1, 1, 3, 4, 2, 3]
    texts = []
    for threshold in (0.0, 0.5):
        session = Session(opened)
        session.begin(SAMPLINGS[name], draft_confidence=threshold)
        session.prefill(prompt)
        session.first()
        if threshold:
            stop_at(monkeypatch, *schedule)
        for turn, length in enumerate(schedule * 2):
            session.round(4 if threshold else length)
            if turn % 3 == 0:
                session.plain()
        texts.append(list(session.history))
    assert texts[0] == texts[1]


def test_the_narrowest_pass_that_holds_the_drafts_is_taken(opened, prompt, monkeypatch):
    session = Session(opened)
    session.begin(Sampling(), draft_confidence=0.5)
    session.prefill(prompt)
    session.first()
    for length, role in ((1, "verify_1"), (2, "verify_2"), (3, "verify"), (4, "verify")):
        with monkeypatch.context() as patch:
            stop_at(patch, length)
            for name in ("verify_1", "verify_2", "verify"):
                logits_of(session, name)[:] = np.nan
            session.round(4)
            ran = [n for n in ("verify_1", "verify_2", "verify") if has_run(session, n)]
            assert ran == [role]


def has_run(session: Session, role: str) -> bool:
    return bool(np.isfinite(logits_of(session, role)[0]).all())


def test_what_is_looked_at_is_the_row_before_its_token_is_drawn(opened, prompt, monkeypatch):
    """The largest probability of the draft's raw row; never of a row that none may follow."""
    session, seen = Session(opened), []
    real = ModelDraft.confidence

    def confidence(self: ModelDraft, i: int) -> float:
        drafts = self_drafts(session)
        drafts[i:] = -7  # what is drawn into this row has not been
        seen.append((i, real(self, i), self.logits[i].host.copy()))
        return seen[-1][1]

    monkeypatch.setattr(ModelDraft, "confidence", confidence)
    session.begin(Sampling(0.7, 3), draft_confidence=0.2)
    session.prefill(prompt)
    session.first()
    for _ in range(20):
        assert min(session.round(4).tokens) >= 0
    assert {i for i, _, _ in seen} == {0, 1, 2}
    for _, share, logits in seen:
        weights = np.exp(logits.astype(np.float64) - logits.max())
        assert share == pytest.approx(weights.max() / weights.sum(), rel=1e-4)


def self_drafts(session: Session) -> np.ndarray:
    host = session._buffers.drafts.host
    assert host is not None
    return host


def test_a_grammar_goes_with_it(opened):
    """Masks follow the drafts that were made and no others."""
    prompt = opened.text.encode("And the king of")
    for name in ("greedy", "invariant"):
        request = {"sampling": SAMPLINGS[name], "max_tokens": 60}
        texts, early = [], 0
        for threshold in (0.0, 0.05, 0.3, 0.99):
            grammar = Grammar("regex", "([A-Za-z]+ ){2,6}[a-z]+\\.")
            found = decode(opened, prompt, grammar=grammar, draft_confidence=threshold, **request)
            texts.append(found.tokens)
            early += found.stats.early
        assert all(text == texts[0] for text in texts)
        assert early >= 8


def test_rounds_under_a_grammar_that_stop_are_ones_that_were_asked_for_fewer(opened, monkeypatch):
    """Under `reject` too, where masks that are wrong by a row would show in q."""
    prompt, texts = opened.text.encode("And the king of"), []
    for threshold in (0.0, 0.5):
        session = Session(opened)
        grammar = opened.grammar_tokenizer.state(Grammar("regex", "[A-Za-z ]{60,90}"))
        session.begin(SAMPLINGS["reject"], constraint=grammar, draft_confidence=threshold)
        session.prefill(prompt)
        session.first()
        if threshold:
            stop_at(monkeypatch, 2)
        for _ in range(8):
            session.round(4 if threshold else 2)
        texts.append(list(session.history))
    assert texts[0] == texts[1]


# --- the law ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["reject", "block", "invariant"])
def test_the_law_of_the_next_tokens_is_the_targets(rule, opened, open_once, build_tiny):
    """Up to three consecutive rounds of the pair itself, a third of them cut short and more."""
    prompt = opened.text.encode(law_of_three.PROMPT)
    law = law_of_three.exact_law(open_once(build_tiny("pair")), prompt)
    found, lengths = drawn(Session(opened), prompt, rule)
    result = law.fit(found)
    assert result.ok, result
    assert lengths[True] > 300 and lengths[False] > 100, "early and not"


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_going_by_the_token_that_was_drawn_is_told_apart(
    rule, opened, open_once, build_tiny, monkeypatch
):
    """Negative control: a draft is dropped where the draft gave it little."""

    def draft(self: Rounds, most: int, least: float) -> int:
        source, device = self._draft, opened.device
        ids = np.zeros(opened.manifest.gamma, np.int64)
        for i in range(most):
            run, draw = source.step(i, self.sampling)
            run.enqueue()
            draw.enqueue()
            device.download(buffers.drafts, ids)
            logits = source.logits[i].host[0, 0].astype(np.float64)
            weights = np.exp(logits - logits.max())
            if i and weights[ids[i]] / weights.sum() < least:
                return i
        return most

    monkeypatch.setattr(Rounds, "draft", draft)
    session = Session(opened)
    buffers = session._buffers
    prompt = opened.text.encode(law_of_three.PROMPT)
    law = law_of_three.exact_law(open_once(build_tiny("pair")), prompt)
    result = law.fit(drawn(session, prompt, rule, 0.5)[0])
    assert not result.ok, result


def drawn(
    session: Session, prompt: list[int], rule, least: float = 0.15, texts: int = 1500
) -> tuple[Counter, Counter]:
    """The next three tokens under seeds 0, 1, ..., and how often drafting stopped early."""
    session.begin(Sampling(1.0, rule=rule), draft_confidence=least)
    session.prefill(prompt)
    found: Counter = Counter()
    lengths: Counter = Counter()
    for seed in range(texts):
        session.rewind(len(prompt))
        session._rounds.sampling.begin(Sampling(1.0, seed, rule=rule))
        while len(session.history) < len(prompt) + 3:
            result = session.round(3)
            lengths[result.is_early] += 1
        found[tuple(session.history[len(prompt) : len(prompt) + 3])] += 1
    return found, lengths


# --- ends and counts ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["greedy", "invariant"])
def test_every_stop_leaves_the_text_as_it_would_be(name, opened, prompt):
    """Limits at every length, and end tokens at every place, inside short rounds too."""
    sampling, ours, theirs = SAMPLINGS[name], Session(opened), Session(opened)
    for limit in range(1, 20):
        request = {"max_tokens": limit, "ignore_end": True, "sampling": sampling}
        found = decode(ours, prompt, draft_confidence=0.15, **request)
        assert found.tokens == decode(theirs, prompt, **request).tokens
        assert ours.history == theirs.history
    whole = decode(theirs, prompt, max_tokens=60, ignore_end=True, sampling=sampling).tokens
    for place in range(20):
        if whole[place] in whole[:place]:
            continue
        session = Session(with_end_ids(opened, whole[place]))
        request = {"max_tokens": 60, "sampling": sampling, "draft_confidence": 0.15}
        found = decode(session, prompt, **request)
        assert (found.tokens, found.finish) == (whole[: place + 1], "stop")
        assert session.history == prompt + whole[: place + 1]


def test_the_context_fills_to_its_last_token(build_tiny, open_once):
    opened = open_once(build_tiny("pair", gamma=4, max_len=48, chunk=2))
    prompt = opened.text.encode(PROMPT)
    for name in ("greedy", "invariant"):
        sampling = SAMPLINGS[name]
        expected = decode(opened, prompt, ignore_end=True, sampling=sampling)
        for threshold in (0.15, 0.99):
            found = decode(
                opened, prompt, ignore_end=True, sampling=sampling, draft_confidence=threshold
            )
            assert found.tokens == expected.tokens
            assert len(prompt) + len(found.tokens) == 48 and found.finish == "length"


def test_a_text_that_outgrows_the_draft(build_tiny, open_once):
    """Its positions end at 40: rounds have fewer drafts there, and that is not an early stop."""
    opened = open_once(build_tiny("short"))
    prompt = opened.text.encode(PROMPT)
    expected = decode(opened, prompt, max_tokens=60, ignore_end=True)
    found = decode(opened, prompt, max_tokens=60, ignore_end=True, draft_confidence=1e-9)
    assert found.tokens == expected.tokens
    assert found.stats.early == 0 and found.stats.drafted_at == expected.stats.drafted_at


def test_an_early_stop_is_no_rejection(opened, prompt, monkeypatch):
    """Rounds of two drafts out of four: refused is what the target refused."""
    stop_at(monkeypatch, 2)
    found = decode(
        opened, prompt, max_tokens=60, ignore_end=True, draft_confidence=0.5, sampling=Sampling()
    )
    stats = found.stats
    assert stats.draft_confidence == 0.5
    assert stats.early == stats.rounds - 1 > 20, "the last of them had room for one draft"
    assert stats.drafted_at == [stats.rounds, stats.early, 0, 0]
    assert stats.drafted == sum(stats.drafted_at)
    whole = sum(piece.n_accepted == 2 for piece in found.pieces)
    assert whole > 5, "two of two accepted are no rejection, of an early round or another"
    assert stats.early - whole <= stats.rejections <= stats.rounds - whole
    assert stats.accepted == sum(piece.n_accepted for piece in found.pieces)


def test_a_draft_that_is_its_target_is_never_refused(build_tiny, open_once):
    opened = open_once(build_tiny("self"))
    prompt = opened.text.encode(PROMPT)
    stats = decode(opened, prompt, max_tokens=60, ignore_end=True, draft_confidence=0.5).stats
    assert stats.alpha == 1.0 and stats.rejections == 0
    assert 0 < stats.early < stats.rounds


# --- where it cannot be -------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_without_a_drafting_model_it_is_refused(draft, build_tiny, open_once):
    opened = open_once(build_tiny(draft))
    with pytest.raises(RequestError, match="no model drafts in this session"):
        decode(opened, [5, 6, 7], draft_confidence=0.5)
    assert decode(opened, [5, 6, 7], draft_confidence=0.0, max_tokens=3).tokens


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "0.5"])
def test_what_is_no_probability_is_refused(value):
    with pytest.raises(RequestError, match="draft_confidence"):
        Request(draft_confidence=value)


def test_on_a_device_that_works_later_rounds_run_call_by_call(opened, prompt):
    """Asked for, it comes before the pipeline; the report says so, and the text is the same."""
    request = {"max_tokens": 40, "ignore_end": True}
    for name in ("greedy", "reject"):
        sampling = SAMPLINGS[name]
        expected = decode(opened, prompt, draft_confidence=0.3, sampling=sampling, **request)
        for seed in (None, 1):
            later = deferred(opened, None if seed is None else np.random.default_rng(seed))
            session = Session(later)
            found = decode(session, prompt, draft_confidence=0.3, sampling=sampling, **request)
            assert found.tokens == expected.tokens
            assert found.stats.early == expected.stats.early > 5
            assert any("rounds are not pipelined" in remark for remark in session.remarks)
            again = decode(session, prompt, sampling=sampling, **request)
            assert again.tokens == decode(opened, prompt, sampling=sampling, **request).tokens
            assert later.device.counts["recorded"] > 0 and len(session.remarks) == 1


def test_on_the_gpu_device(opened, prompt):
    """Over the fake CUDA runtime: copies to the host between the calls of a round."""
    moved, cudart = on_fake_gpu(opened)
    session = Session(moved)
    for name in ("greedy", "reject"):
        request = {"max_tokens": 40, "ignore_end": True, "sampling": SAMPLINGS[name]}
        expected = decode(opened, prompt, draft_confidence=0.15, **request)
        found = decode(session, prompt, draft_confidence=0.15, **request)
        assert (found.tokens, found.stats.early) == (expected.tokens, expected.stats.early)
    assert cudart.faults == []


def test_together_with_a_pipeline_that_was_asked_for_it_is_refused(opened, prompt):
    with pytest.raises(RequestError, match="leave out one of the two"):
        decode(Session(deferred(opened), pipelined=True), prompt, draft_confidence=0.3)
    session = Session(deferred(opened), pipelined=False)
    assert decode(session, prompt, draft_confidence=0.3, max_tokens=9).stats.early
    assert not session.remarks


COSTS = GammaCosts(1.0, (1.1, 1.2, 1.3, 1.4), 0.7, EarlyExit(0.3, 0.5, 0.5))


def test_what_pays_by_the_profile_is_taken_where_rounds_are_not_pipelined(opened, prompt):
    request = {"max_tokens": 40, "ignore_end": True, "auto": COSTS}
    plain = decode(opened, prompt, max_tokens=40, ignore_end=True, gamma=0)
    found = decode(opened, prompt, **request)
    assert found.tokens == plain.tokens
    assert found.stats.draft_confidence == 0.3 and found.stats.early > 5
    off = decode(opened, prompt, draft_confidence=0.0, **request)
    assert off.tokens == plain.tokens
    assert (off.stats.draft_confidence, off.stats.early) == (0.0, 0)
    session = Session(deferred(opened))
    later = decode(session, prompt, **request)
    assert later.tokens == plain.tokens and later.stats.early == 0
    assert [r for r in session.remarks if "draft_confidence of 0.30 is not used" in r]


@pytest.mark.parametrize("verb", ["enqueue", "download", "start", "wait"])
@pytest.mark.parametrize("after", range(1, 8))
def test_an_error_anywhere_is_reported_once_and_the_text_goes_on(verb, after, opened, prompt):
    whole = decode(opened, prompt, max_tokens=30, ignore_end=True).tokens
    later = deferred(opened)
    session = Session(later)
    session.begin(Sampling(), draft_confidence=0.15)
    session.prefill(prompt)
    session.first()
    later.device.fail_at, later.device.fail_in = verb, after
    errors = 0
    while len(session.history) < len(prompt) + 30:
        try:
            session.round(4)
        except EngineError:
            errors += 1
    assert errors == 1
    assert session.history[len(prompt) :][:30] == whole[:30]


def test_a_stream_that_is_abandoned_leaves_a_valid_session(opened, prompt):
    session, request = Session(opened), Request(draft_confidence=0.15, ignore_end=True)
    expected = decode(opened, prompt, max_tokens=20, ignore_end=True).tokens
    for _ in range(3):
        pieces = generate(session, prompt, request)
        for _ in range(4):
            next(pieces)
        del pieces
        assert decode(session, prompt, max_tokens=20, ignore_end=True).tokens == expected

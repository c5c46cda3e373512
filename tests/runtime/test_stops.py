"""A text ends exactly where plain decoding would end it, for every gamma and every way to end.

With the target as its own draft every draft is accepted, so a round of gamma drafts emits
gamma + 1 tokens and a stop can be put at any offset of a block: the first draft, one in the middle,
the last, or the bonus.
"""

from __future__ import annotations

import itertools

import pytest

from spec_export.engines.errors import RequestError
from spec_export.runtime import OpenedBundle, Request, Sampling, Session, Stats, generate
from tests.decoding import Decoded, decode, with_end_ids

PROMPTS = (
    "And the king said unto him",
    "In the beginning",
    "Then Moses",
    "the house of the",
    "Now these are the names",
)
GAMMA = 5


@pytest.fixture(scope="module")
def opened(build_tiny, open_once) -> OpenedBundle:
    return open_once(build_tiny("self", gamma=GAMMA))


@pytest.fixture(scope="module")
def texts(opened) -> list[tuple[list[int], list[int]]]:
    """Prompts and 40 tokens of plain decoding after each."""
    session = Session(opened)
    found = []
    for prompt in PROMPTS:
        ids = opened.text.encode(prompt)
        found.append((ids, decode(session, ids, gamma=0, max_tokens=40, ignore_end=True).tokens))
    return found


def block_offset(position: int, gamma: int = GAMMA) -> int:
    """Which token of its round a token is when all drafts are accepted; token 0 is no round's."""
    return (position - 1) % (gamma + 1)


def assert_clipped(found: Decoded, gamma: int) -> None:
    """Nothing past the end was counted (vllm 56101, sglang 39826)."""
    stats, tokens = found.stats, found.tokens
    assert stats.emitted == len(tokens) == len(found.logprobs)
    assert stats.accepted == sum(piece.n_accepted for piece in found.pieces)
    assert stats.accepted == sum(stats.accepted_at)
    assert stats.drafted == sum(stats.drafted_at)
    assert stats.accepted <= stats.drafted
    assert stats.rounds + stats.plain_steps == len(found.pieces) - 1
    assert stats.gamma == gamma and len(stats.accepted_at) == gamma


# --- end tokens ----------------------------------------------------------------------------------


def test_an_end_token_stops_at_every_offset_of_a_block(opened, texts):
    """transformers 47912, 31301: an end token accepted inside a block was run over."""
    offsets = set()
    for prompt, tokens in texts:
        for position, token in enumerate(tokens):
            if token in tokens[:position]:
                continue
            found = decode(with_end_ids(opened, token), prompt, max_tokens=40)
            assert found.tokens == tokens[: position + 1]
            assert found.finish == "stop"
            assert_clipped(found, GAMMA)
            assert found.stats.rejections == 0
            assert found.stats.accepted_per_position == all_accepted(found.stats)
            if position:
                offsets.add(block_offset(position))
    assert offsets == set(range(GAMMA + 1))


def all_accepted(stats: Stats) -> list[float | None]:
    """The share is 1 wherever there was a draft: those a stop cut off count as no draft."""
    return [1.0 if drafted else None for drafted in stats.drafted_at]


def test_the_session_stands_at_the_stop(opened, texts):
    """Every length moves back to it: continuing gives what a longer text would have had."""
    for prompt, tokens in texts:
        session = Session(with_end_ids(opened, tokens[3]))
        found = decode(session, prompt, max_tokens=40)
        at = tokens.index(tokens[3]) + 1
        assert session.history == prompt + tokens[:at] == prompt + found.tokens
        assert session._host is not None
        while len(session.history) < len(prompt) + 30:
            session.round(3)
        assert session.history[len(prompt) :][:30] == tokens[:30]


def test_ignoring_the_end_goes_on(opened, texts):
    prompt, tokens = texts[0]
    ending = with_end_ids(opened, tokens[2])
    assert decode(ending, prompt, max_tokens=40, ignore_end=True).tokens == tokens


def test_the_limit_does_not_hide_a_stop(opened, texts):
    """sglang 31599: a limit inside the same block as the stop, before and after it."""
    for prompt, tokens in texts:
        stop = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
        ending = with_end_ids(opened, tokens[stop])
        for limit in range(1, 15):
            found = decode(ending, prompt, max_tokens=limit)
            kept = min(limit, stop + 1)
            assert found.tokens == tokens[:kept]
            assert found.finish == ("stop" if limit > stop else "length")
            assert_clipped(found, GAMMA)


def test_sampled_text_is_cut_at_the_stop_and_is_otherwise_the_same(build_tiny, open_once):
    """At temperature 1: a stop only shortens the text that the seed gives without it."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(PROMPTS[0])
    for seed in range(4):
        sampling = Sampling(1.0, seed)
        whole = decode(opened, prompt, max_tokens=30, ignore_end=True, sampling=sampling).tokens
        for position, token in enumerate(whole):
            if token in whole[:position]:
                continue
            # Near the limit a round is shorter, which changes its randomness: stay clear of it.
            found = decode(with_end_ids(opened, token), prompt, max_tokens=60, sampling=sampling)
            if position < 20:
                assert found.tokens == whole[: position + 1]
                assert found.finish == "stop"
                assert_clipped(found, 4)


# --- stop strings --------------------------------------------------------------------------------


def test_a_stop_string_of_two_tokens_stops_at_every_offset_of_a_block(opened, texts):
    """onnxruntime-genai 2528: a stop string inside the speculated suffix.

    Offset gamma - 1 is the case of its two tokens being the last accepted draft and the bonus.
    """
    offsets = set()
    session = Session(opened)
    for prompt, tokens in texts:
        pieces = [opened.text.decode([token]) for token in tokens]
        text = opened.text.decode(tokens)
        for position in range(1, 24):
            stop = (pieces[position] + pieces[position + 1]).strip()
            if len(stop) < 2 or "\ufffd" in stop:
                continue
            found = decode(session, prompt, max_tokens=40, stop=(stop,))
            plain = decode(session, prompt, max_tokens=40, stop=(stop,), gamma=0)
            assert found.text == plain.text == text[: text.index(stop)]
            assert found.tokens == plain.tokens
            assert found.finish == plain.finish == "stop"
            assert found.stats.emitted == plain.stats.emitted
            assert_clipped(found, GAMMA)
            assert session.history == prompt + found.tokens
            offsets.add(block_offset(len(found.tokens) - 2))
    assert offsets == set(range(GAMMA + 1))


def test_a_stop_string_that_never_comes_loses_no_text(opened, texts):
    """What might have begun a stop string is held back and comes at the end."""
    prompt, tokens = texts[0]
    text = opened.text.decode(tokens)
    for length in range(1, 6):
        found = decode(opened, prompt, max_tokens=40, stop=(text[-length:] + "never",))
        assert found.text == text
        assert found.finish == "length"


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["pair", "self", "ngram"])
def test_the_token_limit_is_kept_for_every_gamma(draft, build_tiny, open_once):
    """ferrox 311, LiteRT-LM 2816: 6 were asked for and 9 came."""
    opened = open_once(build_tiny(draft, gamma=8))
    session = Session(opened)
    prompt = opened.text.encode(PROMPTS[0])
    whole = decode(session, prompt, max_tokens=12, gamma=0, ignore_end=True).tokens
    for limit, gamma in itertools.product(range(1, 13), range(1, 9)):
        found = decode(session, prompt, max_tokens=limit, gamma=gamma, ignore_end=True)
        assert found.tokens == whole[:limit]
        assert found.finish == "length"
        assert_clipped(found, gamma)


@pytest.mark.parametrize("draft", ["pair", "self", "random", "ngram", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_context_fills_to_its_last_token(draft, temperature, build_tiny, open_once):
    """TensorRT-LLM 16826: the default limit is context - prompt, whatever gamma is."""
    opened = open_once(build_tiny(draft, max_len=48, chunk=16))
    session, gamma = Session(opened), opened.manifest.gamma
    sampling = Sampling(temperature, 1)
    long = (opened.text.encode(PROMPTS[0]) * 9)[:48]
    for length in (1, 2, 15, 16, 17, 40, 43, 44, 45, 46, 47, 48):
        prompt = long[:length]
        found = decode(session, prompt, ignore_end=True, sampling=sampling)
        assert len(found.tokens) == 48 - length
        assert found.finish == "length"
        assert_clipped(found, gamma)
        if temperature == 0:
            plain = decode(session, prompt, ignore_end=True, gamma=0)
            assert found.tokens == plain.tokens
    assert [piece.tokens for piece in found.pieces] == [()]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 129, "129 tokens, but the bundle was built for a context of 128"),
        ([], "no tokens"),
        ([5, 1031], "outside 0 to 1030"),
        ([-1], "outside 0 to 1030"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(prompt, message, tiny_bundle, open_once):
    """TensorRT-LLM 16826 again: a token more than the context is an error with both numbers."""
    session = Session(open_once(tiny_bundle))
    with pytest.raises(RequestError, match=message):
        decode(session, prompt)
    assert decode(session, [5], max_tokens=2, ignore_end=True).tokens


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(max_tokens=0), "max_tokens=0"),
        (Request(gamma=5), "gamma=5 but the bundle was built for gamma=4.*--gamma 5"),
        (Request(gamma=-1), "gamma=-1"),
        (Request(stop=("a", "")), "stop string is empty"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(request_, message, tiny_bundle, open_once):
    with pytest.raises(RequestError, match=message):
        list(generate(Session(open_once(tiny_bundle)), [5], request_))


def test_a_bundle_without_a_draft_takes_gamma_0_only(tiny_plain_bundle, open_once):
    opened = open_once(tiny_plain_bundle)
    assert decode(opened, [5], max_tokens=3, gamma=0, ignore_end=True).stats.plain_steps == 2
    with pytest.raises(RequestError, match="without a draft; use 0"):
        decode(opened, [5], gamma=1)


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf"), 10001])
def test_a_temperature_out_of_range_is_refused(temperature):
    with pytest.raises(RequestError, match="temperature"):
        Sampling(temperature)


def test_an_empty_text_starts_from_the_first_token_of_texts(tiny_bundle, open_once):
    opened = open_once(tiny_bundle)
    bos = opened.manifest.text.bos_id
    assert opened.text.encode("") == [bos]
    assert decode(opened, [bos], max_tokens=5, ignore_end=True).stats.emitted == 5


# --- what a drafting model cannot reach ----------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_beyond_the_positions_of_the_draft_decoding_is_plain(temperature, build_tiny, open_once):
    """vllm 57941, 5342: a draft with a shorter context was run out of its range."""
    opened = open_once(build_tiny("short"))
    limit = opened.manifest.models["draft"].max_position
    for length in (3, limit - 2, limit - 1, limit, limit + 1, 70):
        session = Session(opened)
        prompt = (opened.text.encode(PROMPTS[0]) * 30)[:length]
        reached = highest_draft_position(session)
        found = decode(session, prompt, ignore_end=True, sampling=Sampling(temperature, 2))
        assert len(found.tokens) == 128 - length
        assert max(reached, default=0) < limit
        assert (found.stats.rounds > 0) == (length + 1 < limit + 1)
        if temperature == 0:
            assert found.tokens == decode(session, prompt, ignore_end=True, gamma=0).tokens


def highest_draft_position(session: Session) -> list[int]:
    """Positions the drafting model's passes of rounds are run at, filled as they run."""
    reached: list[int] = []

    class Watched:
        def __init__(self, bound) -> None:
            self.call, self.buffers, self.rows = self, bound.buffers, bound.rows
            self.inner = bound.call

        def enqueue(self) -> None:
            reached.append(int(self.buffers["kv_len"].host[0]) + self.rows - 1)
            self.inner.enqueue()

    session.draft._passes = [Watched(bound) for bound in session.draft._passes]
    return reached

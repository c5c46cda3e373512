"""Text as a stream: the pieces are the whole, and no character is ever shown in halves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from spec_export.engines.errors import RequestError
from spec_export.runtime import Request, Sampling, Session, generate
from spec_export.runtime.session import RoundResult
from spec_export.runtime.stream import _TextEnd
from spec_export.runtime.text import StopStrings, TextStream
from tests.decoding import decode, trace
from tests.tiny_models import TINY

TOKENIZER = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
EMOJI = "I \U0001f469‍\U0001f469‍\U0001f467 saw \U0001f1eb\U0001f1f7 naïve 世界 \U0001f44d\U0001f3fd!"


def llama_like() -> Tokenizer:
    """Words carry their space in front, bytes have tokens of their own, the first space is cut."""
    words = ["<s>", "▁", "▁the", "▁a", "s", "the", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


LLAMA_LIKE = llama_like()


def whole(ids: list[int], tokenizer: Tokenizer = TOKENIZER) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def streamed(ids: list[int], tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in ids), stream.finish()]


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
def test_pieces_of_any_ids_are_the_whole(ids):
    """vllm 30204, 42781: the last tokens went missing; broken bytes included."""
    assert "".join(streamed(ids)) == whole(ids)


@settings(deadline=None)
@given(st.lists(st.integers(1, 6).map(lambda word: [word]) | st.just([7 + 0xC3, 7 + 0xA9])))
def test_pieces_are_the_whole_where_spaces_belong_to_words(parts):
    """A decoder that cuts the first space of what it is given must not cut those of later words.

    Whole characters only: this decoder takes back the good bytes in front of a broken one.
    """
    ids = [token for part in parts for token in part]
    assert "".join(streamed(ids, LLAMA_LIKE)) == whole(ids, LLAMA_LIKE)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_pieces_of_any_text_are_whole_characters(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = streamed(ids)
    assert "".join(pieces) == whole(ids)
    assert "�" in text or "�" not in "".join(pieces)


def test_a_character_split_over_tokens_waits_for_its_last_byte():
    ids = TOKENIZER.encode(EMOJI, add_special_tokens=False).ids
    assert len(ids) > len(EMOJI), "no character of the text is split"
    pieces = streamed(ids)
    assert "".join(pieces) == whole(ids) == EMOJI
    assert pieces.count("") > 10
    assert all("�" not in piece for piece in pieces)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 9])
def test_a_character_split_over_rounds_is_shown_once_it_is_whole(block, tiny_bundle, open_once):
    """Whatever blocks accepted tokens come in, the pieces and the end are the same."""
    ids = TOKENIZER.encode(EMOJI, add_special_tokens=False).ids
    end = _TextEnd(Session(open_once(tiny_bundle)), Request())
    shown = ""
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        kept, text, finish = end.take(RoundResult(part, [0.0] * len(part), 0, 0), len(ids) - start)
        assert kept == len(part)
        assert "�" not in text
        shown += text
    assert finish == "length"
    assert shown == EMOJI


def test_a_text_that_ends_inside_a_character_shows_what_there_is(tiny_bundle, open_once):
    ids = TOKENIZER.encode("a\U0001f44d", add_special_tokens=False).ids[:-1]
    end = _TextEnd(Session(open_once(tiny_bundle)), Request())
    result = RoundResult(ids, [0.0] * len(ids), 0, 0)
    assert end.take(result, len(ids)) == (len(ids), whole(ids), "length")


# --- stop strings --------------------------------------------------------------------------------


def cut_naively(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    """Append piece by piece to the whole text and look for a stop string after each."""
    text = ""
    for piece in pieces:
        text += piece
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], True
    return text, False


@settings(deadline=None)
@given(
    st.lists(st.text("ab ", max_size=4), max_size=12),
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_stop_strings_are_found_as_in_the_whole_text(pieces, stops):
    """And nothing that is shown ever has to be taken back."""
    finder, shown, stopped = StopStrings(stops), "", False
    for piece in pieces:
        text, stopped = finder.add(piece)
        shown += text
        if stopped:
            break
    else:
        shown += finder.finish()
    assert (shown, stopped) == cut_naively(pieces, stops)


# --- the stream of a session ---------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pieces_of_a_generation_are_its_text(draft, temperature, build_tiny, open_once):
    opened = open_once(build_tiny(draft))
    for seed in range(5):
        sampling = Sampling(temperature, seed)
        found = decode(opened, [5 + seed], max_tokens=60, ignore_end=True, sampling=sampling)
        assert found.text == opened.text.decode(found.tokens)
        assert [piece.finish for piece in found.pieces[:-1]] == [None] * (len(found.pieces) - 1)


def test_an_abandoned_stream_leaves_a_usable_session(tiny_bundle, open_once):
    opened = open_once(tiny_bundle)
    prompt = opened.text.encode("And it came to pass")
    expected = decode(opened, prompt, max_tokens=40, ignore_end=True)
    session = Session(opened)
    for after in (1, 2, 5):
        stream = generate(session, prompt[:3], Request(ignore_end=True))
        for _ in range(after):
            next(stream)
        if after == 2:
            stream.close()
        found = decode(session, prompt, max_tokens=40, ignore_end=True)
        assert found.tokens == expected.tokens
        assert found.text == expected.text


def test_a_session_serves_one_prompt_after_another(build_tiny, open_once):
    """openvino.genai 3675: the state length was wrong on the second prompt."""
    for draft in ("pair", "ngram", "self"):
        opened = open_once(build_tiny(draft))
        session = Session(opened)
        prompts = ["In the beginning God", "x", "And the king said unto his servants, Go"]
        for prompt in [*prompts, *reversed(prompts)]:
            ids = opened.text.encode(prompt)
            again = trace(session, ids, 40, 4)
            fresh = trace(Session(opened), ids, 40, 4)
            assert again.tokens == fresh.tokens
            assert again.logits.tobytes() == fresh.logits.tobytes()
            assert again.accepted == fresh.accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interleaved_sessions_are_two_separate_ones(temperature, build_tiny, open_once):
    for draft in ("pair", "ngram"):
        opened = open_once(build_tiny(draft))
        requests = [
            Request(max_tokens=50, ignore_end=True, sampling=Sampling(temperature, 1), gamma=gamma)
            for gamma in (4, 3)
        ]
        prompts = [opened.text.encode(text) for text in ("In the beginning", "And the king")]
        apart = [
            [p.tokens for p in generate(Session(opened), prompt, request)]
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        streams = [
            generate(Session(opened), prompt, request)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        together: list[list[tuple[int, ...]]] = [[], []]
        while any(streams):
            for at, stream in enumerate(streams):
                piece = next(stream, None) if stream is not None else None
                if piece is None:
                    streams[at] = None
                else:
                    together[at].append(piece.tokens)
        assert together == apart


def test_statistics_always_say_how_the_text_was_made(build_tiny, open_once):
    """llama.cpp 25345, transformers 40739: speculation or gamma silently off."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode("And it came to pass")
    assert opened.manifest.method == "model"
    for gamma, effective in ((None, 4), (4, 4), (3, 3), (1, 1), (0, 0)):
        stats = decode(opened, prompt, max_tokens=40, gamma=gamma, ignore_end=True).stats
        assert stats.gamma == effective
        assert stats.prompt_tokens == len(prompt)
        assert (stats.rounds > 0, stats.drafted > 0) == (effective > 0, effective > 0)
        assert stats.drafted <= effective * stats.rounds
        assert len(stats.accepted_per_position) == effective
        if effective:
            assert stats.alpha is not None and 0 < stats.alpha < 1
            assert stats.tokens_per_round is not None and stats.tokens_per_round > 1
        else:
            assert stats.alpha is None and stats.plain_steps == 39
        assert stats.tokens_per_s is not None and stats.tokens_per_s > 0
        assert stats.ttft_ms > 0


def test_a_second_text_on_a_session_ends_the_first_with_an_error(tiny_bundle, open_once):
    """Two iterators at once gave two wrong texts, without a word."""
    opened = open_once(tiny_bundle)
    session, request = Session(opened), Request(max_tokens=20, ignore_end=True)
    expected = [piece.tokens for piece in generate(Session(opened), [7, 8, 9], request)]
    first = generate(session, [5, 6], request)
    next(first)
    second = generate(session, [7, 8, 9], request)
    found = [next(second).tokens]
    with pytest.raises(RequestError, match="another text was begun"):
        next(first)
    assert found + [piece.tokens for piece in second] == expected


def test_half_a_character_is_refused(tiny_bundle, open_once):
    with pytest.raises(RequestError, match="half a character"):
        open_once(tiny_bundle).text.encode("a\ud800")

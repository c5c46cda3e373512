"""Masks against brute force: an independent matcher judges every token of the tiny tokenizer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import regex
from llguidance import LLMatcher, LLTokenizer

from spec_export.engines.errors import MissingExtra, RequestError
from spec_export.runtime.grammar import Grammar, GrammarState, GrammarTokenizer
from tests.tiny_models import TINY

FILE = TINY / "target" / "tokenizer.json"
VOCABULARY, END = 1031, 1


def token_bytes() -> dict[int, bytes]:
    """Bytes of every ordinary token; byte-level tokenizers write byte b as the b-th character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
    vocabulary = json.loads(FILE.read_text())["model"]["vocab"]
    return {
        id_: bytes(byte_of[character] for character in text)
        for text, id_ in vocabulary.items()
        if text not in ("<s>", "</s>")
    }


BYTES = token_bytes()
IDS = {text: id_ for id_, text in BYTES.items()}


@pytest.fixture(scope="module")
def tiny() -> GrammarTokenizer:
    return GrammarTokenizer(FILE, VOCABULARY, (END,))


def mask_words(size: int = VOCABULARY) -> np.ndarray:
    return np.full(-(-size // 64) * 4, -1, np.int32)


def allowed(state: GrammarState, size: int = VOCABULARY) -> set[int]:
    """Ids of the mask, read bit by bit."""
    words = mask_words(size)
    state.fill(words)
    assert words.min() >= 0 and words.max() < 1 << 16
    bits = {i for i in range(16 * len(words)) if int(words[i // 16]) >> (i % 16) & 1}
    assert max(bits) < size
    return bits


def feed(state: GrammarState, text: str) -> GrammarState:
    """Advance over a text, a byte a token."""
    for byte in text.encode():
        assert state.advance(IDS[bytes([byte])])
    return state


def step(state: GrammarState, rng: random.Random) -> int | None:
    """Advance over a random allowed token that does not end the text."""
    tokens = sorted(allowed(state) - {END})
    if not tokens:
        return None
    # As many long tokens as short ones, or a walk would see little but single bytes.
    length = rng.choice(sorted({len(BYTES[token]) for token in tokens}))
    token = rng.choice([token for token in tokens if len(BYTES[token]) == length])
    assert state.advance(token)
    return token


# --- brute force ----------------------------------------------------------------------------------

W = rb"[ \t\r\n]*"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z é]{1,9}$"},
        "count": {"type": "integer"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
BOOLEAN = rb"(?:true|false)"
# The same language over bytes, by hand.
SCHEMA_BYTES = (
    rb"\{" + W + rb'"name"' + W + rb":" + W + '"(?:[a-z ]|é){1,9}"'.encode()
    + W + rb"," + W + rb'"count"' + W + rb":" + W + rb"-?(?:0|[1-9][0-9]*)"
    + rb"(?:" + W + rb"," + W + rb'"flags"' + W + rb":" + W
    + rb"\[" + W + rb"(?:" + BOOLEAN + W + rb"(?:," + W + BOOLEAN + W + rb")?)?\]"
    + rb")?" + W + rb"\}"
)  # fmt: skip
SENTENCE_LARK = r"""
start: word (" " word)* "."
word: "the" | "said" | LOWER
LOWER: /[a-m]+/
"""
CASES = {
    "regex": (Grammar("regex", r"(the |and )*[a-z]{2,12}[.!]?"),
              rb"(?:the |and )*[a-z]{2,12}[.!]?"),
    "bytes": (Grammar("regex", r"[à-ü€]+(x|日本)?"),
              rb"(?:\xc3[\xa0-\xbc]|\xe2\x82\xac)+(?:x|\xe6\x97\xa5\xe6\x9c\xac)?"),
    "schema": (Grammar("json_schema", json.dumps(SCHEMA)), SCHEMA_BYTES),
    "lark": (Grammar("lark", SENTENCE_LARK),
             rb"(?:the|said|[a-m]+)(?: (?:the|said|[a-m]+))*\."),
}  # fmt: skip


def brute_force(pattern: bytes, text: bytes) -> set[int]:
    """Tokens after which `text` can still become a match, and the end token where it is one."""
    compiled = regex.compile(pattern)
    tokens = {
        token
        for token, more in BYTES.items()
        if compiled.fullmatch(text + more, partial=True) is not None
    }
    return tokens | ({END} if compiled.fullmatch(text) else set())


def differences(state: GrammarState, pattern: bytes, seed: int) -> int:
    """Rows of a random text on which the mask is not what brute force says."""
    rng, text, wrong = random.Random(seed), b"", 0
    for _ in range(12):
        wrong += allowed(state) != brute_force(pattern, text)
        token = step(state, rng)
        if token is None:
            break
        text += BYTES[token]
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_a_token_is_allowed_iff_the_text_can_still_become_a_match(tiny, case):
    grammar, pattern = CASES[case]
    assert sum(differences(tiny.state(grammar), pattern, seed) for seed in range(4)) == 0


def test_the_comparison_sees_a_grammar_that_is_off_by_one(tiny):
    """Negative control."""
    state = tiny.state(Grammar("regex", r"(the |and )*[a-z]{2,11}[.!]?"))
    feed(state, "abcdefghijk")
    assert allowed(state) != brute_force(CASES["regex"][1], b"abcdefghijk")


def test_the_comparison_sees_forced_tokens():
    """Negative control: the library's default leaves one token where a text has no choice."""
    library = LLTokenizer(str(FILE), eos_token=[END])
    matcher = LLMatcher(library, LLMatcher.grammar_from_regex("the king"))
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    forced = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")))
    assert forced < brute_force(b"the king", b"")


@pytest.mark.parametrize("case", CASES)
def test_advance_takes_what_the_mask_allows_and_refuses_the_rest_unchanged(tiny, case):
    state, rng = tiny.state(CASES[case][0]), random.Random(5)
    for _ in range(6):
        mask = allowed(state)
        for token in range(-1, VOCABULARY + 70):
            took = state.advance(token)
            assert took == (token in mask), token
            if took:
                state.rollback(1)
        assert allowed(state) == mask
        if step(state, rng) is None:
            break


@pytest.mark.parametrize("case", CASES)
def test_rolled_back_it_is_what_a_fresh_one_would_be(tiny, case):
    rng = random.Random(7)
    for _ in range(3):
        state, tokens = tiny.state(CASES[case][0]), []
        while len(tokens) < 9 and (token := step(state, rng)) is not None:
            tokens.append(token)
        if state.advance(END):
            tokens.append(END)
        for kept in sorted(rng.sample(range(len(tokens) + 1), 3), reverse=True):
            state.rollback(len(tokens) - kept)
            del tokens[kept:]
            fresh = tiny.state(CASES[case][0])
            assert all(fresh.advance(token) for token in tokens)
            assert (allowed(state), state.finished) == (allowed(fresh), fresh.finished)


def test_two_texts_of_one_tokenizer_do_not_meet(tiny):
    first, second = (tiny.state(Grammar("regex", "[ab]{3}")) for _ in range(2))
    feed(first, "ab")
    assert allowed(second) == brute_force(b"[ab]{3}", b"")
    assert allowed(first) == brute_force(b"[ab]{3}", b"ab")


# --- the end --------------------------------------------------------------------------------------


def test_end_tokens_are_allowed_exactly_where_the_text_may_end():
    """One of them is an ordinary token for the tokenizer: it never stands for its text."""
    letter = IDS[b"b"]
    state = GrammarTokenizer(FILE, VOCABULARY, (END, letter, 0)).state(Grammar("regex", "ab?c?"))
    ends = {END, letter, 0}
    assert not allowed(state) & ends
    feed(state, "a")
    assert allowed(state) == ends | {IDS[b"c"]}
    for end in ends:
        assert state.advance(end)
        assert state.finished
        state.rollback(1)
    assert not state.finished


def test_nothing_but_end_tokens_follows_one_and_they_are_rolled_back_like_others(tiny):
    state = feed(tiny.state(Grammar("regex", "a+")), "aa")
    before = allowed(state)
    assert state.advance(END) and state.advance(END)
    assert allowed(state) == {END}
    assert not state.advance(IDS[b"a"])
    state.rollback(1)
    assert allowed(state) == {END} and state.finished
    state.rollback(2)
    assert allowed(state) == before and not state.finished
    assert allowed(state) == brute_force(b"a+", b"a")


def test_it_is_finished_when_only_an_end_token_may_follow(tiny):
    state = tiny.state(Grammar("json_schema", '{"type": "object", "maxProperties": 0}'))
    assert not state.finished
    feed(state, "{}")
    assert state.finished and allowed(state) == {END}
    assert tiny.state(Grammar("regex", "")).finished


def test_an_end_token_named_inside_a_grammar_ends_nothing(tiny):
    """The library's mask would allow it there, and the text would end without a match."""
    state = tiny.state(Grammar("lark", 'start: "a" (</s> | "c") "b"'))
    feed(state, "a")
    assert allowed(state) == {IDS[b"c"]} | {t for t in BYTES if BYTES[t] == b"cb"}
    state = feed(tiny.state(Grammar("lark", 'start: "a" </s> "b"')), "a")
    with pytest.raises(RequestError, match="no token of this model"):
        state.fill(mask_words())


# --- vocabularies ---------------------------------------------------------------------------------


def test_ids_the_tokenizer_does_not_know_are_never_allowed():
    state = GrammarTokenizer(FILE, 1200, (END,)).state(Grammar("regex", "(?s:.*)"))
    assert allowed(state, 1200) == set(BYTES) - partial_characters() | {END}
    assert not state.advance(1100)


def test_ids_the_model_does_not_know_are_never_allowed():
    state = GrammarTokenizer(FILE, 1000, (END,)).state(Grammar("regex", "(?s:.*)"))
    known = {token for token in BYTES if token < 1000}
    assert allowed(state, 1000) == known - partial_characters() | {END}
    assert not state.advance(1020)


def partial_characters() -> set[int]:
    """Tokens that cannot begin a text in UTF-8."""
    any_text = rb"(?:[\0-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*"  # noqa: E501
    return set(BYTES) - brute_force(any_text, b"")


def test_a_character_split_over_tokens_is_finished_byte_by_byte(tiny):
    assert "é".encode() not in IDS or "日".encode() not in IDS  # at least one has to be split
    state = tiny.state(Grammar("regex", "[é日]"))
    for text in ("é", "日"):
        data = text.encode()
        for i, byte in enumerate(data):
            assert IDS[bytes([byte])] in allowed(state)
            assert END not in allowed(state)
            assert state.advance(IDS[data[i : i + 1]])
        assert state.finished
        state.rollback(len(data))


def test_a_tokenizer_with_byte_fallback_writes_a_space_as_its_own_mark(tmp_path):
    """The way of Llama 2, Mistral and Gemma: `▁` is a space, `<0xC3>` a byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "▁", "▁b"]
    ids = {piece: id_ for id_, piece in enumerate(pieces)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": id_, "content": pieces[id_], "special": True, **special} for id_ in range(3)
        ],
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {"type": "BPE", "byte_fallback": True, "vocab": ids, "merges": []},
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document))
    state = GrammarTokenizer(file, len(ids), (2,)).state(Grammar("regex", "a bé"))
    for piece, others in (("a", {"<0x61>"}), ("▁b", {"▁", "<0x20>"}), ("<0xC3>", set())):
        assert allowed(state, len(ids)) == {ids[piece], *(ids[other] for other in others)}
        assert state.advance(ids[piece])
    assert state.advance(ids["<0xA9>"])
    assert state.finished


def test_filling_allocates_nothing(tmp_path):
    """A mask of 66567 tokens has 8 kB; what the interpreter itself needs is far less than one."""
    document = json.loads(FILE.read_text())
    document["model"]["vocab"] |= {f"zz{i}": VOCABULARY + i for i in range(65536)}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document))
    size = VOCABULARY + 65536
    state = GrammarTokenizer(file, size, (END,)).state(Grammar("regex", "[a-z]{1,90}"))
    words = mask_words(size)

    def rows() -> None:
        for _ in range(20):
            assert state.advance(IDS[b"a"])
            state.fill(words)
        state.rollback(20)
        state.fill(words)

    rows()
    tracemalloc.start()
    try:
        rows()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        rows()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 2048


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "[^\\s\\S]", "no token of this model can follow"),
        ("regex", "(a|b*)" * 11000, "65536"),
        ("regex", "a\ud800", "not text"),
        ("json_schema", "{", "EOF while parsing"),
        ("json_schema", 'true}, {"name": "other", "json_schema": true', "trailing"),
        ("json_schema", '{}}, {"name": "other", "json_schema": {}', "trailing"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("json_schema", '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
        ("json_schema", '{"minimum": 5, "maximum": 3, "type": "integer"}', "Unsatisfiable"),
        ("lark", "start: foo", "foo"),
        ("lark", '%import /etc/passwd\nstart: "a"', "Expected"),
        ("lark", '{"grammars": []}', "expecting rule"),
        ("lark", "start: " + "(" * 9000, "too deeply nested"),
        ("gbnf", 'root ::= "a"', "one of json_schema, regex, lark"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tiny, kind, text, says):
    with pytest.raises(RequestError) as caught:
        tiny.state(Grammar(kind, text))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_regex_stays_one_whatever_it_holds(tiny):
    """It travels inside a grammar, between slashes."""
    state = tiny.state(Grammar("regex", 'a/\nb: "c"'))
    feed(state, 'a/\nb: "c"')
    assert state.finished


def test_a_chain_of_rules_or_references_does_not_end_the_process():
    """The library recurses over them: on a stack of 8 MiB 3000 are a segmentation fault."""
    code = """if True:
        import json
        from pathlib import Path
        from spec_export.runtime.grammar import Grammar, GrammarTokenizer
        n = 4000
        rules = "".join(f"r{i}: r{i + 1}\\n" for i in range(n))
        schemas = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1500)}
        schema = {"$ref": "#/$defs/0", "$defs": schemas | {"1500": {"type": "null"}}}
        tokenizer = GrammarTokenizer(Path(%r), 1031, (1,))
        tokenizer.state(Grammar("lark", f'start: r0\\n{rules}r{n}: "a"'))
        tokenizer.state(Grammar("json_schema", json.dumps(schema)))
    """
    run = subprocess.run(
        [sys.executable, "-c", code % str(FILE)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, (run.returncode, run.stderr)


def test_a_dead_end_is_an_error_and_can_be_rolled_back(tiny):
    """A draft may lead where the target would not go: the text before it has to stay usable."""
    state, words = tiny.state(Grammar("lark", 'start: "a" X | "b"\nX: /x/ & /y/')), mask_words()
    feed(state, "a")
    for _ in range(2):
        with pytest.raises(RequestError, match="after 1 tokens: no token of this model"):
            state.fill(words)
    state.rollback(1)
    feed(state, "b")
    assert state.finished


def test_a_grammar_that_grows_too_complex_is_an_error_and_the_text_is_kept(tiny):
    many = " | ".join(f'"{i}" x' for i in range(2000))
    state = tiny.state(Grammar("lark", f'start: "a" ("b" ({many}) | "c")\nx: "x"'))
    feed(state, "a")
    for _ in range(2):
        with pytest.raises(RequestError, match=r"after 1 tokens: .*items"):
            state.advance(IDS[b"b"])
    feed(state, "c")
    assert state.finished


def test_rolling_back_works_where_the_library_cannot(tiny):
    """It refuses to with `max_tokens`; the matcher is made anew and led to the same place."""
    state = tiny.state(Grammar("lark", 'start: x "!"\nx[max_tokens=3]: /[a-z]*/'))
    masks = []
    for character in "abc":
        masks.append(allowed(state))
        feed(state, character)
    assert allowed(state) == {IDS[b"!"]}
    state.rollback(2)
    assert allowed(state) == masks[1]
    feed(state, "bc!")
    assert state.finished


@pytest.mark.parametrize(
    ("vocabulary", "ends", "says"),
    [(VOCABULARY, (), "needs one"), (1000, (1020,), "needs one"), (2000, (1500,), "1500")],
)
def test_end_tokens_have_to_be_tokens(vocabulary, ends, says):
    with pytest.raises(RequestError, match=says):
        GrammarTokenizer(FILE, vocabulary, ends)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE", "vocab": {"a": 7}}}'])
def test_a_tokenizer_the_library_cannot_use_is_an_error(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(RequestError, match="this bundle's tokenizer"):
        GrammarTokenizer(file, VOCABULARY, (END,))


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"\[grammar\]"):
        GrammarTokenizer(Path(FILE), VOCABULARY, (END,))

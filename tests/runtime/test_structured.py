"""A grammar over speculative decoding: every row obeys it, and nothing else changes."""

from __future__ import annotations

import json
import re

import pytest

from spec_export.engines.errors import RequestError
from spec_export.runtime import Grammar, Sampling, Session
from tests.decoding import decode

WORDS = "([A-Za-z]+ ){2,6}[a-z]+\\."
GRAMMAR = Grammar("regex", WORDS)
SCHEMA = {
    "type": "object",
    "properties": {"king": {"enum": ["David", "Saul"]}, "years": {"type": "integer"}},
    "required": ["king", "years"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_matches_a_regex(draft, temperature, build_tiny, open_once):
    """vllm 34650: the grammar was not applied inside a speculated block."""
    opened = open_once(build_tiny(draft))
    prompt = opened.text.encode("And the king of")
    for seed in range(6):
        sampling = Sampling(temperature, seed)
        grammar = Grammar("regex", WORDS)
        found = decode(opened, prompt, max_tokens=80, sampling=sampling, grammar=grammar)
        if found.finish == "stop":
            assert re.fullmatch(WORDS, found.text), found.text


@pytest.mark.parametrize("draft", ["pair", "ngram"])
def test_a_json_object_is_one(draft, build_tiny, open_once):
    opened = open_once(build_tiny(draft))
    prompt = opened.text.encode("And the king of")
    grammar = Grammar(
        "json_schema", json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    )
    found = decode(opened, prompt, max_tokens=100, grammar=grammar)
    if found.finish == "stop":
        assert set(json.loads(found.text)) == {"king", "years"}
    assert found.text.startswith('{"king"')


@pytest.mark.parametrize("rule", ["invariant", None])
def test_speculation_does_not_show_under_a_grammar(rule, build_tiny, open_once):
    """Masks are rolled back with refused drafts, so the text is that of plain decoding."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode("And the king of")
    sampling = Sampling(1.0, 3, rule=rule) if rule else Sampling()
    texts = [
        decode(
            opened,
            prompt,
            max_tokens=60,
            gamma=gamma,
            sampling=sampling,
            grammar=Grammar("regex", WORDS),
        ).tokens
        for gamma in (0, 1, 4)
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("draft", ["pair", "ngram"])
def test_lists_and_grammars_in_turns_on_one_session(draft, build_tiny, open_once):
    """Both are masks, but only a grammar's follow the drafts: after a request with a list a grammar
    was ignored, and a list after a grammar met an assertion."""
    opened = open_once(build_tiny(draft))
    prompt, session = opened.text.encode("And the king of"), Session(opened)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, 3, banned_tokens=(5, 6))
        requests = [{"sampling": sampling}, {"sampling": sampling, "grammar": GRAMMAR}]
        for request in (*requests, *requests):
            found = decode(session, prompt, max_tokens=30, **request)
            fresh = decode(opened, prompt, max_tokens=30, **request)
            assert found.tokens == fresh.tokens
            if "grammar" in request:
                assert re.fullmatch(WORDS, found.text) or found.finish == "length"
                assert re.fullmatch("[A-Za-z .]*", found.text)


def test_a_grammar_that_is_none_is_refused(build_tiny, open_once):
    opened = open_once(build_tiny("pair"))
    with pytest.raises(RequestError):
        decode(opened, opened.text.encode("And"), grammar=Grammar("regex", "(unclosed"))

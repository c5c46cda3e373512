"""Prompts of this package and of files that may hold anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_export.calibration.prompts import (
    Prompt,
    default_prompts,
    encode_prompts,
    fitting_prompts,
    read_prompts,
)
from spec_export.engines.errors import RequestError


def test_default_prompts_that_do_not_fit_a_context_are_left_out(open_once, tiny_bundle):
    prompts, ids = fitting_prompts(open_once(tiny_bundle))
    assert 2 <= len(prompts) < len(default_prompts())
    assert len(prompts) == len(ids) and max(map(len, ids)) <= 122


def test_the_default_prompts_are_several_of_several_kinds():
    prompts = default_prompts()
    kinds = [prompt.category for prompt in prompts]
    assert len(set(kinds)) >= 5 and all(kinds.count(kind) >= 2 for kind in kinds)


def test_lines_of_text(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two words \n", encoding="utf-8")
    assert read_prompts(file) == [Prompt("all", "one"), Prompt("all", "two words")]


def test_lines_of_json(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a", "category": "x"}, {"turns": ["b", "c"], "question_id": 3}]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_prompts(file) == [Prompt("x", "a"), Prompt("all", "b")]


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("p.txt", b"", "has no prompts"),
        ("p.txt", b"\n \n\t\n", "has no prompts"),
        ("p.txt", b"caf\xe9\n", "not UTF-8: byte 3 is 0xe9"),
        ("p.txt", b"x\n" * 10_001, "at most 10000"),
        ("p.jsonl", b"plain text\n", "line 1: no JSON object"),
        ("p.jsonl", b'{"prompt": "a"}\n[1]\n', "line 2: expected an object"),
        ("p.jsonl", b'{"prompt": 3}\n', "neither"),
        ("p.jsonl", b'{"turns": []}\n', "neither"),
        ("p.jsonl", b'{"prompt": "  "}\n', "neither"),
        ("p.jsonl", b'{"prompt": "a", "category": ""}\n', "category"),
        ("p.jsonl", b'{"prompt": "a", "category": ["b"]}\n', "category"),
        ("p.jsonl", b"[" * 100_000, "no JSON object"),
    ],
)
def test_a_file_that_is_no_set_of_prompts_is_refused(tmp_path, name, content, word):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(RequestError, match=word):
        read_prompts(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(RequestError, match="cannot be read"):
            read_prompts(path)


def test_a_file_without_an_end_is_refused():
    """It would fill the memory of the machine."""
    with pytest.raises(RequestError, match="more than the 16777216 bytes"):
        read_prompts(Path("/dev/zero"))


def test_a_prompt_longer_than_the_context_is_refused(open_once, tiny_bundle):
    opened = open_once(tiny_bundle)
    assert encode_prompts(opened, [Prompt("all", "In the beginning")])[0]
    with pytest.raises(RequestError, match=r"prompt 2 .* has \d+ tokens; .* room for 122"):
        encode_prompts(opened, [Prompt("all", "a"), Prompt("all", "a b c d " * 200)])

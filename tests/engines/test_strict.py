"""The strict JSON reader: what it takes, what it refuses, and that it says where."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_export.engines.errors import IntegrityError, SchemaError
from spec_export.engines.strict import LARGEST_JSON_BYTES, _read, parse_json, read_json, to_json


@dataclass(frozen=True)
class Inner:
    size: int
    share: float


@dataclass(frozen=True)
class Outer:
    schema: int
    name: str
    kind: Literal["a", "b", 3]
    inner: dict[str, Inner]
    dims: tuple[int | str, ...]
    maybe: str | None
    flags: list[bool]


GOOD = Outer(1, "x", "a", {"one": Inner(2, 0.5)}, (1, "T"), None, [True, False])


def text(**changes: object) -> str:
    return json.dumps(asdict(GOOD) | changes)


def parse(content: str) -> Outer:
    return parse_json(content, Outer, schema=1, origin="file")


def test_what_was_written_is_read_back():
    assert parse(to_json(GOOD)) == GOOD


TEXT = st.text(st.characters(blacklist_categories=["Cs"]))
INNER = st.builds(Inner, st.integers(), st.floats(allow_nan=False, allow_infinity=False))


@given(
    st.builds(
        Outer,
        st.just(1),
        TEXT,
        st.sampled_from(["a", "b", 3]),
        st.dictionaries(TEXT, INNER, max_size=3),
        st.lists(st.integers() | TEXT, max_size=3).map(tuple),
        st.none() | TEXT,
        st.lists(st.booleans(), max_size=3),
    )
)
def test_everything_that_can_be_written_is_read_back(value):
    assert parse(to_json(value)) == value


def test_an_integer_is_a_float_but_nothing_else_is_another_type():
    read = parse(text(inner={"one": {"size": 2, "share": 1}}))
    assert isinstance(read.inner["one"].share, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 1}, "file.name: expected str, found int"),
        ({"name": None}, "file.name: expected str, found null"),
        ({"kind": "c"}, "file.kind: 'c' is none of 'a', 'b', 3"),
        ({"kind": True}, "file.kind: True is none of"),
        ({"kind": ["a"]}, r"file.kind: \['a'\] is none of"),
        ({"inner": []}, "file.inner: expected dict, found list"),
        ({"inner": {"one": 1}}, "file.inner.one: expected dict, found int"),
        ({"inner": {"one": {"size": 2}}}, "file.inner.one: the key 'share' is missing"),
        ({"inner": {"one": {"size": 1.0, "share": 1}}}, "one.size: expected int, found float"),
        ({"inner": {"one": {"size": True, "share": 1}}}, "one.size: expected int, found bool"),
        ({"inner": {"one": {"size": 1, "share": "1"}}}, "one.share: expected float, found str"),
        ({"inner": {"one": {"size": 1, "share": True}}}, "one.share: expected float, found bool"),
        ({"dims": "T"}, "file.dims: expected list, found str"),
        ({"dims": [1.5]}, r"file.dims\[0\]: expected int or str"),
        ({"maybe": 1}, "file.maybe: expected str or NoneType, found 1"),
        ({"flags": [1]}, r"file.flags\[0\]: expected bool, found int"),
        ({"more": 1}, "file: unknown key 'more'"),
    ],
)
def test_a_wrong_type_or_key_is_refused_by_its_place(changes, message):
    with pytest.raises(SchemaError, match=message):
        parse(text(**changes))


@pytest.mark.parametrize("found", [2, 0, "1", None, True, 1.5, [1]])
def test_another_schema_version_is_refused_before_anything_else(found):
    """Its other keys may mean something else, so they are not even looked at."""
    with pytest.raises(SchemaError, match=r"schema version .*reads 1.*installed version"):
        parse(json.dumps({"schema": found, "whatever": 1}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "expected an object, found list"),
        ("1", "expected an object, found int"),
        ('{"schema": 1} x', "not valid JSON"),
        ('{"schema": 1, "schema": 1}', "a key stands twice"),
        (text()[:-1] + ', "name": "y"}', "a key stands twice"),
        (text().replace("0.5", "NaN"), "NaN is not a number of JSON"),
        (text().replace("0.5", "-Infinity"), "-Infinity is not a number of JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"schema": 1, "a": ' * 100_000, "not valid JSON"),
        (text().replace("0.5", "1" * 5000), "not valid JSON"),
    ],
)
def test_what_is_not_json_is_refused(content, message):
    with pytest.raises(SchemaError, match=message):
        parse(content)


def test_a_number_too_large_for_a_float_is_refused():
    """`json` reads 1e999 as infinity, which no file of ours may hold and `to_json` cannot write."""
    with pytest.raises(SchemaError):
        parse(text().replace("0.5", "1e999"))


def test_an_integer_too_large_for_a_float_is_refused():
    with pytest.raises(SchemaError):
        parse(text().replace("0.5", "1" + "0" * 400))


def test_a_file_is_bounded(tmp_path):
    file = tmp_path / "big.json"
    with file.open("wb") as sink:
        sink.truncate(LARGEST_JSON_BYTES + 1)
    with pytest.raises(IntegrityError, match="at most"):
        read_json(file, Outer, schema=1)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "directory"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    file = tmp_path / "some.json"
    if content == "directory":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"some\.json"):
        read_json(file, Outer, schema=1)


def test_half_a_character_is_no_text():
    """JSON can spell it and nothing can write it: it broke whatever printed the text."""
    with pytest.raises(SchemaError, match="half a character"):
        _read("a\ud800", str, "here")
    with pytest.raises(SchemaError, match="half a character"):
        _read({"\udfff": 1}, dict[str, int], "here")
    assert _read("\U0001f600", str, "here") == "\U0001f600"


def test_only_plain_files_are_read(tmp_path):
    """A device or a pipe has no size, and no end."""
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(IntegrityError, match="not a plain file"):
            read_json(path, dict, schema=1)

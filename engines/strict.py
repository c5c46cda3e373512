"""Read frozen dataclasses from untrusted JSON, and write them back.

Strict both ways: an unknown key, a missing key, a wrong type, a NaN or a duplicate key is an error
that names the place. Understands `str`, `int`, `float`, `bool`, `None`, `list[X]`,
`tuple[X, ...]`, `dict[str, X]`, unions of these, `Literal`, and nested dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import stat
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from spec_export.engines.errors import IntegrityError, SchemaError

T = TypeVar("T")
LARGEST_JSON_BYTES = 16 << 20


def read_json(path: Path, kind: type[T], *, schema: int) -> T:
    """Read a `kind` from `path`, checking its `schema` number before anything else.

    Raises:
        IntegrityError: the file is missing, too large or unreadable.
        SchemaError: it is not JSON, has another schema number, or does not describe a `kind`.
    """
    try:
        found = path.stat()
        size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{path} is not a plain file")
        if size > LARGEST_JSON_BYTES:
            raise IntegrityError(f"{path} has {size} bytes; at most {LARGEST_JSON_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}") from error
    return parse_json(text, kind, schema=schema, origin=str(path))


def parse_json(text: str, kind: type[T], *, schema: int, origin: str) -> T:
    """Parse `text` as a `kind`; see `read_json`."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constants,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{origin} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SchemaError(f"{origin}: expected an object, found {type(value).__name__}")
    found = value.get("schema")
    if found != schema or isinstance(found, bool):
        raise SchemaError(
            f"{origin} has schema version {found!r}; this version of spec-export reads {schema}. "
            "Make it again with the installed version, or install the one that made it"
        )
    return typing.cast(T, _read(value, kind, origin))


def to_json(value: object) -> str:
    """The text of a dataclass: sorted nowhere, indented, ending in a newline."""
    plain = dataclasses.asdict(value)  # type: ignore[call-overload]
    return json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a key stands twice in an object with keys {sorted(result)[:5]}")
    return result


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large for a number")
    return number


def _read(value: Any, kind: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(value, kind, place)
    if origin in (typing.Union, types.UnionType):
        return _read_union(value, arguments, place)
    if origin is typing.Literal:
        if value in arguments and not isinstance(value, bool):
            return value
        raise SchemaError(f"{place}: {value!r} is none of {', '.join(map(repr, arguments))}")
    if origin in (list, tuple):
        items = _expect(value, list, place)
        read = [_read(item, arguments[0], f"{place}[{i}]") for i, item in enumerate(items)]
        return tuple(read) if origin is tuple else read
    if origin is dict:
        items = _expect(value, dict, place)
        for key in items:
            _expect(key, str, f"{place}: a key")
        return {key: _read(item, arguments[1], f"{place}.{key}") for key, item in items.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise SchemaError(f"{place}: the number is too large") from error
    return _expect(value, type(None) if kind is None else kind, place)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_dataclass(value: Any, kind: Any, place: str) -> Any:
    items = _expect(value, dict, place)
    hints = _hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    unknown, missing = sorted(set(items) - set(names)), sorted(set(names) - set(items))
    if unknown:
        raise SchemaError(f"{place}: unknown key {unknown[0]!r}")
    if missing:
        raise SchemaError(f"{place}: the key {missing[0]!r} is missing")
    return kind(**{name: _read(items[name], hints[name], f"{place}.{name}") for name in names})


def _read_union(value: Any, kinds: tuple[Any, ...], place: str) -> Any:
    for kind in kinds:
        try:
            return _read(value, kind, place)
        except SchemaError:
            continue
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise SchemaError(f"{place}: expected {names}, found {value!r:.60}")


def _expect(value: Any, kind: type, place: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = "null" if value is None else type(value).__name__
        raise SchemaError(f"{place}: expected {kind.__name__}, found {found}")
    if isinstance(value, str) and not _is_text(value):
        raise SchemaError(f"{place}: the text has half a character, which cannot be written")
    return value


def _is_text(value: str) -> bool:
    """JSON can spell half of a character, which no encoding has."""
    return not any("\ud800" <= character <= "\udfff" for character in value)

"""Find the external-data files an ONNX file names, without any ONNX library.

A graph from elsewhere may point outside its directory; this is looked at before an engine opens
it. The protobuf is walked field by field, messages that can hold a tensor only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spec_export.engines.errors import IntegrityError

LARGEST_GRAPH_BYTES = 512 << 20
_DEPTH = 40
# Message kind to the fields that may hold tensors, with the kind of message they are.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}


def external_names(graph: Path) -> frozenset[str]:
    """Locations of external data named anywhere in an ONNX file.

    Raises:
        IntegrityError: the file is too large, or is not an ONNX protobuf.
    """
    if graph.stat().st_size > LARGEST_GRAPH_BYTES:
        raise IntegrityError(f"{graph} is larger than a graph without weights can be")
    data = memoryview(graph.read_bytes())
    try:
        return frozenset(_locations(data, "model", _DEPTH))
    except (IndexError, ValueError) as error:
        raise IntegrityError(f"{graph} is not an ONNX file: {error}") from error


def check_external(graph: Path, allowed: frozenset[str]) -> None:
    """Refuse a graph whose external data is anything but an allowed file in its own directory.

    Raises:
        IntegrityError: naming the location.
    """
    for name in sorted(external_names(graph)):
        if name not in allowed or "/" in name or "\\" in name:
            raise IntegrityError(
                f"{graph} reads weights from {name!r}, which is not a listed file beside it; the "
                "bundle was altered or made by something else"
            )


def _locations(message: memoryview, kind: str, depth: int) -> Iterator[str]:
    if depth == 0:
        raise ValueError("graphs nested too deeply")
    inside = _INSIDE[kind]
    for number, content in _fields(message):
        if number not in inside:
            continue
        if inside[number] == "entry":
            entry = dict(_fields(content))
            if bytes(entry.get(1, b"")) == b"location":
                yield bytes(entry.get(2, b"")).decode("utf-8", "backslashreplace")
        else:
            yield from _locations(content, inside[number], depth - 1)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Length-delimited fields of a message; others are stepped over."""
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position)
        wire = key & 7
        if wire == 2:
            size, position = _varint(message, position)
            if size > end - position:
                raise ValueError(f"a field of {size} bytes passes the end")
            yield key >> 3, message[position : position + size]
            position += size
        elif wire == 0:
            _, position = _varint(message, position)
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
    if position != end:
        raise ValueError("a field passes the end")


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number longer than 64 bits")

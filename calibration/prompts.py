"""Prompts to measure on: the default ones or a file of the user's, as ids of a bundle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.calibration.default_prompts import PROMPTS
from spec_export.engines.errors import RequestError
from spec_export.runtime import OpenedBundle

_LARGEST_BYTES = 16 << 20
_MOST_PROMPTS = 10_000
_LONGEST_CATEGORY = 40
_UNNAMED = "all"


@dataclass(frozen=True)
class Prompt:
    """A text to go on from, and what kind of text it is."""

    category: str
    text: str


def default_prompts() -> list[Prompt]:
    """The prompts of this package."""
    return [Prompt(category, text) for category, text in PROMPTS]


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file of prompts: a line of text each, or JSON objects where it ends in `.jsonl`.

    An object has `prompt`, or `turns` of which the first is taken, and perhaps `category`.

    Raises:
        RequestError: the file is missing, not UTF-8, too large, or holds no prompts; or a line of
            it is none.
    """
    text = _read(path)
    lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise RequestError(f"{path} has no prompts; write one on each line")
    if len(lines) > _MOST_PROMPTS:
        raise RequestError(f"{path} has {len(lines)} prompts; at most {_MOST_PROMPTS} are read")
    if path.suffix == ".jsonl":
        return [_from_json(line, f"{path}, line {number}") for number, line in lines]
    return [Prompt(_UNNAMED, line.strip()) for _, line in lines]


def fitting_prompts(opened: OpenedBundle) -> tuple[list[Prompt], list[list[int]]]:
    """The default prompts that leave room for a round in the context, with their ids."""
    prompts, longest = default_prompts(), _longest(opened)
    encoded = [_encode(opened, prompt) for prompt in prompts]
    fits = [n for n, ids in enumerate(encoded) if len(ids) <= longest]
    return [prompts[n] for n in fits], [encoded[n] for n in fits]


def encode_prompts(opened: OpenedBundle, prompts: list[Prompt]) -> list[list[int]]:
    """Ids of prompts, as a user's turn where the bundle has a chat template.

    Raises:
        RequestError: one leaves no room for a round in the context.
    """
    longest, encoded = _longest(opened), []
    for number, prompt in enumerate(prompts, start=1):
        ids = _encode(opened, prompt)
        if len(ids) > longest:
            raise RequestError(
                f"prompt {number} ({prompt.text[:30]!r}...) has {len(ids)} tokens; the bundle's "
                f"context of {opened.manifest.max_len} leaves room for {longest} and a round: "
                "shorten it, or rebuild with a larger `--max-len`"
            )
        encoded.append(ids)
    return encoded


def _longest(opened: OpenedBundle) -> int:
    return opened.manifest.max_len - opened.manifest.gamma - 2


def _encode(opened: OpenedBundle, prompt: Prompt) -> list[int]:
    if opened.manifest.text.chat_template is None:
        return opened.text.encode(prompt.text)
    return opened.text.encode_chat([{"role": "user", "content": prompt.text}])


def _read(path: Path) -> str:
    """The text of a file or a pipe; no more is read than is allowed, however long it goes on."""
    try:
        with path.open("rb") as file:
            found = file.read(_LARGEST_BYTES + 1)
        if len(found) > _LARGEST_BYTES:
            raise RequestError(f"{path} has more than the {_LARGEST_BYTES} bytes that are read")
        return found.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; save "
            "it as UTF-8"
        ) from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error


def _from_json(line: str, place: str) -> Prompt:
    try:
        found: Any = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: no JSON object: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{place}: expected an object with `prompt`, found {line[:40]!r}")
    turns = found.get("turns")
    text = found.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    category = found.get("category", _UNNAMED)
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{place}: neither `prompt` nor the first of `turns` is a text")
    if not isinstance(category, str) or not 1 <= len(category) <= _LONGEST_CATEGORY:
        raise RequestError(
            f"{place}: `category` has to be a text of 1 to {_LONGEST_CATEGORY} characters"
        )
    return Prompt(category, text)

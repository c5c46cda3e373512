"""Text to token ids and back, as a stream."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from spec_export.engines.errors import BundleError, RequestError
from spec_export.engines.graphs import TextSpec

_UNFINISHED = "\ufffd"


class Text:
    """The tokenizer and chat template of a bundle."""

    def __init__(self, tokenizer: Path, template: Path | None, spec: TextSpec) -> None:
        self.spec = spec
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
        except Exception as error:
            raise BundleError(f"{tokenizer} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            self._template = None if template is None else template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{template} is not a chat template: {error}") from error

    def encode(self, prompt: str) -> list[int]:
        """Ids of a prompt, with BOS where the checkpoint's tokenizer puts one.

        Raises:
            RequestError: the prompt is empty and the model has no BOS token to start from.
        """
        ids = list(self._tokenizer.encode(_encodable(prompt)).ids)
        if not ids and self.spec.bos_id is not None:
            ids = [self.spec.bos_id]
        if not ids:
            raise RequestError(
                "the prompt is empty and this model has no BOS token to start from; give a prompt"
            )
        return ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation, rendered by the checkpoint's own chat template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; run it without --chat")
        try:
            text = (
                _environment()
                .from_string(self._template)
                .render(messages=messages, add_generation_prompt=True, **self.spec.special_tokens)
            )
        except Exception as error:  # it is a program that came with the checkpoint
            raise RequestError(f"the chat template refused the messages: {error}") from error
        return list(self._tokenizer.encode(_encodable(text), add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A decoder that takes ids one at a time."""
        return TextStream(self._tokenizer)


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: the environment that transformers gives them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    """Unlike jinja's own, which escapes `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


class TextStream:
    """Decodes a growing sequence; a character split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first id decoded again, so that spaces between words are right
        self._done = 0  # ids whose text was handed out

    def add(self, token: int) -> str:
        """Text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        before, after = self._window()
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """What is left: the bytes of a character that never came to its end."""
        before, after = self._window()
        self._start = self._done = len(self._ids)
        return after[len(before) :]

    def _window(self) -> tuple[str, str]:
        before = self._tokenizer.decode(
            self._ids[self._start : self._done], skip_special_tokens=True
        )
        after = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)
        return before, after


class StopStrings:
    """Finds the first stop string in a stream and never lets a part of one through.

    Args:
        stops: the strings; empty ones are refused.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty")
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string was completed (it is cut off)."""
        if not self._stops:
            return text, False
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _encodable(text: str) -> str:
    """Refuse half a character, which Python and JSON can spell and no encoding has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has half a character at {error.start}, which cannot be encoded"
        ) from error
    return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)

"""The command line, called in this process: arguments in, exit code and both streams out."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from spec_export.cli import app


@dataclass(frozen=True)
class Called:
    """What a call left."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """The message of a call that has to be refused: exit code 2, one line, no result."""
        assert self.code == 2, self
        assert self.out == ""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], "nothing follows the message"
        return lines[0]


Cli = Callable[..., Called]


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory, monkeypatch):
    """Which files were verified is remembered below the home directory; tests have their own."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def prompts(tmp_path) -> Path:
    """A file of prompts to measure on."""
    file = tmp_path / "prompts.txt"
    file.write_text("In the beginning\nAnd it came to pass\nThe king said\n")
    return file


@pytest.fixture
def cli(capsys, monkeypatch) -> Cli:
    """Call the program; `stdin` is what is piped into it."""

    def call(*arguments: object, stdin: bytes = b"") -> Called:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            app([str(argument) for argument in arguments], prog_name="spec-export")
        out, err = capsys.readouterr()
        return Called(int(stop.value.code or 0), out, err)

    return call

"""What every command shares: plain help in groups, errors as one line, exit codes.

Exit codes: 0 done; 1 a check failed, or a fault of ours with its traceback; 2 bad input, told in
one line that begins with `error:`, or a usage message; 130 interrupted, and whatever was
half-written is gone.
"""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from spec_export.engines.errors import SpecExportError

BAD_INPUT, INTERRUPTED = 2, 130


class Commands(TyperGroup):
    """The program: runs a command and turns what it raises into an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except SpecExportError as error:
            complain(f"error: {error}")
            raise typer.Exit(BAD_INPUT) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
                raise
            complain(f"error: the output could not be written: {error.strerror}")
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as error:
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from error

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands in the order they are declared, which is the order they are used in."""
        return list(self.commands)


class Command(TyperCommand):
    """A command whose help shows its options in groups (`rich_help_panel`), without rich.

    Loading rich to draw boxes takes longer than everything else that `--help` does.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then every group of options, in the order of declaration."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            group = getattr(parameter, "rich_help_panel", None) or kind
            groups.setdefault(group, []).append(record)
        groups["Options"] = groups.pop("Options")
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def complain(message: str) -> None:
    """Write to stderr; a message that spans lines becomes one."""
    if sys.stderr is not None:
        print(" ".join(message.split()), file=sys.stderr, flush=True)


def run(app: Callable[..., Any]) -> None:
    """Run the program; a request to terminate cleans up like an interrupt does."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _terminate)
    app(prog_name="spec-export")


def _terminate(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)

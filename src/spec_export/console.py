"""Progress on stderr: bars on a terminal, a line per finished step elsewhere.

Stages report `(what, done, total)` and know nothing of this. stdout belongs to results.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from spec_export.engines.byte_counts import size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Steps", "Waiting", "print_rows", "printable", "size"]
_VERIFYING = "verifying "
_ALL_FILES = "verifying files"


class Steps:
    """Shows the progress callbacks of a stage; one step at a time.

    Args:
        quiet: show nothing.
        lines: off a terminal, write a line for every finished step.
        animated: redraw bars all the time; off while something is being timed.
    """

    def __init__(self, *, quiet: bool = False, lines: bool = True, animated: bool = True) -> None:
        self._animated = animated
        self._on_terminal = _is_terminal() and not quiet
        self._lines = lines and not quiet and not self._on_terminal
        self._quiet = quiet
        self._what: str | None = None
        self._finished: str | None = None
        self._started = 0.0
        self._files: dict[str, tuple[int, int]] = {}
        self._bars: Progress | None = None
        self._bar: TaskID | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take a report: step, amount done, amount in all."""
        if self._quiet:
            return
        is_last = done >= total
        if what.startswith(_VERIFYING):
            # A callback per file makes one bar; whether a file is the last cannot be known here.
            self._files[what] = (done, total)
            done, total = (sum(column) for column in zip(*self._files.values(), strict=True))
            what, is_last = _ALL_FILES, False
        if what != self._what:
            if is_last and what == self._finished:
                return
            self._finish()
            self._start(what)
        if self._bars is not None and self._bar is not None:
            known = total if total > 1 else None
            self._bars.update(self._bar, completed=done, total=known, refresh=not self._animated)
        if is_last:
            self._finish()

    def say(self, text: str) -> None:
        """Write a line about what is happening."""
        if not self._quiet:
            self.close()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Finish the current step and stop drawing."""
        self._finish()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._what = None  # it did not finish
        self.close()

    def _start(self, what: str) -> None:
        self._what, self._started = what, time.perf_counter()
        if self._on_terminal:
            self._bars = self._bars or _new_bars(animated=self._animated)
            self._bar = self._bars.add_task(what, total=None)

    def _finish(self) -> None:
        if self._what is None:
            return
        if self._lines:
            took = time.perf_counter() - self._started
            print(f"{self._what}: {took:.1f} s", file=sys.stderr, flush=True)
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=1, total=1)
        self._finished, self._what, self._bar = self._what, None, None
        self._files.clear()


def _is_terminal() -> bool:
    """Whether progress can be drawn; a closed stderr is None."""
    return sys.stderr is not None and sys.stderr.isatty()


class Waiting:
    """A spinner on a terminal until `stop`; nothing elsewhere."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._status = None
        if _is_terminal() and not quiet:
            from rich.console import Console
            from rich.text import Text

            self._status = Console(stderr=True).status(Text(what))
            self._status.start()

    def stop(self) -> None:
        """Take the spinner away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def print_rows(rows: list[tuple[str, str]], *, to_stderr: bool = False) -> None:
    """Print labels and texts in two columns; a row without a label continues the one above."""
    width = max(len(label) for label, _ in rows)
    out = sys.stderr if to_stderr else sys.stdout
    for label, text in rows:
        print(f"  {label:<{width}}  {printable(text)}", file=out)
    out.flush()


def printable(text: str) -> str:
    """Text of a file with what would steer a terminal, or forge a line, written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _new_bars(*, animated: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=animated,
    )
    bars.start()
    return bars

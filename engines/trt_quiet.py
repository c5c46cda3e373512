"""Keep off the terminal what native code prints while a library is only asked something."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

_STDERR = 2
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hold back what is written to the process's stderr, and drop it unless the body raises.

    For calls whose refusal is an answer: the library prints it past the log that it was given.
    Nothing is held back where the descriptor is closed or there is no room for what it prints.
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            _flush()
            real = os.dup(_STDERR)
            stack.callback(os.close, real)
            stack.callback(os.dup2, real, _STDERR)
            os.dup2(held.fileno(), _STDERR)
        except OSError:
            yield
            return
        try:
            yield
        except BaseException:
            _flush()
            held.seek(0)
            with contextlib.suppress(OSError):
                os.write(real, held.read())
            raise
        finally:
            _flush()


def _flush() -> None:
    """What Python still holds goes where it was meant to go."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()

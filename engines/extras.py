"""Optional dependencies, asked for by the name of the extra that brings them.

Called at the head of whatever needs more than the base install, so that a missing package is one
sentence with its remedy and not an ImportError from inside. Looks, and imports nothing.
"""

from __future__ import annotations

from importlib.util import find_spec

from spec_export.engines.errors import MissingExtra


def require(extra: str, *modules: str) -> None:
    """Refuse to go on when a module of an extra is not installed.

    Args:
        extra: Name of the extra, as declared in `pyproject.toml`.
        *modules: Top-level import names the caller is about to import.

    Raises:
        MissingExtra: At least one is missing; names them all and the pip command.
    """
    missing = [name for name in modules if not _installed(name)]
    if missing:
        names, verb = " and ".join(missing), "is" if len(missing) == 1 else "are"
        raise MissingExtra(
            f"{names} {verb} not installed, and this step needs the extra [{extra}]: "
            f"pip install '.[{extra}]' in a clone of spec-export"
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # imported already, by something that left no spec behind
        return True

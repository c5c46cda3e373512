"""Write a directory, or a file, as a whole or not at all.

What is being made lies beside its destination under a hidden name and is renamed at the end, so an
interrupted or failed run leaves no half directory and an existing one as it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from spec_export.engines.errors import StorageError

# What bundles and exported directories hold at their top.
_OURS = frozenset(
    [
        *("manifest.json", "graphs.json", "target", "draft", "sampling", "text"),
        *("profile.json", "profile.json.partial"),
    ]
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LARGEST_DESCRIPTION = 16 << 20


@contextlib.contextmanager
def new_directory(destination: Path, marker: str) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `destination` when the block succeeds.

    Args:
        destination: where the directory ends up; one that is there already is replaced if it is
            empty, or of the same kind with nothing else in it.
        marker: name of the description by which a directory of the same kind is known.

    Raises:
        StorageError: `destination` is something else, or holds files of somebody else, or the disk
            is full or cannot be written.
    """
    check_replaceable(destination, marker)
    work = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
    try:
        work.mkdir(parents=True)
        yield work
        _replace(work, destination)
    except OSError as error:
        raise storage_error(error, destination) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_replaceable(destination: Path, marker: str) -> None:
    """Refuse early, before any work, to overwrite what is not ours."""
    try:
        _check_replaceable(destination, marker)
    except OSError as error:
        raise storage_error(error, destination) from error


def _check_replaceable(destination: Path, marker: str) -> None:
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_symlink() or not destination.is_dir():
        raise StorageError(f"{destination} exists and is not a directory; choose another -o")
    if not any(destination.iterdir()):
        return
    if not _is_described(destination / marker):
        raise StorageError(
            f"{destination} exists and has no {marker} of spec-export, so it is not ours to "
            "replace; choose another -o or remove it"
        )
    foreign = sorted(path.name for path in destination.iterdir() if not _is_ours(path.name))
    if foreign:
        raise StorageError(
            f"{destination} would be replaced, but holds {foreign[0]}, which is not ours; move it "
            "away, or choose another -o"
        )


def _is_ours(name: str) -> bool:
    """Whether it is of ours, or what a write that was killed has left beside it."""
    is_partial = name.startswith(".") and name.endswith(".partial")
    return name in _OURS or (is_partial and name[1:].rsplit(".", 2)[0] in _OURS)


def _is_described(file: Path) -> bool:
    """Whether a description is one of ours, of whatever version."""
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_DESCRIPTION:
            return False
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"schema", "producer", "models"} <= set(found)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there.

    Args:
        path: where it ends up; one that is there already stays until the new one is whole.
        content: of the file; text in UTF-8.

    Raises:
        StorageError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def storage_error(error: OSError, path: Path) -> StorageError:
    """Say what a failed write means."""
    if error.errno is None and isinstance(error, shutil.Error):  # a tree: (from, to, why) of each
        _, place, why = error.args[0][0]
        is_full = any(f"[Errno {number}]" in why for number in _FULL)
        return storage_error(OSError(errno.ENOSPC if is_full else None, why, place), path)
    if error.errno in _FULL:
        return StorageError(
            f"the disk is full: {path} was not written; free space and run the command again"
        )
    place = error.filename or path
    return StorageError(f"{place} could not be written: {error.strerror or error}")


def _replace(work: Path, destination: Path) -> None:
    if not destination.exists():
        work.rename(destination)
        return
    old = work.with_suffix(".old")
    destination.rename(old)
    try:
        work.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)

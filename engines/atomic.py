"""Write a directory as a whole or not at all.

What is being made lies beside its destination under a hidden name and is renamed at the end, so an
interrupted or failed run leaves no half directory and an existing one as it was.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from spec_export.engines.errors import StorageError


@contextlib.contextmanager
def new_directory(destination: Path, marker: str) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `destination` when the block succeeds.

    Args:
        destination: where the directory ends up; one that is there already is replaced if it holds
            `marker` or nothing.
        marker: file name by which a directory of the same kind is known.

    Raises:
        StorageError: `destination` is something else, or the disk is full or cannot be written.
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
    if any(destination.iterdir()) and not (destination / marker).is_file():
        raise StorageError(
            f"{destination} exists and has no {marker}, so it is not ours to replace; choose "
            "another -o or remove it"
        )


def storage_error(error: OSError, path: Path) -> StorageError:
    """Say what a failed write means."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
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

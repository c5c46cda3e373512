"""SHA-256 of files, and of all files of a directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from spec_export.engines.graphs import FileSpec

Progress = Callable[[str, int, int], None]
_BLOCK = 8 << 20


def no_progress(_: str, __: int, ___: int) -> None:
    """A progress callback that shows nothing; called with (what, done, total)."""


def hash_file(path: Path, progress: Progress = no_progress) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest, total, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress(f"verifying {path.name}", done, total)
    return digest.hexdigest()


def describe_files(
    directory: Path, sha256: Callable[[Path], str] = hash_file
) -> dict[str, FileSpec]:
    """Size and hash of every file below `directory`, by relative path."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {
        file.relative_to(directory).as_posix(): FileSpec(sha256(file), file.stat().st_size)
        for file in files
    }

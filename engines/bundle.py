"""Open a bundle as untrusted input, and keep track of what has been verified.

Every file is listed in the manifest with its size and SHA-256. Sizes and paths are checked at each
open; contents are hashed at build, at the first open of a file as it now lies on disk (remembered
by path, size, inode and times), and by `check`.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from spec_export.engines.consistency import check_manifest
from spec_export.engines.errors import IntegrityError
from spec_export.engines.external import check_external
from spec_export.engines.graphs import FileSpec as FileSpec
from spec_export.engines.hashing import Progress as Progress
from spec_export.engines.hashing import describe_files
from spec_export.engines.hashing import hash_file as hash_file
from spec_export.engines.hashing import no_progress as no_progress
from spec_export.engines.manifest import MANIFEST_FILE, MANIFEST_SCHEMA, Manifest
from spec_export.engines.strict import read_json

_REBUILD = "spec-export build EXPORTED -o BUNDLE"


@dataclass(frozen=True)
class Bundle:
    """A verified bundle directory.

    Attributes:
        path: the directory.
        manifest: its description.
        sha256: of `manifest.json`, which names the hash of everything else.
    """

    path: Path
    manifest: Manifest
    sha256: str

    def file(self, relative: str) -> Path:
        """Path of a listed file."""
        if relative not in self.manifest.files:
            raise IntegrityError(
                f"{self.path}: the manifest uses {relative!r} but does not list it"
            )
        return self.path / relative


class VerifiedFiles:
    """Remembers which files were hashed, so that opening a large bundle is quick.

    An unreadable or unwritable memory only costs hashing again.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, str] = {}
        if file is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                known = json.loads(file.read_text(encoding="utf-8"))
                self._known = {str(k): str(v) for k, v in dict(known).items()}

    def sha256(self, path: Path, progress: Progress = no_progress) -> str:
        """Hash of a file, from memory when it lies unchanged."""
        key = self._key(path)
        if key not in self._known:
            self._known[key] = hash_file(path, progress)
        return self._known[key]

    def save(self) -> None:
        """Write the memory; entries of files that have changed are dropped."""
        if self._file is None:
            return
        alive = {k: v for k, v in self._known.items() if self._is_current(k)}
        partial = self._file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(alive), encoding="utf-8")
            partial.replace(self._file)

    @staticmethod
    def _key(path: Path) -> str:
        found = path.stat()
        times = f"{found.st_mtime_ns}:{found.st_ctime_ns}"
        return f"{found.st_size}:{found.st_ino}:{times}:{path.resolve()}"

    def _is_current(self, key: str) -> bool:
        try:
            return self._key(Path(key.split(":", 4)[4])) == key
        except (OSError, IndexError):
            return False


def default_memory() -> VerifiedFiles:
    """The memory in the user's cache directory."""
    try:
        return VerifiedFiles(Path.home() / ".cache" / "spec-export" / "verified.json")
    except RuntimeError:
        return VerifiedFiles(None)


def open_bundle(
    path: Path, memory: VerifiedFiles | None = None, progress: Progress = no_progress
) -> Bundle:
    """Read and verify a bundle.

    Args:
        path: the bundle directory.
        memory: which files were hashed before; None hashes everything.
        progress: shown while hashing.

    Raises:
        SchemaError: the manifest is of another schema version or malformed.
        IntegrityError: a file is missing, altered, or lies outside the directory.
    """
    if not path.is_dir():
        raise IntegrityError(f"{path} is not a bundle: there is no such directory")
    manifest_file = path / MANIFEST_FILE
    if manifest_file.is_symlink():
        raise IntegrityError(f"{manifest_file} is a symbolic link; a bundle holds plain files only")
    if not manifest_file.is_file():
        raise IntegrityError(
            f"{path} is not a bundle: it has no {MANIFEST_FILE}; make one with "
            "`spec-export model-to-engine` or `spec-export build`"
        )
    manifest = read_json(manifest_file, Manifest, schema=MANIFEST_SCHEMA)
    check_manifest(manifest, str(manifest_file))
    for relative, spec in manifest.files.items():
        _check_file(path, relative, spec)
    memory = memory if memory is not None else VerifiedFiles(None)
    for relative, spec in manifest.files.items():
        found = memory.sha256(path / relative, progress)
        if found != spec.sha256:
            raise IntegrityError(
                f"{path / relative} was altered: its SHA-256 is {found[:16]}..., the manifest says "
                f"{spec.sha256[:16]}...; build the bundle again: {_REBUILD}"
            )
    for relative in manifest.files:
        if relative.endswith(".onnx"):
            check_external(path / relative, _beside(relative, manifest))
    memory.save()
    return Bundle(path, manifest, hash_file(manifest_file))


def list_files(directory: Path, memory: VerifiedFiles) -> dict[str, FileSpec]:
    """Size and hash of every file below `directory`, by relative path."""
    return describe_files(directory, memory.sha256)


def _check_file(root: Path, relative: str, spec: FileSpec) -> None:
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts or parts.as_posix() != relative:
        raise IntegrityError(
            f"{root}: the manifest lists {relative!r}, which is outside the bundle"
        )
    file = root / relative
    places = [root / parent for parent in parts.parents if parent.parts]
    try:
        is_link, is_file = any(place.is_symlink() for place in (file, *places)), file.is_file()
    except OSError as error:
        raise IntegrityError(
            f"{root}: the manifest lists a file that cannot be: {error}"
        ) from error
    if is_link:
        raise IntegrityError(f"{file} is a symbolic link; a bundle holds plain files only")
    if not is_file:
        raise IntegrityError(
            f"{file} is missing; copy the whole bundle, or build it again: {_REBUILD}"
        )
    size = file.stat().st_size
    if size != spec.bytes:
        raise IntegrityError(
            f"{file} has {size} bytes, the manifest says {spec.bytes}; it was cut or altered. "
            f"Copy it again, or build it again: {_REBUILD}"
        )


def _beside(relative: str, manifest: Manifest) -> frozenset[str]:
    folder = PurePosixPath(relative).parent
    listed = (PurePosixPath(name) for name in manifest.files)
    return frozenset(name.name for name in listed if name.parent == folder)

"""A directory is written as a whole or not at all, and a full disk is one clear sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_export.engines.atomic import check_replaceable, new_directory, storage_error, write_whole
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.bundle import open_bundle
from spec_export.engines.errors import BuildError, StorageError
from spec_export.engines.manifest import MANIFEST_FILE
from spec_export.engines.ort import OrtBackend
from tests.tiny_models import TINY

MARKER = "manifest.json"


def described(content: str) -> str:
    """A description of ours, as far as this is looked at."""
    return json.dumps({"schema": 1, "producer": {}, "models": {}, "content": content})


def make(destination: Path, content: str = "new") -> None:
    with new_directory(destination, MARKER) as work:
        (work / MARKER).write_text(described(content))
        (work / "target").mkdir()
        (work / "target" / "file").write_text(content)


def tree(folder: Path) -> dict[str, str | None]:
    """Everything below a folder, hidden files too."""
    return {
        path.relative_to(folder).as_posix(): path.read_text() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_a_directory_appears_whole(tmp_path):
    make(tmp_path / "deep" / "out")
    assert tree(tmp_path / "deep" / "out") == {
        MARKER: described("new"),
        "target": None,
        "target/file": "new",
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_one_of_the_same_kind_is_replaced_whole(tmp_path):
    make(tmp_path / "out", "old")
    (tmp_path / "out" / "target" / "more").write_text("of the old one")
    make(tmp_path / "out", "new")
    assert tree(tmp_path) == {
        "out": None,
        f"out/{MARKER}": described("new"),
        "out/target": None,
        "out/target/file": "new",
    }


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, BuildError])
@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, error, exists):
    if exists:
        make(tmp_path / "out", "old")
    before = tree(tmp_path)

    def failing() -> None:
        with new_directory(tmp_path / "out", MARKER) as work:
            (work / MARKER).write_text("half")
            raise error("stopped")

    with pytest.raises(error):
        failing()
    assert tree(tmp_path) == before


def test_what_is_not_ours_is_not_replaced(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(foreign)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    before = tree(tmp_path)
    for name in ("foreign", "file", "link", "dangling"):
        with pytest.raises(StorageError, match="choose another -o"):
            make(tmp_path / name)
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")


def test_a_name_the_file_system_refuses_is_one_sentence(tmp_path):
    with pytest.raises(StorageError, match="could not be written: File name too long"):
        check_replaceable(tmp_path / ("x" * 300), MARKER)


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        make(tmp_path / "file" / "out")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(tmp_path, number):
    def full() -> None:
        with new_directory(tmp_path / "out", MARKER):
            raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, match=r"the disk is full: .*out was not written; free space"):
        full()


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    make(tmp_path / "out", "old")
    before = tree(tmp_path)
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "the cable was pulled")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(StorageError, match="the cable was pulled"):
        make(tmp_path / "out", "new")
    assert tree(tmp_path) == before


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """Text and bytes; what was there stays until the new one is whole, and nothing else is left."""
    file = tmp_path / "profile.json"
    write_whole(file, "café")
    assert file.read_bytes() == b"caf\xc3\xa9"
    write_whole(file, b"\x00bytes")
    before = tree(tmp_path)

    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="the disk is full"):
        write_whole(file, "new")
    assert tree(tmp_path) == before
    with pytest.raises(StorageError, match="could not be written"):
        write_whole(tmp_path / "no" / "profile.json", "new")


@pytest.mark.parametrize("name", ["profile.json", "profile.json.partial", "manifest.json"])
def test_what_a_killed_write_left_is_ours_to_replace(tmp_path, name):
    make(tmp_path / "out", "old")
    (tmp_path / "out" / f".{name}.0123abcd.partial").write_text("half")
    make(tmp_path / "out", "new")
    (tmp_path / "out" / ".theirs.0123abcd.partial").write_text("half")
    with pytest.raises(StorageError, match="is not ours"):
        make(tmp_path / "out", "newer")


# --- a build and an export -----------------------------------------------------------------------

OPTIONS = BuildOptions(gamma=1, max_len=16, chunk=8)


def steps_of(exported: Path, out: Path) -> list[str]:
    """The steps of a build, as its progress names them."""
    names: list[str] = []
    build_bundle(exported, out, OrtBackend(), OPTIONS, progress=lambda name, *_: names.append(name))
    return list(dict.fromkeys(names))


def test_a_build_interrupted_at_any_step_leaves_the_old_bundle(tiny_exported, tmp_path):
    exported, out = tiny_exported("ngram"), tmp_path / "bundle"
    steps = steps_of(exported, out)
    assert len(steps) > 3
    before = open_bundle(out).sha256

    def stop_at(step: str):
        def progress(name: str, *_: int) -> None:
            if name == step:
                raise KeyboardInterrupt

        return progress

    for step in [step for step in steps if not step.startswith("verifying")]:
        with pytest.raises(KeyboardInterrupt):
            build_bundle(exported, out, OrtBackend(), OPTIONS, progress=stop_at(step))
        assert open_bundle(out).sha256 == before
        assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("call", ["copyfile", "copytree"])
def test_a_disk_that_fills_during_a_build_leaves_nothing(
    call, tiny_exported, tmp_path, monkeypatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, call, full)
    with pytest.raises(StorageError, match="the disk is full"):
        build_bundle(tiny_exported("ngram"), tmp_path / "bundle", OrtBackend(), OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB; the tiny target has 6."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip("a file system may not be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_build_onto_a_full_disk(tiny_exported, small_disk):
    with pytest.raises(StorageError, match="the disk is full"):
        build_bundle(tiny_exported("ngram"), small_disk / "bundle", OrtBackend(), OPTIONS)
    assert not list(small_disk.iterdir())


def test_an_export_onto_a_full_disk(export_pair, small_disk):
    with pytest.raises(StorageError, match="the disk is full"):
        export_pair(str(TINY / "target"), "none", small_disk / "exported")
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("content", ['{"manifest_version": 3}', "no json", '{"schema": 1}'])
def test_a_directory_with_a_file_of_that_name_is_not_ours(content, tmp_path):
    """`manifest.json` is also what browser extensions have: a build deleted their sources."""
    out = tmp_path / "extension"
    (out / "src").mkdir(parents=True)
    (out / MANIFEST_FILE).write_text(content)
    (out / "src" / "code.js").write_text("precious")
    with pytest.raises(StorageError, match="not ours to replace"):
        check_replaceable(out, MANIFEST_FILE)
    assert (out / "src" / "code.js").read_text() == "precious"


def test_what_somebody_put_into_a_bundle_is_not_deleted_with_it(tiny_bundle, tmp_path):
    out = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    check_replaceable(out, MANIFEST_FILE)
    (out / "profile.json").write_text("{}")
    check_replaceable(out, MANIFEST_FILE)
    (out / "my_results.csv").write_text("1")
    with pytest.raises(StorageError, match=r"holds my_results.csv, which is not ours"):
        check_replaceable(out, MANIFEST_FILE)


def test_a_disk_that_fills_up_while_a_tree_is_copied_is_one_sentence():
    """`shutil.copytree` has no error number of its own, and its list of tuples was shown."""
    why = "[Errno 28] No space left on device: 'a' -> 'b'"
    said = str(storage_error(shutil.Error([("a", "b", why)]), Path("out")))
    assert "the disk is full" in said and "[" not in said
    said = str(storage_error(shutil.Error([("a", "b", "[Errno 13] Permission denied")]), Path("c")))
    assert said.startswith("b could not be written: ") and "Permission denied" in said

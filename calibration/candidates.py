"""Models of a bundle in other precisions, quantized and opened here to be compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spec_export.calibration.memory import MemoryUse
from spec_export.calibration.observe import observe
from spec_export.calibration.precision_names import AS_BUILT
from spec_export.calibration.texts import token_texts
from spec_export.calibration.weight_sizes import quantized_bytes
from spec_export.engines.backend import Backend, Engine
from spec_export.engines.build import read_exported
from spec_export.engines.bundle import Progress, VerifiedFiles, no_progress
from spec_export.engines.byte_counts import size
from spec_export.engines.certify import exported_models, pinned_as
from spec_export.engines.errors import RequestError
from spec_export.engines.graphs import ModelSpec, QuantizationSpec
from spec_export.engines.quantize import Observed, quantize_exported
from spec_export.runtime import OpenedBundle


@dataclass(frozen=True)
class Candidate:
    """A model in a precision.

    Attributes:
        name: of the precision, such as `int4+head`.
        engine: the opened model.
        spec: its description, dimensions pinned.
        weights_bytes: of its weights.
    """

    name: str
    engine: Engine
    spec: ModelSpec
    weights_bytes: int

    @property
    def is_draft(self) -> bool:
        """Whether it drafts: it has passes of its own."""
        return any(role.name == "step" for role in self.spec.roles)


def check_comparable(opened: OpenedBundle) -> None:
    """Refuse a bundle whose precision cannot be compared with others here.

    Raises:
        RequestError: it is quantized itself, or another library's.
    """
    backend = opened.manifest.device.backend
    if backend != "onnxruntime":
        raise RequestError(
            f"precisions are compared on onnxruntime; for {backend} build a bundle of each "
            "(`build --weights ..`) and calibrate them one after another"
        )
    for name, spec in opened.manifest.models.items():
        if spec.quantization is not None or spec.dtype != AS_BUILT:
            raise RequestError(
                f"the {name} of this bundle is no {AS_BUILT} model; compare precisions from a "
                "bundle that was built without --weights and --dtype"
            )


def check_room(
    opened: OpenedBundle, wanted: Mapping[str, QuantizationSpec], use: MemoryUse, available: int
) -> None:
    """Refuse what does not fit: all candidates are open at a time, each with two sets of caches.

    Args:
        opened: the bundle as it was built.
        wanted: what to make of both models.
        use: of the bundle by itself.
        available: bytes there are.

    Raises:
        RequestError: with what is needed and what there is.
    """
    models = opened.manifest.models.values()
    weights = sum(quantized_bytes(spec, q) for spec in models for q in wanted.values())
    caches = 2 * len(wanted) * sum(use.caches.values())
    needed = use.total + weights + caches
    if needed > available:
        raise RequestError(
            f"precisions: the bundle and {len(wanted)} more of each model need {size(needed)}, "
            f"this machine has {size(available)}; name fewer with --precisions, one at a time"
        )


def make_candidates(
    opened: OpenedBundle,
    backend: Backend,
    exported: Path,
    wanted: Mapping[str, QuantizationSpec],
    folder: Path,
    progress: Progress = no_progress,
    memory: VerifiedFiles | None = None,
) -> dict[str, list[Candidate]]:
    """Quantize, compile and open the models of a bundle in every precision.

    Args:
        opened: the bundle, as built; its own models come first.
        backend: its library.
        exported: the directory it was built from.
        wanted: what to make of both models, by the name of the precision.
        folder: where to put them; they are read from there while they are open.
        progress: called with (step, done, total).
        memory: which files were hashed before.

    Returns:
        The candidates for `target` and, where there is one, for `draft`.

    Raises:
        IntegrityError: the directory is not what the bundle was built from.
        BuildError: a model cannot be quantized so.
    """
    manifest = opened.manifest
    memory = VerifiedFiles(None) if memory is None else memory
    exported_models(opened.bundle, exported, progress, memory)
    portable = read_exported(exported).models
    texts = token_texts(exported / manifest.text.tokenizer, None)
    engines = {"target": opened.target, "draft": opened.draft}
    found: dict[str, list[Candidate]] = {}
    for name, spec in manifest.models.items():
        engine = engines[name]
        assert engine is not None
        found[name] = [Candidate(AS_BUILT, engine, spec, spec.parameters_bytes)]
    seen: dict[str, Observed] = {}

    def observed(name: str) -> Observed:
        if name not in seen:
            graph = exported / portable[name].file
            seen[name] = observe(graph, portable[name], texts, backend.threads, progress=progress)
        return seen[name]

    for number, (title, quantization) in enumerate(wanted.items()):
        progress("quantizing", number, len(wanted))
        place = folder / f"{number}"
        place.mkdir()
        wanted_of = dict.fromkeys(portable, quantization)
        quantize_exported(exported, place, wanted_of, observed, memory=memory)
        for name, spec in pinned_as(manifest, read_exported(place)).items():
            found[name].append(_opened(title, backend, place, spec, manifest.capacity))
    progress("quantizing", len(wanted), len(wanted))
    return found


def _opened(title: str, backend: Backend, place: Path, spec: ModelSpec, capacity: int) -> Candidate:
    source = place / spec.file
    out = source.parent / "compiled"
    compiled = backend.compile_model(source, spec, capacity, out, True)
    engine = backend.open_model(out / compiled.file, spec)
    return Candidate(title, engine, spec, spec.parameters_bytes)

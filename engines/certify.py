"""Check a bundle anew on the device at hand: files, engines, exactness.

A bundle was checked when it was built. This repeats everything that needs neither torch nor the
checkpoint, on another device as well: hashes of all files, each engine against its standard graph,
and the exactness probe.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from spec_export.engines.atomic import write_whole
from spec_export.engines.backend import Backend
from spec_export.engines.build import BuildOptions, pinned_models, read_exported
from spec_export.engines.bundle import (
    Bundle,
    Progress,
    VerifiedFiles,
    hash_file,
    no_progress,
    open_bundle,
)
from spec_export.engines.compare import Comparison, Watch, unwatched
from spec_export.engines.errors import BundleError, EngineError, IntegrityError
from spec_export.engines.fitting import check_fits
from spec_export.engines.graphs import GraphsSpec, ModelSpec
from spec_export.engines.manifest import MANIFEST_FILE, DeviceSpec, ExactnessSpec, Manifest
from spec_export.engines.polygraphy_runs import PolygraphyRuns
from spec_export.engines.probe import probe_exactness
from spec_export.engines.standard import STANDARD_GRAPH, compare_with_standard, onnx_hashes
from spec_export.engines.strict import to_json

_RANK = {"unprobed": -1, "none": 0, "row_invariant": 1, "width_invariant": 2}


@dataclass(frozen=True)
class Certificate:
    """What a check of a bundle found.

    Attributes:
        bundle: name of the directory.
        bundle_sha256: of its manifest, which holds the hash of every other file.
        created: UTC time of the check, ISO 8601.
        built_on: the device the bundle was built on.
        device: the device of the check.
        files: files hashed.
        bytes: of them.
        engines: each engine against its standard graph, by model name.
        recorded: exactness when it was built.
        probed: exactness now.
        polygraphy: what Polygraphy says of the same outputs, by model name, where it was asked.
        uncompared: engines whose graph is not in the bundle, and was not given.
        fusion: what the inspector of each compiled engine shows of its attention.
        failures: a sentence for each check that failed.
    """

    bundle: str
    bundle_sha256: str
    created: str
    built_on: DeviceSpec
    device: DeviceSpec
    files: int
    bytes: int
    engines: dict[str, Comparison]
    recorded: ExactnessSpec
    probed: ExactnessSpec
    polygraphy: dict[str, str]
    uncompared: tuple[str, ...]
    fusion: dict[str, str]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return not self.failures

    @property
    def is_other_device(self) -> bool:
        """Whether the check ran on another processor, library or thread count than the build."""
        return self.device != self.built_on


def certify(
    path: Path,
    backend_for: Callable[[DeviceSpec], Backend],
    progress: Progress = no_progress,
    exported: Path | None = None,
    runs: Path | None = None,
) -> Certificate:
    """Check a bundle on this device.

    Args:
        path: the bundle directory.
        backend_for: opens the engine library for the device a bundle was built on.
        progress: called with (step, done, total).
        exported: the directory it was built from, for engines whose graph the bundle has not.
        runs: a directory for what both made of every pass, as Polygraphy keeps it; it then judges
            them as well.

    Raises:
        SchemaError: the manifest is of another schema version or malformed.
        IntegrityError: a file is missing, altered, or lies outside the directory; or `exported` is
            not what the bundle was built from.
        BundleError: the engines were compiled for another machine.
        EngineError: the engine library refuses an engine.
    """
    bundle = open_bundle(path, None, progress)
    manifest = bundle.manifest
    backend = backend_for(manifest.device)
    check_fits(manifest.device, manifest.compiler, backend.describe())
    fusion, unfused = _inspect(bundle, backend)
    judges = _Judges(bundle, runs)
    engines = _compare(bundle, backend, exported, judges, progress)
    polygraphy, disagreements = judges.verdicts(engines)
    target = manifest.models["target"]
    engine = backend.open_model(bundle.file(target.file), target)
    probed = probe_exactness(
        backend.device, engine, target, manifest.capacity, manifest.max_len, progress
    )
    return Certificate(
        bundle=bundle.path.resolve().name,
        bundle_sha256=bundle.sha256,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        built_on=manifest.device,
        device=backend.describe(),
        files=len(manifest.files),
        bytes=sum(spec.bytes for spec in manifest.files.values()),
        engines=engines,
        recorded=manifest.exactness,
        probed=probed,
        polygraphy=polygraphy,
        uncompared=tuple(name for name in manifest.models if name not in engines),
        fusion=fusion,
        failures=(
            *unfused,
            *disagreements,
            *_failures(engines, manifest.exactness, probed),
        ),
    )


def record(path: Path, certificate: Certificate) -> str:
    """Write what a check found into the manifest: exactness, and the device it holds for.

    The manifest is replaced as a whole or not at all. Its hash, which names the bundle, changes.

    Returns:
        The new hash.

    Raises:
        BundleError: the check failed, or the bundle is another one by now.
        StorageError: the manifest cannot be written.
    """
    bundle = open_bundle(path, VerifiedFiles(None))
    if not certificate.passed or bundle.sha256 != certificate.bundle_sha256:
        reason = certificate.failures[0] if certificate.failures else "it changed meanwhile"
        raise BundleError(f"{path}: nothing is recorded: {reason}")
    manifest = replace(bundle.manifest, exactness=certificate.probed, device=certificate.device)
    file = path / MANIFEST_FILE
    write_whole(file, to_json(manifest))
    return hash_file(file)


class _Judges:
    """Polygraphy's runs of each model, where they are asked for."""

    def __init__(self, bundle: Bundle, folder: Path | None) -> None:
        self._folder = folder
        self._runs: dict[str, PolygraphyRuns] = {}
        if folder is not None:
            names = bundle.manifest.device.backend, "standard graph in onnxruntime"
            self._runs = {name: PolygraphyRuns(*names) for name in bundle.manifest.models}

    def watch(self, name: str) -> Watch:
        """What looks at the passes of a model."""
        return self._runs[name].add if name in self._runs else unwatched

    def verdicts(self, engines: dict[str, Comparison]) -> tuple[dict[str, str], list[str]]:
        """Write the runs; what Polygraphy says of each, and a sentence for each that fails."""
        said, failures = {}, []
        for name, runs in self._runs.items():
            if self._folder is None or name not in engines:
                continue
            file, result = self._folder / f"{name}.json", engines[name]
            runs.save(file)
            wrong = runs.disagreements(result.tolerance, result.cache_tolerance)
            said[name] = f"{runs.outputs - len(wrong)} of {runs.outputs} outputs agree, in {file}"
            if wrong:
                failures.append(
                    f"Polygraphy finds {len(wrong)} outputs of the {name} too far apart, the first "
                    f"is {wrong[0]}"
                )
        return said, failures


def _compare(
    bundle: Bundle, backend: Backend, exported: Path | None, judges: _Judges, progress: Progress
) -> dict[str, Comparison]:
    """Each engine against its standard graph, in the bundle or in the exported directory."""
    manifest = bundle.manifest
    if all(_standard(spec) in manifest.files for spec in manifest.models.values()):
        return _compare_with(bundle, backend, None, {}, judges, progress)
    if exported is None:
        return {}
    described = exported_models(bundle, exported, progress)
    from spec_export.engines.quantize import requantized

    specs = manifest.models.items()
    wanted = {name: spec.quantization for name, spec in specs if spec.quantization is not None}
    with requantized(exported, wanted) as reference:
        return _compare_with(bundle, backend, reference, described, judges, progress)


def _compare_with(
    bundle: Bundle,
    backend: Backend,
    folder: Path | None,
    described: dict[str, ModelSpec],
    judges: _Judges,
    progress: Progress,
) -> dict[str, Comparison]:
    """Each engine against a graph in `folder`, or against the one in the bundle."""
    found: dict[str, Comparison] = {}
    manifest = bundle.manifest
    for name, spec in manifest.models.items():
        step = f"checking the compiled {name}"
        progress(step, 0, 1)
        graph, theirs = None, None
        if folder is not None:
            theirs = replace(described[name], roles=spec.roles)
            graph = folder / theirs.file
        found[name] = compare_with_standard(
            backend, bundle.path, spec, manifest.max_len, graph, theirs, judges.watch(name)
        )
        progress(step, 1, 1)
    return found


def _standard(spec: ModelSpec) -> str:
    return str(PurePosixPath(spec.file).with_name(STANDARD_GRAPH))


def exported_models(
    bundle: Bundle, exported: Path, progress: Progress, memory: VerifiedFiles | None = None
) -> dict[str, ModelSpec]:
    """The models of an exported directory, which has to be what the bundle was built from.

    Args:
        bundle: that was built.
        exported: the directory.
        progress: called with (step, done, total).
        memory: which files were hashed before.

    Raises:
        IntegrityError: it is another one; names the file.
    """
    manifest = bundle.manifest
    graphs = read_exported(exported)
    found = onnx_hashes(exported, graphs, progress, memory)
    for name in sorted({*found, *manifest.onnx}):
        if found.get(name) != manifest.onnx.get(name):
            raise IntegrityError(
                f"{exported / name} is not what {bundle.path.name} was built from (SHA-256 "
                f"{found.get(name, 'missing')}, the manifest says {manifest.onnx.get(name)}); "
                "name the directory it was built from"
            )
    return pinned_as(manifest, graphs)


def pinned_as(manifest: Manifest, graphs: GraphsSpec) -> dict[str, ModelSpec]:
    """The models of an exported directory with the shapes of a bundle."""
    *narrower, gamma = manifest.gammas or (0,)
    options = BuildOptions(gamma, manifest.max_len, manifest.chunk, narrower=tuple(narrower))
    return pinned_models(graphs, options)


def _inspect(bundle: Bundle, backend: Backend) -> tuple[dict[str, str], list[str]]:
    """What inspectors show of attention, and a sentence for each layer that was not fused.

    An inspector that shows nothing proves nothing, and fails nothing: the builder had to fuse.
    """
    shown, failures = {}, []
    for name in bundle.manifest.engines:
        try:
            layers = backend.unfused(bundle.file(bundle.manifest.models[name].file))
        except EngineError as error:
            shown[name] = f"not seen: {error}"
            continue
        shown[name] = f"spelled out in {len(layers)} layers" if layers else "no layer spells it out"
        failures += [
            f"the attention {layer} of the {name} was not fused: it reads and copies the whole "
            "cache; build with --dtype float16 or bfloat16 and a library whose kernels have this "
            "head size"
            for layer in layers
        ]
    return shown, failures


def _failures(
    engines: dict[str, Comparison], recorded: ExactnessSpec, probed: ExactnessSpec
) -> list[str]:
    failures = [
        f"the compiled {name} does not compute its graph: {result.describe()}"
        for name, result in engines.items()
        if not result.agrees
    ]
    if _RANK[probed.kind] < _RANK[recorded.kind]:
        failures.append(
            f"exactness is {probed.kind} here, the manifest records {recorded.kind}: "
            f"{probed.reason}; build the bundle on this device"
        )
    return failures

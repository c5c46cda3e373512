"""Check a bundle anew on the device at hand: files, engines, exactness.

A bundle was checked when it was built. This repeats everything that needs neither torch nor the
checkpoint, on another device as well: hashes of all files, each engine against its standard graph,
and the exactness probe.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spec_export.engines.backend import Backend
from spec_export.engines.build import compare_with_standard
from spec_export.engines.bundle import Bundle, Progress, no_progress, open_bundle
from spec_export.engines.compare import Comparison
from spec_export.engines.fitting import check_fits
from spec_export.engines.manifest import DeviceSpec, ExactnessSpec
from spec_export.engines.probe import probe_exactness

_RANK = {"none": 0, "row_invariant": 1, "width_invariant": 2}


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
) -> Certificate:
    """Check a bundle on this device.

    Args:
        path: the bundle directory.
        backend_for: opens the engine library for the device a bundle was built on.
        progress: called with (step, done, total).

    Raises:
        SchemaError: the manifest is of another schema version or malformed.
        IntegrityError: a file is missing, altered, or lies outside the directory.
        BundleError: the engines were compiled for another machine.
        EngineError: the engine library refuses an engine.
    """
    bundle = open_bundle(path, None, progress)
    manifest = bundle.manifest
    backend = backend_for(manifest.device)
    check_fits(manifest.device, manifest.compiler, backend.describe())
    engines = _compare(bundle, backend, progress)
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
        failures=tuple(_failures(engines, manifest.exactness, probed)),
    )


def _compare(bundle: Bundle, backend: Backend, progress: Progress) -> dict[str, Comparison]:
    found = {}
    for name, spec in bundle.manifest.models.items():
        step = f"checking the compiled {name}"
        progress(step, 0, 1)
        found[name] = compare_with_standard(backend, bundle.path, spec, bundle.manifest.max_len)
        progress(step, 1, 1)
    return found


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

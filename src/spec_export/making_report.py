"""What `export`, `build` and `model-to-engine` report when they are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spec_export.console import size

if TYPE_CHECKING:
    from pathlib import Path

    from spec_export.engines.bundle import Bundle
    from spec_export.engines.graphs import GraphsSpec, ModelSpec, ParitySpec
    from spec_export.engines.manifest import DeviceSpec, ExactnessSpec, Manifest
    from spec_export.export.exporter import ExportedPair
    from spec_export.making import Made
    from spec_export.runtime.compare import SelfCheck

Rows = list[tuple[str, str]]
METHODS = {
    "model": "model (a drafting model)",
    "ngram": "ngram (prompt lookup)",
    "none": "none (plain decoding)",
}
MEANING = {
    "width_invariant": "output with drafts has the bits of exact plain decoding",
    "row_invariant": "output with drafts has the bits of plain decoding at the verify width",
    "none": "bits depend on the width of a pass, so nothing is promised bit by bit",
    "unprobed": "not on this device; `spec-export check` probes it",
}


def gammas(manifest: Manifest) -> str:
    """Drafts per round that a bundle was built for."""
    return ", ".join(map(str, manifest.gammas)) or "0"


def exported_rows(pair: ExportedPair) -> Rows:
    """Report of an export."""
    graphs = pair.graphs
    weights = sum(spec.parameters_bytes for spec in graphs.models.values())
    rows = [
        ("exported", f"{pair.path}"),
        ("method", METHODS[graphs.method]),
        *parity_rows(graphs.parity),
        ("weights", size(weights)),
    ]
    return [*rows, ("next", f"spec-export build {pair.path} -o BUNDLE")]


def quantized_rows(path: Path, graphs: GraphsSpec) -> Rows:
    """Report of a quantization."""
    weights = sum(spec.parameters_bytes for spec in graphs.models.values())
    return [
        ("quantized", f"{path}"),
        *quantization_rows(graphs.models),
        ("weights", size(weights)),
        ("next", f"spec-export build {path} -o BUNDLE"),
    ]


def quantization_rows(models: dict[str, ModelSpec]) -> Rows:
    """What was made smaller; a quantized target is another model, and says so."""
    rows = []
    for name, spec in models.items():
        if spec.quantization is not None:
            note = "; this is the target from here on" if name == "target" else ""
            rows.append(("precision", f"{name}: {spec.quantization.describe()}{note}"))
    return rows


def lost_rows(out: Path) -> Rows:
    """What a bundle that is about to be replaced has, and the new one will not; ask before."""
    if not (out / "profile.json").is_file():
        return []
    gone = "that of the bundle replaced is gone; spec-export calibrate measures this one"
    return [("profile", gone)]


def made_rows(made: Made, lost: Sequence[tuple[str, str]] = ()) -> Rows:
    """Report of a build; `lost` is what `lost_rows` found before it."""
    manifest = made.bundle.manifest
    path = made.bundle.path
    return [
        ("bundle", f"{path} ({size(bundle_bytes(made.bundle))})"),
        ("hash", made.bundle.sha256),
        ("method", f"{METHODS[manifest.method]}, gamma {gammas(manifest)}"),
        ("context", f"{manifest.max_len} tokens, prefill {manifest.chunk} at a time"),
        *parity_rows(manifest.parity, manifest.models),
        *quantization_rows(manifest.models),
        *(("lowered", f"{name}: {', '.join(how)}") for name, how in manifest.lowered.items()),
        ("exactness", exactness(manifest.exactness)),
        *([("self-check", self_check(made.self_check))] if made.self_check else []),
        ("device", device(manifest.device)),
        *compiler_rows(manifest),
        *lost,
        ("next", _next(made)),
    ]


def compiler_rows(manifest: Manifest) -> Rows:
    """What engines of a GPU were compiled for."""
    compiler = manifest.compiler
    if compiler is None:
        return []
    targets = ", ".join(compiler.compute_capabilities)
    rows = [("compiled for", f"compute capability {targets}" if targets else "the GPU above")]
    rows += [("precision", f"{name}: {e.precision}") for name, e in manifest.engines.items()]
    rows += [("option", f"{name} {value}") for name, value in compiler.options.items()]
    if compiler.timing_cache_sha256 is not None:
        rows.append(("timing cache", compiler.timing_cache_sha256))
    return rows


def _next(made: Made) -> str:
    path = made.bundle.path
    if made.bundle.manifest.exactness.kind != "unprobed":
        return f'spec-export run {path} --prompt "..."'
    return (
        f"copy {path} and EXPORTED to the device, then: spec-export check {path.name} "
        "--exported EXPORTED --record"
    )


def bundle_bytes(bundle: Bundle) -> int:
    """Size of all files a manifest lists."""
    return sum(file.bytes for file in bundle.manifest.files.values())


def parity_rows(
    parity: dict[str, ParitySpec], models: Mapping[str, ModelSpec] | None = None
) -> Rows:
    """What the check against the checkpoint found, per model; of those quantized since, before."""
    now = {name for name, spec in (models or {}).items() if spec.quantization is not None}
    return [
        (
            "parity",
            f"{name}{', before it was quantized' if name in now else ''}: within "
            f"{found.worst_logit:.2g} of torch (allowed {found.tolerance:.2g}), best token the "
            f"same in {found.argmax_agreement:.2%}, {found.cases} passes up to position "
            f"{found.positions}",
        )
        for name, found in parity.items()
    ]


def exactness(found: ExactnessSpec) -> str:
    """An exactness class, what it means, and what it rests on."""
    text = f"{found.kind}: {MEANING[found.kind]} ({found.rows} rows compared)"
    return text if found.kind == "width_invariant" else f"{text}; {found.reason}"


def self_check(found: SelfCheck) -> str:
    """What decoding with and without drafts gave."""
    what = f"{found.tokens} tokens with drafts ({found.accepted} accepted)"
    if found.departs_at is None:
        return f"{what} are those without"
    return f"{what} differ from those without at token {found.departs_at}"


def device(spec: DeviceSpec) -> str:
    """Library, processor and threads."""
    threads = f"{spec.threads} thread{'s' if spec.threads != 1 else ''}"
    where = f"{spec.processor} ({spec.machine}), {threads}"
    if spec.gpu is not None:
        gpu = spec.gpu
        where = (
            f"{gpu.name} (compute capability {gpu.compute_capability}, driver for CUDA "
            f"{gpu.driver}, CUDA {gpu.cuda}), {where}"
        )
    return f"{spec.backend} {spec.version}, {where}"

"""Check a bundle on this device and print a certificate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_export.console import Steps, print_rows, size
from spec_export.making_report import Rows, device, exactness

if TYPE_CHECKING:
    from spec_export.engines.backend import Backend
    from spec_export.engines.certify import Certificate
    from spec_export.engines.compare import Comparison
    from spec_export.engines.manifest import DeviceSpec
    from spec_export.runtime.law import LawResult


_UNCOMPARED = "not compared, its graph is not in the bundle: name it with --exported DIR"


def check(
    path: Path,
    threads: int | None,
    *,
    law: bool,
    as_json: bool,
    quiet: bool,
    exported: Path | None = None,
    recorded: bool = False,
    runs: Path | None = None,
) -> bool:
    """Check a bundle, print what was found, and record it if asked to; whether it passed."""
    from spec_export.engines.certify import certify, record
    from spec_export.runtime.law import check_law
    from spec_export.runtime.opened import make_backend, open_runtime

    def backend_for(built_on: DeviceSpec) -> Backend:
        return make_backend(built_on.backend, threads or built_on.threads)

    with Steps(quiet=quiet or as_json) as steps:
        found = certify(path, backend_for, steps, exported, runs)
        laws = check_law(open_runtime(path, threads=threads), progress=steps) if law else []
    if as_json:
        shown = to_object(found) | ({"law": [law_object(result) for result in laws]} if law else {})
        print(json.dumps(shown, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_rows([*rows(found), *(("law", law_line(result)) for result in laws)])
    if recorded and found.passed:
        renamed = record(path, found)
        if not as_json:
            print_rows([("recorded", f"the manifest now says so; the bundle's hash is {renamed}")])
    return found.passed and all(result.holds for result in laws)


def law_line(result: LawResult) -> str:
    """What the test of a rule found."""
    verdict = "emits the target's law" if result.holds else "DOES NOT emit the target's law"
    return (
        f"rule {result.rule} {verdict}: {result.texts} texts of about three rounds, chi-square "
        f"{result.statistic:.0f} over {result.cells} cells (allowed {result.limit:.0f})"
    )


def law_object(result: LawResult) -> dict[str, Any]:
    """The test of a rule as a JSON object."""
    return {"holds": result.holds, **dataclasses.asdict(result)}


def rows(found: Certificate) -> Rows:
    """The certificate."""
    verdict = "passed" if found.passed else f"FAILED ({len(found.failures)})"
    shown = [
        ("certificate", f"{verdict}, {found.created}"),
        ("bundle", found.bundle),
        ("hash", found.bundle_sha256),
        ("device", device(found.device)),
        ("files", f"{found.files} with the recorded hashes, {size(found.bytes)}"),
        *(("parity", f"{name}: {_engine(result)}") for name, result in found.engines.items()),
        *(("parity", f"{name}: {_UNCOMPARED}") for name in found.uncompared),
        *(("polygraphy", f"{name}: {said}") for name, said in found.polygraphy.items()),
        *(("attention", f"{name}: {what}") for name, what in found.fusion.items()),
        ("exactness", exactness(found.probed)),
        *(("failed", failure) for failure in found.failures),
    ]
    if found.is_other_device:
        shown.append(
            ("note", f"this is a certificate for this device; built on {device(found.built_on)}")
        )
    return shown


def to_object(found: Certificate) -> dict[str, Any]:
    """The certificate as a JSON object."""
    fields = dataclasses.asdict(found)
    return {"passed": found.passed, "is_other_device": found.is_other_device, **fields}


def _engine(result: Comparison) -> str:
    agrees = "computes" if result.agrees else "does not compute"
    touched = f", {result.touched} wrote elsewhere" if result.touched else ""
    as_run = (
        ""
        if result.as_run is None
        else f"; as it runs, in 8 bits row by row, the best is the same in {result.as_run:.2%}"
    )
    return (
        f"the engine {agrees} its standard graph, within {result.worst_logit:.2g} (allowed "
        f"{result.tolerance:.2g}), caches within {result.worst_cache:.2g} (allowed "
        f"{result.cache_tolerance:.2g}), best token the same in {result.argmax_agreement:.2%}, "
        f"{result.passes} passes{touched}{as_run}"
    )

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


def check(path: Path, threads: int | None, *, as_json: bool, quiet: bool) -> bool:
    """Check a bundle, print what was found; whether it passed."""
    from spec_export.engines.certify import certify
    from spec_export.runtime.opened import make_backend

    def backend_for(built_on: DeviceSpec) -> Backend:
        return make_backend(built_on.backend, threads or built_on.threads)

    with Steps(quiet=quiet or as_json) as steps:
        found = certify(path, backend_for, steps)
    if as_json:
        print(json.dumps(to_object(found), ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_rows(rows(found))
    return found.passed


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
    return (
        f"the engine {agrees} its standard graph, within {result.worst_logit:.2g} (allowed "
        f"{result.tolerance:.2g}), best token the same in {result.argmax_agreement:.2%}, "
        f"{result.passes} passes{touched}"
    )

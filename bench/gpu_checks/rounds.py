"""Rounds as graphs, and the time of one that its call on the device does not account for."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_checks.device import open_device
from gpu_checks.report import Skip
from gpu_checks.texts import PROMPT, decode

HOST_GAP_US = 50.0
# How a text goes on: temperature, and drafts in a round.
WAYS = {"rounds": (0.0, True), "drawn rounds": (1.0, True), "plain steps": (0.0, False)}
WARM, MOST_ROUNDS, LEAST_ROUNDS = 4, 64, 4


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
            assert session._pipeline._ahead is not None, "it does not run ahead"
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

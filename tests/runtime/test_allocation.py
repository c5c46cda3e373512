"""In a round our code makes no array, no OrtValue and no binding, and one copy to the host.

Counted three ways: constructors called, memory that Python and numpy hold, and downloads.
"""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.capi import _pybind_state as native

from spec_export.runtime import Sampling, Session
from spec_export.runtime.drafts import NgramDraft

ARRAY_MAKERS = (
    *("array", "asarray", "ascontiguousarray", "copy", "frombuffer", "fromiter"),
    *("empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like"),
    *("arange", "linspace", "concatenate", "stack", "tril", "resize", "repeat", "pad"),
)
ROUNDS = 200
DRAFTS = ("pair", "ngram", "none")
TEMPERATURES = (0.0, 1.0)


@contextmanager
def counted_constructors() -> Iterator[Counter[str]]:
    """Count every call of a constructor of arrays, OrtValues, bindings and sessions."""
    made: Counter[str] = Counter()

    def counting(name, function):
        def count(*args, **kwargs):
            made[name] += 1
            return function(*args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in ARRAY_MAKERS:
            patch.setattr(np, name, counting(f"np.{name}", getattr(np, name)))
        for name in ("ortvalue_from_numpy", "ortvalue_from_shape_and_type"):
            patch.setattr(ort.OrtValue, name, counting(name, getattr(ort.OrtValue, name)))
        for owner, name in (
            (ort.InferenceSession, "io_binding"),
            (ort.InferenceSession, "run"),
            (ort, "RunOptions"),
            (native, "SessionIOBinding"),
        ):
            patch.setattr(owner, name, counting(name, getattr(owner, name)))
        yield made


def started(opened, temperature: float, draft_confidence: float = 0.0) -> Session:
    """A session some rounds into a text: what is made on first use has been made."""
    session = Session(opened)
    session.begin(Sampling(temperature, 5), draft_confidence=draft_confidence)
    session.prefill(opened.text.encode("And it came to pass, and it came to pass, and it"))
    session.first()
    run_rounds(session, 30)
    return session


def run_rounds(session: Session, count: int, before=lambda: None, after=lambda: None) -> int:
    """Rounds of the built gamma; near the end of the context the text is taken back."""
    drafted = 0
    for _ in range(count):
        if session.room <= session.gamma + 1:
            session.rewind(40)
        before()
        drafted += session.round(session.gamma).n_draft
        after()
    return drafted


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_round_constructs_nothing(draft, temperature, build_tiny, open_once):
    session = started(open_once(build_tiny(draft)), temperature)
    with counted_constructors() as made:
        drafted = run_rounds(session, ROUNDS)
    assert (drafted > ROUNDS // 4) == (draft != "none")
    assert not made


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_round_that_may_stop_early_constructs_nothing(temperature, build_tiny, open_once):
    """Beside the report it brings four bytes for each draft that another may follow."""
    opened = open_once(build_tiny("pair"))
    device = CountingDevice(opened.device)
    session = started(replace(opened, device=device), temperature, 0.15)
    with counted_constructors() as made:
        drafted = run_rounds(session, ROUNDS)
    assert not made and ROUNDS < drafted < 3 * ROUNDS
    session.rewind(40)
    for _ in range(20):
        device.counts.clear()
        result = session.round(session.gamma)
        looked_at = min(result.n_draft, session.gamma - 1)
        assert device.counts["download"] == 1 + looked_at
        report = 8 + 12 * (session.gamma + 1)
        assert device.counts["downloaded bytes"] == report + 4 * looked_at
        if session.room <= session.gamma + 1:
            session.rewind(40)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_memory_is_flat_over_rounds_that_may_stop_early(temperature, build_tiny, open_once):
    session = started(open_once(build_tiny("pair")), temperature, 0.15)
    session.rewind(40)
    found = measured(session)
    assert found.kept < KEPT, found
    assert found.passing < PASSING, found


def test_the_count_sees_what_it_counts(tiny_bundle, open_once):
    """Negative control: opening a session makes arrays and bindings, through the same names."""
    opened = open_once(tiny_bundle)
    with counted_constructors() as made:
        Session(opened)
        ort.OrtValue.ortvalue_from_numpy(np.zeros(2, np.float32))
    makers = {"np.zeros", "np.arange", "io_binding", "SessionIOBinding", "ortvalue_from_numpy"}
    assert makers <= set(made)


@dataclass(frozen=True)
class Memory:
    """Bytes that stay after `ROUNDS` rounds, and the median of what one round adds on its way."""

    kept: int
    passing: int


def measured(session: Session, in_a_round=lambda: None) -> Memory:
    """Memory of rounds over the same stretch of text, gone over three times and measured twice."""

    def begin() -> None:
        before_round[0] = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    def end() -> None:
        in_a_round()
        peaks[done[0] % ROUNDS] = tracemalloc.get_traced_memory()[1] - before_round[0]
        done[0] += 1

    # Arrays of fixed size, so that measuring keeps nothing itself.
    before_round, done, peaks = (array("q", bytes(8 * n)) for n in (1, 1, ROUNDS))
    tracemalloc.start()
    try:
        for _ in range(2):
            before = tracemalloc.get_traced_memory()[0] - index_bytes(session)
            run_rounds(session, ROUNDS, begin, end)
            session.rewind(40)
            kept = tracemalloc.get_traced_memory()[0] - index_bytes(session) - before
    finally:
        tracemalloc.stop()
    return Memory(kept, sorted(peaks)[ROUNDS // 2])


def index_bytes(session: Session) -> int:
    """The table of prompt lookup, which may change its size when as many entries come and go."""
    draft = session.draft
    return sys.getsizeof(draft._index._after) if isinstance(draft, NgramDraft) else 0


# Kept: the smallest object Python can leak has 16 bytes, an array 112. Not quite 0, because a list
# that was longer once keeps its room.
KEPT = 16 * ROUNDS
# On the way: the largest things a round may make are Python's own, lists of gamma + 1 numbers,
# argument tuples, frames; 200 to 360 bytes were measured. A row of logits has 4124.
PASSING = 1024


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_memory_is_flat_over_rounds(draft, temperature, build_tiny, open_once):
    """Nothing is kept from round to round, and nothing as large as a row is made on the way."""
    session = started(open_once(build_tiny(draft)), temperature)
    session.rewind(40)
    found = measured(session)
    assert found.kept < KEPT, found
    assert found.passing < PASSING, found


def test_a_leak_and_a_passing_array_are_seen(tiny_bundle, open_once):
    """Negative controls: the smallest array kept each round, and a row of logits let go again."""
    session = started(open_once(tiny_bundle), 0.0)
    session.rewind(40)
    leaked = []
    assert measured(session, lambda: leaked.append(np.zeros(1, np.int64))).kept > KEPT
    row = (1, session._spec.vocabulary)
    assert measured(session, lambda: np.zeros(row, np.float32)).passing > PASSING


class CountingReader:
    """Counts what it brings to the host."""

    def __init__(self, reader, counts: Counter[str]) -> None:
        self._reader, self._counts = reader, counts
        self.host, self.wait = reader.host, reader.wait

    def start(self) -> None:
        self._counts["download"] += 1
        self._counts["downloaded bytes"] += self.host.nbytes
        self._reader.start()


class CountingDevice:
    """Passes everything on to a device and counts the verbs."""

    def __init__(self, device) -> None:
        self._device, self.counts = device, Counter()
        self.is_deferred, self.alignment = device.is_deferred, device.alignment

    def reader(self, source) -> CountingReader:
        return CountingReader(self._device.reader(source), self.counts)

    def __getattr__(self, verb):
        function = getattr(self._device, verb)

        def count(*args):
            self.counts[verb] += 1
            if verb == "download":
                self.counts["downloaded bytes"] += args[0].nbytes
            return function(*args)

        return count


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_round_makes_one_small_host_copy(draft, temperature, build_tiny, open_once):
    """The report: 8 bytes and 12 per row. No logits, no distribution, no cache comes back."""
    opened = open_once(build_tiny(draft))
    device = CountingDevice(opened.device)
    session = started(replace(opened, device=device), temperature)
    for _ in range(20):
        if session.room <= session.gamma + 1:
            session.rewind(40)
        device.counts.clear()
        session.round(session.gamma)
        assert device.counts["download"] == 1
        assert device.counts["downloaded bytes"] == 8 + 12 * (session.gamma + 1)
        assert device.counts["allocate"] == device.counts["clear"] == 0

"""Several candidates for one position: acceptance as fractions, and the law of what comes out."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from spec_export.export.sampling_candidates import candidates_graph
from spec_export.runtime.noise import Noise, Stream, race_size
from tests.chi_square import fit
from tests.sampling_run import open_graph, padded, run_session

GRID = 24  # every ratio of the two pairs that is below 1 is a multiple of 1/24
FIRST = (("1/2", "3/10", "1/5"), ("2/5", "1/5", "2/5"))
SECOND = (("1/10", "1/10", "4/5"), ("3/5", "3/10", "1/10"))
ACCEPTED = [
    (FIRST, True, ("4/5", "23/25", "239/250")),
    (FIRST, False, ("4/5", "29/30", "1")),
    (SECOND, True, ("3/10", "37/100", "433/1000")),
    (SECOND, False, ("3/10", "127/280", "1")),
]


def fractions(row: tuple[str, ...]) -> list[Fraction]:
    return [Fraction(x) for x in row]


def rows_of_q(q: list[Fraction], candidates: tuple[int, ...], replaced: bool) -> list[list]:
    """The distribution each candidate is drawn from."""
    rows, taken = [], set()
    for c in candidates:
        left = [Fraction(0) if i in taken else x for i, x in enumerate(q)]
        rows.append([x / sum(left) for x in left])
        taken |= set() if replaced else {c}
    return rows


class Candidates:
    """The graph over three tokens."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._session = open_graph(ir.to_proto(candidates_graph(3, count)))
        self.race = np.ones((1, race_size(3)), np.float32)

    def __call__(self, p, rows, candidates, uniform: NDArray) -> tuple[int, int]:
        made = run_session(
            self._session,
            {
                "p": padded(np.array([p], np.float32)),
                "q": padded(np.array(rows, np.float32)),
                "candidates": np.array(candidates),
                "uniform": np.asarray(uniform, np.float32),
                "race": self.race,
            },
        )
        return int(made["choice"][0]), int(made["token"][0])

    def acceptance(self, p, rows, candidates) -> Fraction:
        """The chance that one of them stays: each tried over a grid after the others failed."""
        refused = Fraction(1)
        for j in range(self.count):
            uniform, kept = np.full(self.count, 1 - 1e-6), 0
            if self(p, rows, candidates, uniform)[0] < j:
                return Fraction(1)  # an earlier one stays whatever its number is
            for step in range(GRID):
                uniform[j] = (step + 0.5) / GRID
                kept += self(p, rows, candidates, uniform)[0] == j
            refused *= 1 - Fraction(kept, GRID)
        return 1 - refused


@pytest.mark.parametrize(("pair", "replaced", "expected"), ACCEPTED)
def test_acceptance_of_several_candidates_as_fractions(pair, replaced, expected) -> None:
    p, q = map(fractions, pair)
    for count, fraction in enumerate(expected, start=1):
        graph, total = Candidates(count), Fraction(0)
        for candidates in itertools.product(range(3), repeat=count):
            if not replaced and len(set(candidates)) < count:
                continue
            rows = rows_of_q(q, candidates, replaced)
            weight = Fraction(1)
            for row, c in zip(rows, candidates, strict=True):
                weight *= row[c]
            total += weight * graph.acceptance(p, rows, candidates)
        assert total == Fraction(fraction), (count, total)


@pytest.mark.parametrize("kind", ["replaced", "not replaced", "given"])
@pytest.mark.parametrize("pair", [FIRST, SECOND])
def test_what_comes_out_follows_p(kind, pair) -> None:
    p, q = map(fractions, pair)
    graph, noise, rng = Candidates(2), Noise(4), np.random.default_rng(4)
    counts, uniform = np.zeros(3, int), np.empty(2, np.float32)
    for place in range(6000):
        candidates: tuple[int, ...] = (1, 0)
        if kind != "given":
            first = int(rng.choice(3, p=np.array(q, float)))
            left = rows_of_q(q, (first, first), kind == "replaced")[1]
            candidates = (first, int(rng.choice(3, p=np.array(left, float))))
        rows = rows_of_q(q, candidates, kind == "replaced")
        if kind == "given":
            rows = [[Fraction(int(i == c)) for i in range(3)] for c in candidates]
        noise.uniform(uniform, place, 0)
        noise.exponential(graph.race, place, 0, stream=Stream.RESIDUAL)
        counts[graph(p, rows, candidates, uniform)[1]] += 1
    assert fit(counts.tolist(), [float(x) for x in p]).ok


def test_candidates_against_the_draft_as_it_was_are_told_apart() -> None:
    """Negative control: drawn without replacement, and judged as if they had been put back."""
    p, q = map(fractions, FIRST)
    graph, noise, rng = Candidates(2), Noise(4), np.random.default_rng(4)
    counts, uniform = np.zeros(3, int), np.empty(2, np.float32)
    for place in range(6000):
        first = int(rng.choice(3, p=np.array(q, float)))
        left = rows_of_q(q, (first, first), False)[1]
        candidates = (first, int(rng.choice(3, p=np.array(left, float))))
        noise.uniform(uniform, place, 0)
        noise.exponential(graph.race, place, 0, stream=Stream.RESIDUAL)
        counts[graph(p, [q, q], candidates, uniform)[1]] += 1
    assert not fit(counts.tolist(), [float(x) for x in p]).ok


def test_it_compiles_in_tensorrt() -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    from tests.tensorrt_compile import compile_graph

    assert compile_graph(ir.to_proto(candidates_graph(1031, 4)), {}).engine_bytes

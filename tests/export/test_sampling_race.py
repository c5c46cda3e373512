"""The race a token is drawn by: its law, its far tail, and two races on the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from spec_export.engines.graphs import padded_vocabulary, race_blocks
from spec_export.runtime.noise import Noise, Stream
from tests import algorithm1, coupling
from tests.chi_square import fit
from tests.sampling_run import (
    Bound,
)


def test_the_race_draws_no_token_of_the_far_tail() -> None:
    """150k tokens at 1e-13 together weigh 1.5e-8: none in 1e5 draws (one in 700 such runs).

    float32 `standard_exponential` returns 0 often enough to draw them, several times in this race;
    the statement of the race in numpy takes the bulk, the graph the first 200.
    """
    V, peak, draws = 151_936, 77_777, 100_000
    weights = np.full(V, 1e-13)
    weights[peak] = 1
    drawer, noise = Bound("propose_drawn", V), Noise(13)
    drawer.x["p"][0, :V] = weights
    race, B = drawer.x["race"], race_blocks(V)
    blocks, places = weights.reshape(16, B).sum(axis=0), weights.reshape(16, B)[:, peak % B]
    threshold = blocks[peak % B] / 37  # no exponential is longer: a block that is slower loses

    def tail_wins(e: NDArray) -> bool:
        return (e[:B].min() < blocks[0] / threshold and np.argmin(e[:B] / blocks) != peak % B) or (
            e[B : B + 16].min() < 37 * places[0] and np.argmin(e[B : B + 16] / places) != peak // B
        )

    assert B * 16 == V
    for start in range(draws):
        noise.exponential(race, start, 0, stream=Stream.RESIDUAL)
        assert not tail_wins(race[0])
        if start < 200:
            drawer()
            assert drawer.y["token"][0] == peak
    rng = np.random.default_rng(13)
    zeros = (rng.standard_exponential(race.size, np.float32) for _ in range(draws // 4))
    assert any(tail_wins(e) for e in zeros), "the negative control must draw from the tail"


@pytest.mark.parametrize("V", [200, 6000])
def test_the_race_follows_its_weights_over_blocks_and_inside_them(V: int) -> None:
    """Equal weights, the last places of some blocks empty: each token as often as any other."""
    drawer, noise = Bound("propose_drawn", V), Noise(64)
    drawer.x["p"][0, :V] = 1 / V
    counts = np.zeros(V)
    for start in range(30_000):
        noise.exponential(drawer.x["race"], start, 0, stream=Stream.RESIDUAL)
        drawer()
        counts[drawer.y["token"][0]] += 1
    result = fit(counts, np.full(V, 1 / V))
    assert result.ok, result
    result = fit(counts.reshape(-1, 40).sum(axis=0), np.full(40, 1 / 40))
    assert result.ok, result


# --- two races on the same numbers ----------------------------------------------------------------


@pytest.mark.parametrize("V", [70, 6000])
def test_races_on_the_same_numbers_agree_as_often_as_theory_says(V: int) -> None:
    """What rule `invariant` accepts: one race of p and one of q, by the graph."""
    rng, draws = np.random.default_rng(V), 4_000
    p, q = algorithm1.softmax(rng.normal(size=(2, V)) * 3)
    drawers, noise = (Bound("propose_drawn", V), Bound("propose_drawn", V)), Noise(1)
    for drawer, weights in zip(drawers, (p, q), strict=True):
        drawer.x["p"][0, :V] = weights
    agreed = 0
    for position in range(draws):
        for drawer in drawers:
            noise.of_position(drawer.x["race"], position)
            drawer()
        agreed += int(drawers[0].y["token"][0] == drawers[1].y["token"][0])
    expected = coupling.agreement_in_two_heats(*padded_pair(p, q), blocks_of(V))
    # Binomial: 5 standard deviations are less than one in a million.
    assert abs(agreed / draws - expected) < 5 * np.sqrt(expected * (1 - expected) / draws)
    assert expected < np.minimum(p, q).sum(), "rule `reject` accepts more"


def test_two_heats_lose_little_against_one() -> None:
    """Rows as of a language model, ids ordered by frequency. Blocks of neighbours lose more."""
    V, rng = 50257, np.random.default_rng(2)
    lost, lost_by_neighbours = [], []
    for _ in range(6):
        logits = -1.2 * np.log(np.arange(1, V + 1)) + rng.normal(size=V) * 1.5
        rows = algorithm1.softmax(np.stack([logits, logits + rng.normal(size=V) * 0.6]))
        flat = float(coupling.agreement(*rows))
        pair = padded_pair(*rows)
        neighbours = np.arange(len(pair[0])).reshape(-1, 64)
        lost.append(1 - coupling.agreement_in_two_heats(*pair, blocks_of(V)) / flat)
        kept = coupling.agreement_in_two_heats(*pair, neighbours)
        lost_by_neighbours.append(1 - kept / flat)
    assert np.mean(lost) < 0.02
    assert np.mean(lost_by_neighbours) > 0.04


def blocks_of(V: int) -> NDArray[np.int64]:
    """`[B, n]` ids of the blocks of the first heat."""
    return np.arange(padded_vocabulary(V)).reshape(-1, race_blocks(V)).T


def padded_pair(p: NDArray, q: NDArray) -> tuple[NDArray, NDArray]:
    """Float64 rows of V64, what is added without noticeable weight."""
    width = padded_vocabulary(len(p)) - len(p)
    return np.pad(p, (0, width), constant_values=1e-300), np.pad(
        q, (0, width), constant_values=1e-300
    )

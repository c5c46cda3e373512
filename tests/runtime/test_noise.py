"""The numbers the sampling graphs are fed: keyed, never used twice, right near zero."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from spec_export.engines.errors import RequestError
from spec_export.engines.host import HostDevice
from spec_export.runtime.noise import Noise, PositionRaces, Stream, race_size
from tests.chi_square import fit
from tests.sampling_run import refer, run


def uniforms(n: int, noise: Noise, *key: int, **named: int) -> NDArray[np.float32]:
    out = np.full(n, np.nan, np.float32)
    noise.uniform(out, *key, **named)
    return out


def exponentials(n: int, noise: Noise, *key: int, **named: int) -> NDArray[np.float32]:
    out = np.full(n, np.nan, np.float32)
    noise.exponential(out, *key, **named)
    return out


def test_the_key_alone_decides() -> None:
    """Whatever was drawn before, on whichever object, in whatever sizes."""
    noise = Noise(3)
    first = exponentials(100, noise, 17, 2)
    uniforms(3, noise, 17, 2)
    exponentials(7, noise, 99, 0, 5)
    assert np.array_equal(first, exponentials(100, noise, 17, 2))
    assert np.array_equal(first, exponentials(100, Noise(3), 17, 2))
    assert np.array_equal(first[:33], exponentials(33, noise, 17, 2))


@pytest.mark.parametrize("seed", [0, 7, 2**64 + 1, 2**200])
def test_the_key_is_where_it_is_said_to_be(seed: int) -> None:
    """A seed's text must survive refactoring: numpy's Philox, this key, this counter."""
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    # As an array: numpy turns a list that mixes small and large integers into float64.
    counter = np.array([0, 2**63 + 11, 5 << 32 | 9, Stream.RESIDUAL], np.uint64)
    u = np.random.Generator(np.random.Philox(counter=counter, key=key)).random(50)
    noise = Noise(seed)
    got = uniforms(50, noise, 2**63 + 11, 5, 9, stream=Stream.RESIDUAL)
    assert np.array_equal(got, u.astype(np.float32))
    got = exponentials(50, noise, 2**63 + 11, 5, 9)
    assert np.array_equal(got, (-np.log1p(-u)).astype(np.float32))


def test_no_two_keys_share_a_number() -> None:
    """Rule `reject` is exact only if no number is used twice (a reused one: vllm-ascend 16370)."""
    keys = itertools.product([0, 1], [0, 1, 2**40], [0, 1, 7], [0, 1], Stream)
    noises = {seed: Noise(seed) for seed in (0, 1)}
    seen: set[float] = set()
    n = 0
    for seed, round_start, row, candidate, stream in keys:
        noise = noises[seed]
        noise.uniform(np.empty(50, np.float32), round_start, row, candidate, stream)
        numbers = noise._scratch[50]  # 53 bits: a repeat by chance is out of the question
        seen.update(numbers.tolist())
        n += 50
    assert len(seen) == n


def test_neighbouring_keys_are_uncorrelated() -> None:
    """Rows, rounds, streams and seeds one apart: a key mixed linearly would show here."""
    n = 20_000
    base = uniforms(n, Noise(5), 100, 3)
    others = {
        "round": uniforms(n, Noise(5), 101, 3),
        "row": uniforms(n, Noise(5), 100, 4),
        "candidate": uniforms(n, Noise(5), 100, 3, 1),
        "stream": uniforms(n, Noise(5), 100, 3, stream=Stream.PROPOSE),
        "seed": uniforms(n, Noise(6), 100, 3),
        "place": np.roll(base, 1),
    }
    # r sqrt(n) is about normal; 6 sigma is two in a billion for each of the six.
    for name, other in others.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 6 / np.sqrt(n), name


def test_one_number_per_key_is_uniform_over_keys() -> None:
    """The first number of consecutive rounds and rows is as random as a long array."""
    noise, out, counts = Noise(11), np.empty(1, np.float32), np.zeros(64)
    for round_start in range(5_000):
        for row in range(4):
            noise.uniform(out, round_start, row)
            counts[int(out[0] * 64)] += 1
    result = fit(counts, np.full(64, 1 / 64))
    assert result.ok, result


def test_both_laws() -> None:
    u, e = uniforms(200_000, Noise(1), 0, 0), exponentials(200_000, Noise(1), 0, 0)
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    assert stats.kstest(e, "expon").pvalue > 1e-6


def test_exponentials_are_right_near_zero() -> None:
    """A race is decided near zero. P(E < x) is x there, and no exponential is 0.

    The negative control is numpy's float32 generator, which has too many zeros.
    """
    noise, out, n = Noise(2), np.empty(1_000_000, np.float32), 30
    bounds = np.array([1e-6, 1e-5, 1e-4])
    below, zeros, float32_zeros = np.zeros(3), 0, 0
    rng = np.random.default_rng(2)
    for round_start in range(n):
        noise.exponential(out, round_start, 0)
        below += [(out < x).sum() for x in bounds]
        zeros += int((out == 0).sum())
        float32_zeros += int((rng.standard_exponential(out.size, np.float32) == 0).sum())
    expected = bounds * n * out.size
    # Counts are Poisson: 6 standard deviations is two in a billion.
    assert (np.abs(below - expected) < 6 * np.sqrt(expected)).all(), below
    assert zeros == 0
    assert float32_zeros > 0


class Fixed:
    """A generator that gives one value, for the ends of the range."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, out: NDArray[np.float64]) -> None:
        out[:] = self.value


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 1e-12, 1e-3, 0.5, 1 - 2.0**-53])
def test_the_ends_of_the_range(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(0)
    monkeypatch.setattr(noise, "_generator", Fixed(u))
    assert 0 <= uniforms(2, noise, 0, 0)[0] < 1, "rounded to float32, still below 1"
    e = float(exponentials(2, noise, 0, 0)[0])
    assert np.isfinite(e)
    if u <= 1e-3:
        assert e == pytest.approx(u * (1 + u / 2 + u * u / 3), rel=1e-7)
    assert (e > 0) == (u > 0)


def test_filling_allocates_nothing() -> None:
    noise = Noise(4)
    small, large = np.empty(4, np.float32), np.empty(race_size(151_936), np.float32)

    def rounds(n: int) -> None:
        for round_start in range(n):
            noise.uniform(small, round_start, 0)
            noise.exponential(large, round_start, 0)

    rounds(2)
    tracemalloc.start()
    try:
        rounds(2)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        rounds(200)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 512, "something is kept"
    assert peak - before < 2048, "an array of this size would take 10 kB"


@pytest.mark.parametrize("seed", [-1, 1.5, "7", None, True])
def test_a_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(RequestError, match="seed"):
        Noise(seed)  # type: ignore[arg-type]


def test_keys_out_of_range_are_never_folded_into_others() -> None:
    noise, out = Noise(0), np.empty(1, np.float32)
    for key in [(-1, 0, 0), (2**64, 0, 0), (0, 2**32, 0), (0, -1, 0), (0, 0, 2**32), (0, 0, -1)]:
        with pytest.raises((AssertionError, OverflowError)):
            noise.uniform(out, *key)


def test_a_position_has_its_own_numbers_and_no_other() -> None:
    """Rule `invariant` draws with them wherever it stands; no round ever does."""
    out, noise = np.empty(100, np.float32), Noise(3)
    noise.of_position(out, 17)
    assert np.array_equal(out, exponentials(100, Noise(3), 17, 0, stream=Stream.POSITION))
    others = [(18, 0, Stream.POSITION), *((17, 0, s) for s in Stream if s != Stream.POSITION)]
    for start, row, stream in others:
        assert not np.isin(out, exponentials(100, noise, start, row, stream=stream)).any()


def test_races_of_positions_are_made_once_and_stay_with_their_position() -> None:
    """Whatever rounds and steps ask for, position i has its race, in row i modulo W."""
    device, made = HostDevice(), []

    class Counting(Noise):
        def of_position(self, out: NDArray[np.float32], position: int) -> None:
            made.append(position)
            super().of_position(out, position)

    ring = device.allocate((10, 70), np.float32)
    races, rng = PositionRaces(device, ring), np.random.default_rng(0)

    def check(start: int, stop: int, seed: int) -> None:
        races.hold(start, stop)
        for position in range(start, stop):
            expected = exponentials(70, Noise(seed), position, 0, stream=Stream.POSITION)
            assert np.array_equal(ring.host[position % 10], expected)

    for seed in (1, 2):
        races.begin(Counting(seed))
        start = 40
        made.clear()
        for _ in range(60):
            check(start, start + int(rng.integers(1, 6)), seed)
            check(start + 1, start + int(rng.integers(2, 11)), seed)  # a round ahead of this one
            start += int(rng.integers(1, 6))
        assert len(made) == len(set(made)), "a position that stays is not made again"
    check(10, 12, 2)  # the text was taken back


def test_a_round_finds_the_races_of_its_positions() -> None:
    """The graph that picks them from the ring, in onnxruntime and by ONNX's reference."""
    ring = np.random.default_rng(0).random((10, race_size(70))).astype(np.float32)
    for kv_len in (0, 3, 8, 9, 10, 1234):
        feeds = {"ring": ring, "kv_len": np.array([kv_len])}
        expected = ring[(kv_len + 1 + np.arange(5)) % 10]
        for made in (run("position_races", 70, feeds), refer("position_races", 70, feeds)):
            assert np.array_equal(made["race"], expected)


def test_correlation_over_all_shifts_of_the_ids() -> None:
    """Neighbouring positions and rows, at every offset of one against the other.

    5 * 10,000 coefficients, each about normal with deviation n^-1/2: 6.5 of them is 4e-6 in all.
    """
    n, noise = 10_000, Noise(9)
    base = exponentials(n, noise, 500, 0, stream=Stream.POSITION) - 1
    keys = [(501, 0, Stream.POSITION), (500, 1, Stream.POSITION), (500, 0, Stream.RESIDUAL)]
    others = [exponentials(n, noise, start, row, stream=s) - 1 for start, row, s in keys]
    others.append(exponentials(n, Noise(10), 500, 0, stream=Stream.POSITION) - 1)
    spectrum = np.fft.rfft(base)
    for other in others:
        products = np.fft.irfft(spectrum.conj() * np.fft.rfft(other), n) / n
        assert np.abs(products).max() < 6.5 / np.sqrt(n)
    own = np.fft.irfft(spectrum.conj() * spectrum, n) / n
    assert np.abs(own[1:]).max() < 6.5 / np.sqrt(n)


def test_a_linear_key_is_seen() -> None:
    """Negative control: numbers that move with the position are those of another id, shifted."""
    n = 10_000
    base = np.random.default_rng(0).standard_exponential(n) - 1
    shifted = np.roll(base, 37)
    products = np.fft.irfft(np.fft.rfft(base).conj() * np.fft.rfft(shifted), n) / n
    assert np.abs(products).max() > 6.5 / np.sqrt(n)


def test_the_shortest_of_a_vocabulary_has_the_right_law() -> None:
    """P(min over V of E < x) = 1 - e^(-V x), for x = 1e-9 to 1e-5: where a peaked row is decided.

    A row of V = 151936 takes its numbers V / 16 at a time; the shortest of so many rows is looked
    at. float32 `standard_exponential`, the negative control, has zeros.
    """
    K, rows = 9_512, 40_000
    out, noise, rng = np.empty(K, np.float32), Noise(12), np.random.default_rng(12)
    shortest, control = np.empty(rows), np.empty(rows // 4)
    for row in range(rows):
        noise.of_position(out, row)
        shortest[row] = out.min()
        if row < len(control):
            control[row] = rng.standard_exponential(K, np.float32).min()
    for x in (1e-9, 1e-8, 1e-7, 1e-6, 1e-5):
        expected = rows * -np.expm1(-K * x)
        # A count of about so many, Poisson or binomial: 6 deviations, and 3 where few are expected.
        assert abs((shortest < x).sum() - expected) < 6 * np.sqrt(expected) + 3, x
    assert (shortest > 0).all()
    expected = len(control) * -np.expm1(-K * 1e-9)
    assert (control < 1e-9).sum() > expected + 6 * np.sqrt(expected) + 3


def test_noise_needs_no_onnx() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['onnx', 'onnx_ir', 'onnxscript', 'torch']));"
        "import spec_export.runtime.noise"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

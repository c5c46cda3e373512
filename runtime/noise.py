"""Keyed random numbers, made on the host and handed to the sampling graphs as inputs.

Every number has a key: (seed, round_start, row, candidate, stream, index in the array). Rules
`reject` and `block` are exact only if no number is used twice: a uniform that has decided an
acceptance is no longer uniform given the outcome, so a residual drawn with it, or a later round at
the same position, follows another law (one-round tests do not see the second). Hence the position a
round starts at is in the key, and what a number is for (`Stream`) as well. Rule `invariant` alone
wants the opposite: what is drawn for a position is drawn with the numbers of that position, by the
draft, in a round and without one, so that the text depends on none of them. The same key gives the
same numbers on every machine, in any order of calls.

Philox is a counter-based generator: the key picks the generator, the counter the numbers, and
nothing is carried from one call to the next. No array is made after the first call of a size.

Exponentials must be right near **zero**, where a race is decided: a generator that returns 0 once
in 2^23 draws (float32 ones do) makes a token of probability 1e-13 win that often. Here they come
from 53-bit uniforms through `log1p`: the smallest positive one is 1.1e-16.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from spec_export.engines.backend import Buffer, Device
from spec_export.engines.errors import RequestError
from spec_export.engines.graphs import race_size as race_size

Float32Array: TypeAlias = NDArray[np.float32]

_LARGEST_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


class Stream(IntEnum):
    """What a number is used for. Two purposes never share one."""

    ACCEPT = 0  # uniforms that accept or refuse the drafts of a round
    RESIDUAL = 1  # the race for a round's last token
    PROPOSE = 2  # the race for one draft token; row = its place in the round
    SAMPLE = 3  # the race for a token drawn without drafts
    POSITION = 4  # the race of a position, under rule `invariant`: the same whoever draws there


class Noise:
    """Fills arrays with the numbers of a key.

    Args:
        seed: any non-negative integer, of any size.

    Raises:
        RequestError: the seed is negative or not an integer.
    """

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise RequestError(f"seed={seed!r}: a seed is an integer of 0 or more; pass another")
        self.seed = seed
        self._bits = np.random.Philox(key=np.random.SeedSequence(seed).generate_state(2, np.uint64))
        self._generator = np.random.Generator(self._bits)
        # `state` hands out copies; this one is changed in place and assigned back.
        self._state = self._bits.state
        self._counter = self._state["state"]["counter"]
        self._scratch: dict[int, NDArray[np.float64]] = {}

    def uniform(
        self,
        out: Float32Array,
        round_start: int,
        row: int,
        candidate: int = 0,
        stream: Stream = Stream.ACCEPT,
    ) -> None:
        """Fill `out` with uniforms in [0, 1); none rounds to 1.

        Args:
            out: [n] float32, written in place.
            round_start: committed tokens when the round began, 0 to 2^64 - 1.
            row: row of the round, 0 to 2^32 - 1.
            candidate: which of several candidates of a row, 0 to 2^32 - 1.
            stream: what the numbers are used for.
        """
        u = self._draw(out.size, round_start, row, candidate, stream)
        np.minimum(u, _LARGEST_BELOW_ONE, out=u)
        np.copyto(out, u, casting="same_kind")

    def exponential(
        self,
        out: Float32Array,
        round_start: int,
        row: int,
        candidate: int = 0,
        stream: Stream = Stream.RESIDUAL,
    ) -> None:
        """Fill `out` with standard exponentials, finite and exact near zero.

        Args:
            out: [n] float32, written in place.
            round_start: committed tokens when the round began, 0 to 2^64 - 1.
            row: row of the round, 0 to 2^32 - 1.
            candidate: which of several candidates of a row, 0 to 2^32 - 1.
            stream: what the numbers are used for.
        """
        e = self._draw(out.size, round_start, row, candidate, stream)
        np.negative(e, out=e)
        np.log1p(e, out=e)  # log(1 - u) without cancellation; u is at most 1 - 2^-53
        np.negative(e, out=e)
        np.copyto(out, e, casting="same_kind")

    def of_position(self, out: Float32Array, position: int) -> None:
        """Fill `out` with the exponentials that belong to a position of the text.

        Args:
            out: [n] float32, written in place.
            position: index of the token they draw, prompt included.
        """
        self.exponential(out, position, 0, stream=Stream.POSITION)

    def _draw(
        self, size: int, round_start: int, row: int, candidate: int, stream: Stream
    ) -> NDArray[np.float64]:
        """`size` uniforms of 53 bits, in an array kept for this size."""
        scratch = self._scratch.get(size)
        if scratch is None:
            scratch = self._scratch[size] = np.empty(size, np.float64)
        assert 0 <= candidate < 1 << 32, "it would run into the row"
        counter = self._counter  # 256 bits: the generator itself counts in the lowest 64
        counter[0] = 0
        counter[1] = round_start
        counter[2] = row << 32 | candidate
        counter[3] = stream
        self._bits.state = self._state  # also drops what the last call left in the buffer
        self._generator.random(out=scratch)
        return scratch


class PositionRaces:
    """The races of consecutive positions, in rows; those of positions that stay are not made again.

    Args:
        device: where `buffer` lies.
        buffer: `[rows, K]` float32, row i for position `start + i`.
    """

    def __init__(self, device: Device, buffer: Buffer) -> None:
        self._device, self._noise = device, Noise(0)
        host = np.zeros(buffer.shape, np.float32)
        self._rows = [host[i : i + 1] for i in range(len(host))]  # views of [1, K]
        self._parts = [buffer.part(i, i + 1) for i in range(len(host))]
        self._start = self._filled = 0

    def begin(self, noise: Noise) -> None:
        """Use other noise from here on."""
        self._noise, self._filled = noise, 0

    def fill(self, start: int, count: int) -> None:
        """Have the first `count` rows hold the races from position `start` on."""
        if start != self._start:
            self._move(start)
        for i in range(self._filled, count):
            self._noise.of_position(self._rows[i], start + i)
            self._device.upload(self._parts[i], self._rows[i])
        self._filled = max(self._filled, count)

    def _move(self, start: int) -> None:
        by, filled = start - self._start, self._filled
        self._start, self._filled = start, max(0, filled - by) if by > 0 else 0
        for i in range(self._filled):
            np.copyto(self._rows[i], self._rows[i + by])
            self._device.upload(self._parts[i], self._rows[i])

"""Keyed random numbers, made on the host and handed to the sampling graphs as inputs.

Every number has a key: (seed, place, row, candidate, stream, index in the array). Rules `reject`
and `block` are exact only if no number is used twice: a uniform that has decided an acceptance is
no longer uniform given the outcome, so a residual drawn with it, or a later round at the same
position, follows another law (one-round tests do not see the second). Hence their place is the
number of the round in its text, which is known before it is known where the round starts, and what
a number is for (`Stream`) is in the key as well. Rule `invariant` alone wants the opposite: its
place is a position of the text, and what is drawn for a position is drawn with the numbers of that
position, by the draft, in a round and without one, so that the text depends on none of them. The
same key gives the same numbers on every machine, in any order of calls.

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
    RESIDUAL = 1  # the race for a round's last token, or for one without drafts
    PROPOSE = 2  # the race for one draft token; row = its place in the round
    POSITION = 3  # the race of a position, under rule `invariant`: the same whoever draws there


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
        place: int,
        row: int,
        candidate: int = 0,
        stream: Stream = Stream.ACCEPT,
    ) -> None:
        """Fill `out` with uniforms in [0, 1); none rounds to 1.

        Args:
            out: [n] float32, written in place.
            place: number of the round, 0 to 2^64 - 1.
            row: row of the round, 0 to 2^32 - 1.
            candidate: which of several candidates of a row, 0 to 2^32 - 1.
            stream: what the numbers are used for.
        """
        u = self._draw(out.size, place, row, candidate, stream)
        np.minimum(u, _LARGEST_BELOW_ONE, out=u)
        np.copyto(out, u, casting="same_kind")

    def exponential(
        self,
        out: Float32Array,
        place: int,
        row: int,
        candidate: int = 0,
        stream: Stream = Stream.RESIDUAL,
    ) -> None:
        """Fill `out` with standard exponentials, finite and exact near zero.

        Args:
            out: [n] float32, written in place.
            place: number of the round, 0 to 2^64 - 1.
            row: row of the round, 0 to 2^32 - 1.
            candidate: which of several candidates of a row, 0 to 2^32 - 1.
            stream: what the numbers are used for.
        """
        e = self._draw(out.size, place, row, candidate, stream)
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
        self, size: int, place: int, row: int, candidate: int, stream: Stream
    ) -> NDArray[np.float64]:
        """`size` uniforms of 53 bits, in an array kept for this size."""
        scratch = self._scratch.get(size)
        if scratch is None:
            scratch = self._scratch[size] = np.empty(size, np.float64)
        assert 0 <= candidate < 1 << 32, "it would run into the row"
        counter = self._counter  # 256 bits: the generator itself counts in the lowest 64
        counter[0] = 0
        counter[1] = place
        counter[2] = row << 32 | candidate
        counter[3] = stream
        self._bits.state = self._state  # also drops what the last call left in the buffer
        self._generator.random(out=scratch)
        return scratch


class PositionRaces:
    """The races of consecutive positions; what is held already is not made again.

    Args:
        device: where `ring` lies.
        ring: `[W, K]` float32; the race of position i is in row i modulo W.
    """

    def __init__(self, device: Device, ring: Buffer) -> None:
        self._device, self._noise = device, Noise(0)
        self._race: Float32Array = np.zeros((1, *ring.shape[1:]), np.float32)
        self._rows = [ring.part(i, i + 1) for i in range(ring.shape[0])]
        self._held = [-1] * ring.shape[0]

    def begin(self, noise: Noise) -> None:
        """Use other noise from here on."""
        self._noise, self._held = noise, [-1] * len(self._held)

    def hold(self, start: int, stop: int) -> None:
        """Have the races of the positions from `start` to before `stop`, at most W of them."""
        assert stop - start <= len(self._held)
        for position in range(start, stop):
            row = position % len(self._held)
            if self._held[row] != position:
                self._noise.of_position(self._race, position)
                self._device.upload(self._rows[row], self._race)
                self._held[row] = position

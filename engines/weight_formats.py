"""How a matrix of few bits is stored: initializers for numbers, scales and zero points.

Nothing is computed before it is written; one matrix at a time is in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from spec_export.engines.graphs import FP4_BLOCK
from spec_export.engines.rounding import SMALLEST_SCALE, Grid, Rounded
from spec_export.engines.weight_files import Pending

_FP8_LARGEST, _FP4_LARGEST = 448.0, 6.0
_KINDS = {
    (4, True): ir.DataType.INT4,
    (4, False): ir.DataType.UINT4,
    (8, True): ir.DataType.INT8,
    (8, False): ir.DataType.UINT8,
}

Load = Callable[[], np.ndarray]
"""Reads a matrix, `[K, N]` float32."""


def whole_numbers(
    name: str, shape: tuple[int, int], grid: Grid, make: Callable[[], Rounded], is_blocked: bool
) -> dict[str, Pending]:
    """Numbers of 4 or 8 bits, signed where there are no zero points.

    Args:
        name: of the numbers; scales and zero points have it as a prefix.
        shape: of the matrix.
        grid: of the numbers.
        make: rounds the matrix; called once for all that is written of it.
        is_blocked: scales are stored by block, also where there is but one.
    """
    (rows, columns), signed = shape, not grid.has_zeros
    rounded = functools.lru_cache(maxsize=1)(make)
    kind = _KINDS[grid.bits, signed]
    scales = (rows // grid.block, columns) if is_blocked else (columns,)

    def numbers() -> Iterator[np.ndarray]:
        yield _packed(rounded().numbers, grid, signed)

    def zeros() -> Iterator[np.ndarray]:
        found = rounded().zeros
        assert found is not None
        yield _packed(found, grid, signed)

    def steps() -> Iterator[np.ndarray]:  # what is written last
        found = rounded().scales
        rounded.cache_clear()
        yield found

    made = {name: Pending(kind, (rows, columns), numbers)}
    if not signed:
        made[f"{name}.zero"] = Pending(kind, scales, zeros)
    return made | {f"{name}.scale": Pending(ir.DataType.FLOAT, scales, steps)}


def _packed(numbers: np.ndarray, grid: Grid, signed: bool) -> np.ndarray:
    """As stored: two numbers of 4 bits in a byte, the first one in the low half."""
    moved = numbers.astype(np.int16) - (grid.middle if signed else 0)
    whole = moved.astype(np.int8) if signed else moved.astype(np.uint8)
    if grid.bits == 8:
        return whole
    halves = (whole.reshape(-1) & 0xF).astype(np.uint8)
    if len(halves) % 2:
        halves = np.append(halves, np.uint8(0))
    return np.asarray(halves[0::2] | (halves[1::2] << 4), np.uint8)


def fp8(name: str, shape: tuple[int, int], load: Load) -> dict[str, Pending]:
    """E4M3 with a scale for each column."""
    kind = ir.DataType.FLOAT8E4M3FN

    @functools.lru_cache(maxsize=1)
    def parts() -> tuple[np.ndarray, np.ndarray]:
        matrix = load()
        scale = _floored(np.abs(matrix).max(axis=0) / _FP8_LARGEST)
        return np.clip(matrix / scale, -_FP8_LARGEST, _FP8_LARGEST).astype(kind.numpy()), scale

    def numbers() -> Iterator[np.ndarray]:
        yield parts()[0]

    def scales() -> Iterator[np.ndarray]:  # what is written last
        found = parts()[1]
        parts.cache_clear()
        yield found

    return {
        name: Pending(kind, shape, numbers),
        f"{name}.scale": Pending(ir.DataType.FLOAT, shape[1:], scales),
    }


def nvfp4(name: str, shape: tuple[int, int], load: Load) -> dict[str, Pending]:
    """E2M1 with an E4M3 scale for each 16 rows of a column, and one scale for all of those."""
    kind, small, (rows, columns) = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN, shape

    @functools.lru_cache(maxsize=1)
    def parts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        blocks = load().reshape(-1, FP4_BLOCK, columns)
        largest = np.abs(blocks).max(axis=1) / _FP4_LARGEST
        whole = _floored(np.asarray(largest.max() / _FP8_LARGEST))
        scales = np.clip(largest / whole, 2.0**-9, _FP8_LARGEST).astype(small.numpy())
        steps = scales.astype(np.float32) * whole
        numbers = np.clip(blocks / steps[:, None], -_FP4_LARGEST, _FP4_LARGEST)
        return numbers.reshape(rows, columns).astype(kind.numpy()), scales, whole

    def numbers() -> Iterator[np.ndarray]:
        codes = parts()[0].view(np.uint8).reshape(-1) & 0xF
        yield codes[0::2] | (codes[1::2] << 4)

    def scales() -> Iterator[np.ndarray]:
        yield parts()[1]

    def whole() -> Iterator[np.ndarray]:  # what is written last
        found = parts()[2]
        parts.cache_clear()
        yield found

    return {
        name: Pending(kind, shape, numbers),
        f"{name}.scale": Pending(small, (rows // FP4_BLOCK, columns), scales),
        f"{name}.whole": Pending(ir.DataType.FLOAT, (), whole),
    }


def _floored(scales: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(scales, SMALLEST_SCALE), np.float32)

"""Round a matrix to few bits: numbers, and a scale for each block of rows of a column.

What comes out is one form for all quantizers, whole zero points included: what a standard
`DequantizeLinear` reads. None is taken from `onnxruntime.quantization` (1.32): its ranges may leave
0 out, where a zero point cannot follow, so that a block of numbers of one sign is lost; its `hqq`
makes zero points that are no whole numbers; and its `gptq` reads the triangle of the factor that is
zero, and so rounds to nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import Quantizer

NEED_SAMPLES: frozenset[str] = frozenset({"gptq", "awq", "modelopt"})
NEED_ZEROS: frozenset[str] = frozenset({"k-quant", "hqq"})
SMALLEST_SCALE = 2.0**-24  # the smallest float16: a block of zeros has a scale as well
_DAMPING = 0.01  # of the mean second moment, added to each
_STRETCHES = tuple(i / 10 for i in range(-10, 10))  # numbers added to a range, as in ggml
_HQQ_P, _HQQ_BETA, _HQQ_KAPPA, _HQQ_ROUNDS = 0.7, 10.0, 1.01, 20
_HQQ_LEAST = 1e-6  # of a step


@dataclass(frozen=True)
class Grid:
    """Numbers that a matrix is rounded to.

    Attributes:
        bits: of a number, 4 or 8.
        block: rows of a column that share a scale; all of them where it is the number of rows.
        has_zeros: each block has a zero point of its own; otherwise it is the middle of the range.
    """

    bits: int
    block: int
    has_zeros: bool

    @property
    def middle(self) -> int:
        """The number for 0 where there are no zero points."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> int:
        """The largest number; the smallest is 0."""
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class Rounded:
    """A rounded matrix, `(numbers - zeros) * scales`.

    Attributes:
        numbers: `[K, N]` uint8.
        scales: `[K / block, N]` float32, above zero.
        zeros: `[K / block, N]` uint8; None: the middle of the range everywhere.
        grid: what the numbers are of.
    """

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    grid: Grid

    def values(self) -> np.ndarray:
        """What it stands for, `[K, N]` float32."""
        rows, columns = self.numbers.shape
        shaped = self.numbers.reshape(-1, self.grid.block, columns).astype(np.float32)
        zeros = np.float32(self.grid.middle) if self.zeros is None else self.zeros[:, None]
        found = (shaped - zeros) * self.scales[:, None]
        return np.asarray(found.reshape(rows, columns), np.float32)


def round_matrix(
    quantizer: Quantizer, weight: np.ndarray, grid: Grid, inputs: np.ndarray | None = None
) -> Rounded:
    """Round a matrix.

    Args:
        quantizer: `rtn` (to nearest), `k-quant` (scale by weighted squares, after ggml), `hqq`
            (after Badri and Shaji 2023), or `gptq` (arXiv 2210.17323).
        weight: `[K, N]` float32, K a multiple of the block.
        grid: of the numbers.
        inputs: `[rows, K]` float32, what the matrix is multiplied by; for `gptq`.

    Raises:
        BuildError: the weights are not finite, or the inputs do not determine anything.
    """
    assert weight.ndim == 2 and weight.shape[0] % grid.block == 0
    if not np.isfinite(weight).all():
        raise BuildError("a weight is NaN or infinite")
    if quantizer == "gptq":
        assert inputs is not None
        return _gptq(weight, grid, inputs)
    if quantizer == "k-quant":
        return _k_quant(weight, grid)
    if quantizer == "hqq":
        return _hqq(weight, grid)
    blocks = _blocks(weight, grid)
    return _on_blocks(blocks, *_range(blocks, grid), grid)


def _k_quant(weight: np.ndarray, grid: Grid) -> Rounded:
    """Try ranges around a block's own, fit a scale to the numbers of each, and keep the best.

    By squares weighted with the size of a weight, as in ggml, but with whole zero points from the
    start: a least one that is rounded afterwards may cost more than it gained.
    """
    blocks = _blocks(weight, grid)
    weights = np.abs(blocks) + np.sqrt(np.square(blocks).mean(axis=1, keepdims=True))
    best = _Best(blocks, grid, lambda off: (weights * np.square(off)).sum(axis=1))
    scales, zeros = _range(blocks, grid)
    best.offer(scales, zeros)
    for step in _STRETCHES:
        tried = _usable(scales * (grid.largest / (grid.largest + step)))
        shifted = _numbers(blocks, tried, zeros, grid) - zeros[:, None]
        best.offer(_fitted(blocks, shifted, weights), zeros)
    return best.rounded()


def _hqq(weight: np.ndarray, grid: Grid) -> Rounded:
    """Half-quadratic: most of a block may be nearer where a few weights are further off.

    Source: Badri and Shaji, "Half-Quadratic Quantization of large machine learning models" (2023),
    with their p, beta and kappa, and what a weight is off in steps. Solved for is the scale and not
    the zero point: zero points are whole numbers here, and theirs, rounded, is where it started.
    """
    blocks = _blocks(weight, grid)
    best = _Best(blocks, grid, lambda off: (np.abs(off) ** _HQQ_P).sum(axis=1))
    (scales, zeros), beta = _range(blocks, grid), _HQQ_BETA
    for _ in range(_HQQ_ROUNDS):
        best.offer(scales, zeros)
        shifted = _numbers(blocks, scales, zeros, grid) - zeros[:, None]
        off = blocks / scales[:, None] - shifted
        size = np.maximum(np.abs(off), _HQQ_LEAST)
        outlying = np.sign(off) * np.maximum(size - size ** (_HQQ_P - 1) / beta, 0)
        scales = _fitted(blocks - outlying * scales[:, None], shifted, np.ones_like(blocks))
        beta *= _HQQ_KAPPA
    return best.rounded()


class _Best:
    """Of the scales and zero points offered, those with the smallest error, block by block.

    Args:
        blocks: `[blocks, block, N]` float32.
        grid: of the numbers.
        measure: errors of every block, `[blocks, N]`, of what its weights are off.
    """

    def __init__(
        self, blocks: np.ndarray, grid: Grid, measure: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self._blocks, self._grid, self._measure = blocks, grid, measure
        shape = (blocks.shape[0], blocks.shape[2])
        self._scales, self._zeros = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        self._error = np.full(shape, np.inf)

    def offer(self, scales: np.ndarray, zeros: np.ndarray) -> None:
        """Take what is better than what there is; `[blocks, N]` each."""
        shifted = _numbers(self._blocks, scales, zeros, self._grid) - zeros[:, None]
        error = self._measure(shifted * scales[:, None] - self._blocks)
        is_better = error < self._error
        self._scales = np.where(is_better, scales, self._scales)
        self._zeros = np.where(is_better, zeros, self._zeros)
        self._error = np.where(is_better, error, self._error)

    def rounded(self) -> Rounded:
        """The matrix by what was best."""
        return _on_blocks(self._blocks, self._scales, self._zeros, self._grid)


def _blocks(weight: np.ndarray, grid: Grid) -> np.ndarray:
    return weight.reshape(-1, grid.block, weight.shape[1])


def _numbers(blocks: np.ndarray, scales: np.ndarray, zeros: np.ndarray, grid: Grid) -> np.ndarray:
    """The nearest numbers, `[blocks, block, N]` float32."""
    found = np.rint(blocks / scales[:, None]) + zeros[:, None]
    return np.asarray(np.clip(found, 0, grid.largest), np.float32)


def _fitted(blocks: np.ndarray, shifted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The scales that bring given numbers nearest to the weights, in weighted squares."""
    squares = (weights * np.square(shifted)).sum(axis=1)
    products = (weights * shifted * blocks).sum(axis=1)
    return _usable(np.divide(products, squares, out=np.zeros_like(squares), where=squares > 0))


def _on_blocks(blocks: np.ndarray, scales: np.ndarray, zeros: np.ndarray, grid: Grid) -> Rounded:
    numbers = _numbers(blocks, scales, zeros, grid).astype(np.uint8)
    whole = zeros.astype(np.uint8) if grid.has_zeros else None
    return Rounded(numbers.reshape(-1, blocks.shape[2]), scales, whole, grid)


def _usable(scales: np.ndarray) -> np.ndarray:
    """Scales that are above zero: a block that needs none has any."""
    return np.asarray(np.maximum(scales, SMALLEST_SCALE), np.float32)


def _gptq(weight: np.ndarray, grid: Grid, inputs: np.ndarray) -> Rounded:
    """Round row after row; what a row is off, the rows after it make up for.

    Source: arXiv 2210.17323, Algorithm 1, on columns of the transposed matrix.
    """
    factor = _inverse_factor(inputs)
    rows, columns = weight.shape
    left = weight.astype(np.float64)
    numbers = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows // grid.block, columns), np.float32)
    zeros = np.empty((rows // grid.block, columns), np.uint8) if grid.has_zeros else None
    for index, start in enumerate(range(0, rows, grid.block)):
        stop = start + grid.block
        part = left[start:stop]
        scales[index], zero = (found[0] for found in _range(part[None], grid))
        if zeros is not None:
            zeros[index] = zero
        scale = scales[index].astype(np.float64)
        errors = np.empty_like(part)
        for row in range(grid.block):
            at = start + row
            chosen = np.clip(np.rint(part[row] / scale) + zero, 0, grid.largest)
            numbers[at] = chosen.astype(np.uint8)
            errors[row] = (part[row] - (chosen - zero) * scale) / factor[at, at]
            part[row + 1 :] -= np.outer(factor[at, at + 1 : stop], errors[row])
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return Rounded(numbers, scales, zeros, grid)


def _inverse_factor(inputs: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of the inverse of the inputs' damped second moments, `[K, K]`."""
    if not np.isfinite(inputs).all() or not inputs.any():
        raise BuildError("the samples of a matrix's inputs are all zero, or not finite")
    moments = (inputs.T @ inputs).astype(np.float64)
    silent = np.diag(moments) == 0
    moments[silent, silent] = 1.0
    moments[np.diag_indices_from(moments)] += _DAMPING * float(np.diag(moments).mean())
    try:
        return np.asarray(np.linalg.cholesky(np.linalg.inv(moments)).T)
    except np.linalg.LinAlgError as error:
        raise BuildError(f"gptq: the inputs' second moments have no inverse: {error}") from error


def _range(blocks: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points that hold the smallest and largest of every block, and 0.

    A zero point is one of the numbers: a range without 0 has none.
    """
    low, high = np.minimum(blocks.min(axis=1), 0), np.maximum(blocks.max(axis=1), 0)
    if not grid.has_zeros:
        scales = _usable(2 * np.maximum(-low, high) / grid.largest)
        return scales, np.full(scales.shape, grid.middle, np.float32)
    scales = _usable((high - low) / grid.largest)
    return scales, np.clip(np.rint(-low / scales), 0, grid.largest).astype(np.float32)

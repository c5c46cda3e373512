"""Round a matrix to few bits: numbers, and a scale for each block of rows of a column.

The algorithms are those of `onnxruntime.quantization` but for `gptq`, which see. What comes out is
one form for all of them, whole zero points included: what a standard `DequantizeLinear` reads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_export.engines.errors import BuildError
from spec_export.engines.extras import require
from spec_export.engines.graphs import Quantizer

NEED_SAMPLES: frozenset[str] = frozenset({"gptq", "awq"})
NEED_ZEROS: frozenset[str] = frozenset({"k-quant", "hqq"})
SMALLEST_SCALE = 2.0**-24  # the smallest float16: a block of zeros has a scale as well
_DAMPING = 0.01  # of the mean second moment, added to each


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
        quantizer: `rtn` (to nearest), `k-quant` (scale and zero point by weighted squares, as in
            ggml), `hqq` (Badri and Shaji 2023), or `gptq` (arXiv 2210.17323).
        weight: `[K, N]` float32, K a multiple of the block.
        grid: of the numbers.
        inputs: `[rows, K]` float32, what the matrix is multiplied by; for `gptq`.

    Raises:
        BuildError: the weights are not finite, or the inputs do not determine anything.
        MissingExtra: the library is not installed.
    """
    assert weight.ndim == 2 and weight.shape[0] % grid.block == 0
    if not np.isfinite(weight).all():
        raise BuildError("a weight is NaN or infinite")
    if quantizer == "gptq":
        assert inputs is not None
        return _gptq(weight, grid, inputs)
    if quantizer == "hqq":
        return _hqq(weight, grid)
    library = _library()
    rows = np.ascontiguousarray(weight.T)  # a column of the matrix is what a scale runs along
    if quantizer == "k-quant":
        with np.errstate(all="ignore"):  # blocks of equal numbers divide by nothing
            made = library.quant_tensor_k_quant_cpu(rows, grid.bits, grid.block)
    else:
        scheme = "asym" if grid.has_zeros else "sym"
        made = library.quant_tensor(rows, grid.bits, grid.block, scheme, "uint")
    numbers, scales, zeros = made
    return _collected(numbers, scales, zeros, grid, weight.shape)


def _library() -> Any:
    require("build", "onnx_ir")
    import onnxruntime.quantization.neural_compressor.weight_only as library

    return library


def _collected(
    numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, grid: Grid, shape: tuple[int, ...]
) -> Rounded:
    """From rows of one block each, column by column of the matrix, to the matrix."""
    rows, columns = shape
    blocks = rows // grid.block

    def across(found: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(found.reshape(columns, blocks).T)

    whole = np.ascontiguousarray(numbers.reshape(columns, rows).T)
    return Rounded(
        np.nan_to_num(whole, nan=grid.middle).astype(np.uint8),
        _usable(across(np.asarray(scales))),
        across(zeros).astype(np.uint8) if grid.has_zeros else None,
        grid,
    )


def _usable(scales: np.ndarray) -> np.ndarray:
    """Scales that are above zero: a block that needs none has any."""
    finite = np.nan_to_num(scales.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    return np.asarray(np.maximum(finite, SMALLEST_SCALE), np.float32)


def _hqq(weight: np.ndarray, grid: Grid) -> Rounded:
    """Half-quadratic; its zero points are rounded, and the numbers are taken again with those."""
    require("export", "torch")
    import torch
    from onnxruntime.quantization import matmul_nbits_quantizer as library

    with _Quiet(library.logger):
        config = library.HQQWeightOnlyQuantConfig(block_size=grid.block, bits=grid.bits)
        work = library.HQQWeightOnlyQuantizer(config)
        _, scales, zeros = work.quantize_internal(
            torch.from_numpy(np.ascontiguousarray(weight.T)), grid.bits, group_size=grid.block
        )
    steps = _usable(np.ascontiguousarray(scales.numpy().T))
    whole = np.clip(np.rint(np.ascontiguousarray(zeros.numpy().T)), 0, grid.largest)
    return on_grid(weight, steps, whole.astype(np.uint8), grid)


def on_grid(
    weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, grid: Grid
) -> Rounded:
    """The nearest numbers for given scales and zero points."""
    rows, columns = weight.shape
    offset = np.float32(grid.middle) if zeros is None else zeros[:, None].astype(np.float32)
    shaped = weight.reshape(-1, grid.block, columns) / scales[:, None] + offset
    numbers = np.clip(np.rint(shaped), 0, grid.largest).reshape(rows, columns)
    return Rounded(numbers.astype(np.uint8), scales, zeros, grid)


def _gptq(weight: np.ndarray, grid: Grid, inputs: np.ndarray) -> Rounded:
    """Round row after row; what a row is off, the rows after it make up for.

    Source: arXiv 2210.17323, Algorithm 1, on columns of the transposed matrix. The function of the
    same name in onnxruntime 1.32 reads the triangle of the factor that is zero, and so rounds to
    nearest.
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
        scales[index], zero = _range(part, grid)
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


def _range(part: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points that hold a block's smallest and largest, `[N]` each."""
    low, high = np.minimum(part.min(axis=0), 0), np.maximum(part.max(axis=0), 0)
    if not grid.has_zeros:
        scales = _usable(2 * np.maximum(-low, high) / grid.largest)
        return scales, np.full(scales.shape, float(grid.middle))
    scales = _usable((high - low) / grid.largest)
    return scales, np.clip(np.rint(-low / scales), 0, grid.largest)


class _Quiet:
    """Hold back what a library tells of every matrix."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._level = logger, logger.level

    def __enter__(self) -> None:
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)

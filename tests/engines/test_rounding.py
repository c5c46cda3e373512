"""Every quantizer: numbers of the bits it claims, near what they were, better where it says so.

Errors of products are `||X (W - W')||` on inputs the matrix meets: what gptq and awq are for.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from spec_export.engines.awq import input_scales
from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import Quantizer
from spec_export.engines.rounding import (
    NEED_ZEROS,
    SMALLEST_SCALE,
    Grid,
    Rounded,
    round_matrix,
)
from spec_export.engines.weight_files import Pending
from spec_export.engines.weight_formats import nvfp4, whole_numbers

QUANTIZERS: tuple[Quantizer, ...] = ("rtn", "k-quant", "hqq", "gptq")
ROWS, COLUMNS, BLOCK = 128, 48, 32


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def matrix(rng: np.random.Generator) -> np.ndarray:
    """Heavy tails, as trained weights have."""
    return (rng.standard_t(4, (ROWS, COLUMNS)) * 0.05).astype(np.float32)


def correlated(rng: np.random.Generator, count: int = 512) -> np.ndarray:
    """Inputs of which a quarter of the dimensions explain nearly all, as hidden states do."""
    few = rng.normal(size=(count, ROWS // 4)) @ rng.normal(size=(ROWS // 4, ROWS))
    return (few + 0.1 * rng.normal(size=(count, ROWS))).astype(np.float32)


def grid_for(quantizer: Quantizer, bits: int, zeros: bool | None = None) -> Grid:
    return Grid(bits, BLOCK, quantizer in NEED_ZEROS or (bits == 4 if zeros is None else zeros))


def rounded(quantizer: Quantizer, weight: np.ndarray, grid: Grid, inputs=None) -> Rounded:
    given = (
        np.eye(len(weight), dtype=np.float32) if quantizer == "gptq" and inputs is None else inputs
    )
    return round_matrix(quantizer, weight, grid, given)


def off(inputs: np.ndarray, weight: np.ndarray, found: Rounded) -> float:
    return float(np.linalg.norm(inputs.astype(np.float64) @ (found.values() - weight)))


# --- what all of them keep to --------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_to_nearest_every_weight_is_within_half_a_step(rng, bits, zeros):
    """With whole zero points as well: those may move the range by half a step more at its ends."""
    weight, grid = matrix(rng), Grid(bits, BLOCK, zeros)
    found = rounded("rtn", weight, grid)
    steps = np.repeat(found.scales, BLOCK, axis=0)
    away = np.abs(found.values() - weight) / steps
    is_end = (found.numbers == 0) | (found.numbers == grid.largest)
    assert away[~is_end].max() <= 0.5001
    assert away.max() <= (1.0001 if zeros else 0.5001)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_numbers_have_the_bits_and_scales_are_above_zero(rng, quantizer, bits):
    weight, grid = matrix(rng), grid_for(quantizer, bits)
    found = rounded(quantizer, weight, grid)
    assert found.numbers.dtype == np.uint8 and found.numbers.shape == weight.shape
    assert found.numbers.max() <= grid.largest and len(np.unique(found.numbers)) > 1 << (bits - 1)
    assert found.scales.shape == (ROWS // BLOCK, COLUMNS) and (found.scales > 0).all()
    if grid.has_zeros:
        assert found.zeros is not None and found.zeros.dtype == np.uint8
        assert found.zeros.max() <= grid.largest
    else:
        assert found.zeros is None
    # A step of 4 bits is at most 2/15 of the largest weight, of 8 bits 2/255.
    assert np.abs(found.values() - weight).mean() < np.abs(weight).max() * 2 / grid.largest


@pytest.mark.parametrize("value", [0.0, 1e-30, 0.25, -0.25, 3e4])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_blocks_of_equal_numbers_are_kept(quantizer, bits, value):
    """k-quant divides by the spread of a block, which is nothing here."""
    weight = np.full((2 * BLOCK, 4), value, np.float32)
    weight[BLOCK:] = np.linspace(-1, 1, BLOCK, dtype=np.float32)[:, None]
    grid = grid_for(quantizer, bits)
    with np.errstate(all="raise", under="ignore"):
        found = rounded(quantizer, weight, grid)
    assert np.isfinite(found.scales).all() and (found.scales >= SMALLEST_SCALE).all()
    allowed = abs(value) * 1.01 / grid.largest + SMALLEST_SCALE
    assert np.abs(found.values()[:BLOCK] - value).max() <= allowed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_weight_that_is_no_number_is_refused(rng, quantizer, bad):
    weight = matrix(rng)
    weight[5, 7] = bad
    with pytest.raises(BuildError, match="NaN or infinite"):
        rounded(quantizer, weight, grid_for(quantizer, 4))


@pytest.mark.parametrize("inputs", [np.zeros((9, ROWS)), np.full((9, ROWS), np.nan)])
def test_gptq_refuses_samples_that_say_nothing(rng, inputs):
    with pytest.raises(BuildError, match="all zero, or not finite"):
        round_matrix("gptq", matrix(rng), Grid(4, BLOCK, True), inputs.astype(np.float32))


def test_gptq_takes_inputs_of_which_some_are_always_zero(rng):
    """Their second moments have no inverse; such rows are rounded to nearest."""
    inputs, weight = correlated(rng), matrix(rng)
    inputs[:, 3] = 0
    found = round_matrix("gptq", weight, Grid(4, BLOCK, True), inputs)
    assert np.isfinite(found.values()).all()


# --- stored as ONNX reads it ---------------------------------------------------------------------


def as_tensor(name: str, pending: Pending) -> onnx.TensorProto:
    content = b"".join(np.ascontiguousarray(part).tobytes() for part in pending.blocks())
    return helper.make_tensor(name, pending.dtype.value, pending.shape, content, raw=True)


def evaluated(nodes, tensors, opset: int = 21) -> np.ndarray:
    """`out` of a graph without inputs, in ONNX's own evaluator."""
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [ROWS, COLUMNS])
    graph = helper.make_graph(nodes, "g", [], [out], tensors)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    onnx.checker.check_model(model)
    return ReferenceEvaluator(model).run(None, {})[0]


@pytest.mark.parametrize("block", [BLOCK, 0])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_stored_is_what_was_rounded(rng, bits, zeros, block):
    """ONNX's own evaluator reads the packed bytes as `Rounded.values` does."""
    grid = Grid(bits, block or ROWS, zeros)
    found = rounded("rtn", matrix(rng), grid)
    made = whole_numbers("w", (ROWS, COLUMNS), grid, lambda: found, bool(block))
    tensors = [as_tensor(name, pending) for name, pending in made.items()]
    sizes = {tensor.name: len(tensor.raw_data) for tensor in tensors}
    assert sizes["w"] == ROWS * COLUMNS * bits // 8
    names = ["w", "w.scale", "w.zero"][: 2 + zeros]
    how = {"axis": 0, "block_size": block} if block else {"axis": 1}
    node = helper.make_node("DequantizeLinear", names, ["out"], **how)
    read = evaluated([node], tensors)
    np.testing.assert_array_equal(read, found.values())


def test_nvfp4_is_stored_as_onnx_reads_it(rng):
    """E2M1 with a scale of E4M3 for each 16 rows: within half of the widest gap (4 to 6) of a step.

    The scale itself is rounded to 3 bits, so that the largest may be cut by a sixteenth.
    """
    weight = matrix(rng)
    made = nvfp4("w", (ROWS, COLUMNS), lambda: weight)
    tensors = [as_tensor(name, pending) for name, pending in made.items()]
    assert len(tensors[0].raw_data) == ROWS * COLUMNS // 2
    nodes = [
        helper.make_node("DequantizeLinear", ["w.scale", "w.whole"], ["steps"]),
        helper.make_node("DequantizeLinear", ["w", "steps"], ["out"], axis=0, block_size=16),
    ]
    read = evaluated(nodes, tensors, opset=23)
    steps = np.repeat(np.abs(weight).reshape(-1, 16, COLUMNS).max(axis=1) / 6, 16, axis=0)
    assert (np.abs(read - weight) <= steps * (1 + 6 / 16)).all()
    assert len(np.unique(np.round(read / steps, 1))) > 8


# --- what each is for ----------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_is_nearer_than_nearest_on_correlated_inputs(rng, bits, zeros):
    """Held on inputs it was not fitted to. The margin is a third; 0.4 to 0.6 was seen."""
    inputs, weight, grid = correlated(rng, 768), matrix(rng), Grid(bits, BLOCK, zeros)
    seen, unseen = inputs[:512], inputs[512:]
    fitted = round_matrix("gptq", weight, grid, seen)
    assert off(unseen, weight, fitted) < 0.67 * off(unseen, weight, rounded("rtn", weight, grid))


def test_the_function_of_the_library_gains_nothing_which_is_why_ours_exists(rng):
    """onnxruntime 1.32: `gptq` reads the zero triangle of the factor. Should this fail, take it."""
    from onnxruntime.quantization.neural_compressor.weight_only import gptq

    inputs, weight = correlated(rng), matrix(rng)
    moments = 2 * inputs.T @ inputs / len(inputs)
    theirs = gptq(weight.copy(), moments.copy(), num_bits=4, group_size=BLOCK, scheme="asym")
    error = np.linalg.norm(inputs @ (np.asarray(theirs, np.float32) - weight))
    nearest = off(inputs, weight, rounded("rtn", weight, Grid(4, BLOCK, True)))
    ours = off(inputs, weight, round_matrix("gptq", weight, Grid(4, BLOCK, True), inputs))
    assert ours < 0.67 * nearest < error


@pytest.mark.parametrize("zeros", [False, True])
def test_awq_is_nearer_than_nearest_where_few_inputs_are_large(rng, zeros):
    """Held on inputs it did not choose its scales by."""
    inputs = rng.normal(size=(600, ROWS)).astype(np.float32)
    inputs[:, :: ROWS // 4] *= 40
    weight, grid = matrix(rng), Grid(4, BLOCK, zeros)
    scales = input_scales([weight], grid, inputs[:400])
    assert scales.shape == (ROWS,) and (scales > 0).all()
    found = rounded("rtn", weight * scales[:, None], grid)
    products = (inputs[400:] / scales) @ found.values() - inputs[400:] @ weight
    nearest = off(inputs[400:], weight, rounded("rtn", weight, grid))
    assert np.linalg.norm(products) < 0.67 * nearest


def test_awq_scales_nothing_where_nothing_is_gained():
    """A matrix that is on the grid already, whatever its inputs are."""
    grid = Grid(4, BLOCK, True)
    numbers = np.random.default_rng(1).integers(0, 16, (ROWS, 8))
    numbers[::BLOCK], numbers[1::BLOCK] = 0, 15  # the range of each block
    weight = ((numbers - 8) * 2.0**-4).astype(np.float32)
    inputs = np.random.default_rng(2).normal(size=(64, ROWS)).astype(np.float32)
    assert (input_scales([weight], grid, inputs) == 1).all()


def test_awq_takes_inputs_of_which_some_are_always_zero(rng):
    inputs = correlated(rng)
    inputs[:, 5] = 0
    scales = input_scales([matrix(rng)], Grid(4, BLOCK, True), inputs)
    assert np.isfinite(scales).all() and (scales > 0).all()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_k_quant_is_nearer_than_nearest_in_weighted_squares(rng, bits, zeros):
    """In what it is fitted to, block by block; 4 bits gain a tenth at least."""
    weight, grid = matrix(rng), Grid(bits, BLOCK, zeros)
    blocks = weight.reshape(-1, BLOCK, COLUMNS)
    weights = np.abs(blocks) + np.sqrt(np.square(blocks).mean(axis=1, keepdims=True))
    mine, nearest = (
        (weights * np.square(rounded(q, weight, grid).values().reshape(blocks.shape) - blocks)).sum(
            axis=1
        )
        for q in ("k-quant", "rtn")
    )
    assert (mine <= nearest * 1.0001).all()
    assert mine.sum() < nearest.sum() * (0.9 if bits == 4 else 1)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_hqq_is_nearer_than_nearest_where_few_weights_count_for_less(rng, bits, zeros):
    """In what it is fitted to, the sum of |w - w'|^0.7 of a block.

    With the zero points of the paper, rounded, it was to nearest, number by number.
    """
    weight, grid = matrix(rng), Grid(bits, BLOCK, zeros)
    mine, nearest = (
        (np.abs(rounded(q, weight, grid).values() - weight) ** 0.7)
        .reshape(-1, BLOCK, COLUMNS)
        .sum(axis=1)
        for q in ("hqq", "rtn")
    )
    assert (mine <= nearest * 1.0001).all()
    assert mine.sum() < nearest.sum() * 0.995


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_block_of_one_sign_is_kept(rng, quantizer):
    """onnxruntime's own functions take a range without 0, and a zero point cannot follow it."""
    weight = (1 + 0.1 * rng.random((ROWS, 8))).astype(np.float32)
    found = rounded(quantizer, weight, Grid(4, BLOCK, True))
    assert np.abs(found.values() - weight).max() <= 1.1 / 15 * 1.01

"""Weights of 8 or 4 bits, read back by a standard `DequantizeLinear` in front of their `MatMul`.

onnxruntime fuses the pair into one operator when it opens the graph, TensorRT reads it as weights
of few bits. A block of rows of a column (axis 0, what a sum runs over) shares a scale. The matrices
inside the layers are quantized, and the head where it is asked for: the embedding is looked up, not
multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from spec_export.engines import awq
from spec_export.engines.errors import BuildError
from spec_export.engines.graph_edits import add_initializer, insert
from spec_export.engines.graphs import FP4_BLOCK, QuantizationSpec, Quantizer, WeightFormat
from spec_export.engines.products import Product, products
from spec_export.engines.rounding import NEED_SAMPLES, Grid, Rounded, round_matrix
from spec_export.engines.weight_files import Pending
from spec_export.engines.weight_formats import fp8, nvfp4, whole_numbers

_BITS: dict[str, int] = {"int8": 8, "int4": 4}
_SMALLEST_HALVED = 64
_SMALLER_BLOCKS = (128, 64, 32, 16)

Samples = Mapping[str, np.ndarray]
"""Values that a matrix is multiplied by, `[rows, K]` float32, by the name of the value."""


def quantize_weights(
    model: ir.Model,
    originals: Mapping[str, ir.TensorProtocol],
    wanted: QuantizationSpec,
    samples: Samples | None = None,
) -> dict[str, Pending]:
    """Quantize every matrix of a float32 graph, in place.

    Args:
        model: the graph.
        originals: values of its initializers.
        wanted: format, quantizer and blocks.
        samples: for quantizers that look at what a matrix is multiplied by.

    Returns:
        The weights to write, by initializer.

    Raises:
        BuildError: a matrix does not divide into blocks, a sample is missing, or there is none to
            quantize.
    """
    graph, pending = model.graph, dict[str, Pending]()
    found = products(graph, head=wanted.head is not None)
    if not found:
        gemms = sum(node.op_type == "Gemm" for node in graph)
        said = f"its {gemms} products are Gemm operators, as in GPT-2, and" if gemms else "only"
        raise BuildError(
            f"--weights {wanted.weights}: the graph has no matrix to quantize: {said} products by "
            "MatMul are quantized; leave --weights out"
        )
    work = [_Matrix(graph, product, wanted, originals, samples) for product in found]
    scales = _input_scales(work) if wanted.quantizer == "awq" else {}
    for matrix in work:
        pending |= matrix.quantize(scales.get(matrix.source))
    inner = [product for product in found if not product.is_head]
    return pending | awq.divide(graph, inner, scales, originals)


class _Matrix:
    """A matrix to quantize.

    Args:
        graph: it is in.
        product: that it is a factor of.
        wanted: format, quantizer and blocks.
        originals: values of the graph's initializers.
        samples: what matrices are multiplied by.

    Raises:
        BuildError: it does not divide into blocks, or there is no sample and one is needed.
    """

    def __init__(
        self,
        graph: ir.Graph,
        product: Product,
        wanted: QuantizationSpec,
        originals: Mapping[str, ir.TensorProtocol],
        samples: Samples | None,
    ) -> None:
        self._graph, self._product = graph, product
        self.source = str(product.source.name)
        self._format = _format_of(product, wanted)
        self._option = f"--{'head' if product.is_head else 'weights'} {self._format}"
        block = FP4_BLOCK if self._format == "nvfp4" else dividing_block(wanted.block, product)
        self._zeros = wanted.zeros
        self._check_shape(block)
        self._block, self._is_whole = block, self._format in _BITS
        self.grid = Grid(
            _BITS.get(self._format, 0), block or product.shape[0], wanted.zeros and self._is_whole
        )
        self._tensor = originals[str(product.weight.name)]
        self._quantizer: Quantizer = wanted.quantizer
        self.inputs: np.ndarray | None = None
        if self._quantizer in NEED_SAMPLES and product.is_head:
            self._quantizer = "rtn"
        elif self._quantizer in NEED_SAMPLES:
            self.inputs = self._sample(samples)

    @property
    def is_head(self) -> bool:
        """Whether its products are the logits."""
        return self._product.is_head

    def load(self) -> np.ndarray:
        """The matrix, `[K, N]` float32."""
        content = self._tensor.numpy()
        return np.asarray(content.T if self._product.is_transposed else content, np.float32)

    def quantize(self, scales: np.ndarray | None) -> dict[str, Pending]:
        """Put a `DequantizeLinear` between the weight and the product.

        Args:
            scales: `[K]`, of its rows; None: 1.
        """
        graph, product = self._graph, self._product
        stem = f"{product.weight.name}{'.head' if self.is_head else ''}"
        made = self._stored(f"{stem}.{self._format}", scales)
        values = [add_initializer(graph, name, p.dtype, p.shape) for name, p in made.items()]
        if self._format == "nvfp4":
            numbers, small, whole = values
            values = [numbers, self._dequantized([small, whole], {}, f"{stem}.scales")]
        elif len(values) == 3:
            values = [values[0], values[2], values[1]]  # the operator has zero points last
        how = {"axis": 0, "block_size": self._block} if self._block else {"axis": 1}
        product.node.replace_input_with(1, self._dequantized(values, how, f"{stem}.read"))
        product.drop_weight(graph)
        return made

    def _stored(self, name: str, scales: np.ndarray | None) -> dict[str, Pending]:
        def load() -> np.ndarray:
            return self.load() if scales is None else self.load() * scales[:, None]

        def rounded() -> Rounded:
            quantizer: Quantizer = "rtn" if self._quantizer == "awq" else self._quantizer
            return round_matrix(quantizer, load(), self.grid, self.inputs)

        if self._is_whole:
            is_blocked = bool(self._block)
            return whole_numbers(name, self._product.shape, self.grid, rounded, is_blocked)
        encode = fp8 if self._format == "fp8" else nvfp4
        return encode(name, self._product.shape, load)

    def _dequantized(
        self, inputs: Sequence[ir.Value], how: Mapping[str, int], name: str
    ) -> ir.Value:
        return insert(
            self._graph,
            self._product.node,
            "DequantizeLinear",
            inputs,
            ir.DataType.FLOAT,
            inputs[0].shape,
            name=name,
            attributes=how,
        )

    def _sample(self, samples: Samples | None) -> np.ndarray:
        if samples is None or self.source not in samples:
            raise BuildError(
                f"--quantizer {self._quantizer} goes by what matrices are multiplied by, and there "
                f"is no sample for {self._product.weight.name}"
            )
        return samples[self.source]

    def _check_shape(self, block: int) -> None:
        (rows, columns), name = self._product.shape, self._product.weight.name
        if block and rows % block:
            raise BuildError(
                f"{self._option}: {name} has {rows} rows, which blocks of {block} do not divide; "
                + self._remedy(rows)
            )
        if self._format == "nvfp4" and columns % 2:
            raise BuildError(f"{self._option}: {name} has an odd number of columns")

    def _remedy(self, rows: int) -> str:
        """What to do about rows that blocks do not divide."""
        if self._format == "nvfp4":
            return "take --weights fp8 or int8"
        if self._format == "int4" and not self._zeros:  # for TensorRT, which takes no other blocks
            return "take --weights int8"
        fitting = [block for block in _SMALLER_BLOCKS if rows % block == 0]
        if fitting:
            return f"give --block {fitting[0]}"
        return (
            f"nor does any of onnxruntime, the smallest being {_SMALLER_BLOCKS[-1]}: leave the "
            "weights of this model as they are (--draft-weights none, where it is the draft)"
        )


def dividing_block(block: int, product: Product) -> int:
    """The block, or half of one of more than 64 rows that does not divide those of the matrix."""
    while block > _SMALLEST_HALVED and product.shape[0] % block:
        block //= 2
    return block


def _format_of(product: Product, wanted: QuantizationSpec) -> WeightFormat:
    found = wanted.head if product.is_head else wanted.weights
    assert found is not None
    return found


def _input_scales(work: Sequence[_Matrix]) -> dict[str, np.ndarray]:
    """Scales of every value that matrices inside the layers are multiplied by, by its name."""
    readers: dict[str, list[_Matrix]] = {}
    for matrix in work:
        if not matrix.is_head:
            readers.setdefault(matrix.source, []).append(matrix)
    scales = {}
    for name, group in readers.items():
        inputs = group[0].inputs
        assert inputs is not None
        found = awq.input_scales([m.load() for m in group], group[0].grid, inputs)
        if (found != 1).any():  # else a product by 1 would be computed for nothing
            scales[name] = found
    return scales

"""Weights of 4 bits by nvidia-modelopt, in place of the quantizers here. An optional extra.

Its ONNX side reads the exported graph as it is and leaves the standard form: blocked
`DequantizeLinear`, and a `Mul` in front of a product whose input it scales (AWQ). It searches on
one processor core and takes minutes where ours takes seconds; it is here for who has settled on it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.engines.errors import BuildError
from spec_export.engines.extras import require

_METHOD = "awq_lite"
_LENGTH = 128  # of a text; it puts what it sees into one array, so all have one length
_MOST_TEXTS = 16
_MODULES = ("modelopt", "onnx_graphsurgeon", "onnxruntime")


def quantized_by_modelopt(
    graph: Path, inputs: Sequence[Mapping[str, np.ndarray]], block: int
) -> ir.Model:
    """The graph with its layers' matrices in int4.

    Args:
        graph: as it was exported, float32, its weights beside it.
        inputs: of passes over calibration texts of one length, by name.
        block: rows of a column that share a scale.

    Raises:
        MissingExtra: the library is not installed.
        BuildError: it failed, or made another graph than it was given.
    """
    require("modelopt", *_MODULES)
    with _silent():
        from modelopt.onnx.quantization import int4

        try:
            made = int4.quantize(
                str(graph),
                calibration_method=_METHOD,
                calibration_data_reader=_reader(inputs),
                calibration_eps=["cpu"],
                block_size=block,
                nodes_to_exclude=_heads(graph),
                log_level="ERROR",
            )
        except Exception as error:
            raise BuildError(f"nvidia-modelopt failed: {type(error).__name__}: {error}") from error
    model: ir.Model = ir.from_proto(made)
    before = ir.load(graph).graph
    for values in ("inputs", "outputs"):
        names = [value.name for value in getattr(model.graph, values)]
        if names != [value.name for value in getattr(before, values)]:
            raise BuildError(f"nvidia-modelopt changed the {values} of {graph.name}")
    return model


def equal_texts(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Texts of one length, cut out of all of them in a row.

    Raises:
        BuildError: there are fewer tokens than one text takes.
    """
    joined = [token for text in texts for token in text]
    parts = [joined[at : at + _LENGTH] for at in range(0, len(joined) - _LENGTH + 1, _LENGTH)]
    if not parts:
        raise BuildError(
            f"{len(joined)} tokens to calibrate on; --quantizer modelopt takes {_LENGTH} or more"
        )
    return parts[:_MOST_TEXTS]


def _heads(graph: Path) -> list[str]:
    """Names of products that are logits."""
    from spec_export.engines.products import products

    found = products(ir.load(graph).graph, head=True)
    return [str(product.node.name) for product in found if product.is_head]


def _reader(inputs: Sequence[Mapping[str, np.ndarray]]) -> Any:
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Passes one after the other, and again from the start."""

        def __init__(self) -> None:
            self._left = iter(inputs)

        def get_next(self) -> Any:
            """Inputs of the next pass; None at the end."""
            found = next(self._left, None)
            return None if found is None else dict(found)

        def rewind(self) -> None:
            """Begin again."""
            self._left = iter(inputs)

    return Reader()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep its progress and remarks off the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            Path(os.devnull).open("w", encoding="utf-8") as nowhere,
            contextlib.redirect_stderr(nowhere),
            contextlib.redirect_stdout(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)

"""The largest magnitude that a scale of 8 bits should hold, from samples of a value."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from spec_export.engines.graphs import Calibrator

_PERCENTILE = 99.99
_BINS, _QUANTIZED_BINS = 2048, 128


def largest_magnitude(values: np.ndarray, calibrator: Calibrator) -> float:
    """What a scale should reach up to; what lies beyond is clipped.

    Args:
        values: float32 samples.
        calibrator: `minmax` (the largest there is), `percentile` (99.99 % of them) or `entropy`
            (least loss of information), the latter two as onnxruntime's calibrators find them.
    """
    largest = float(np.abs(values).max())
    if calibrator == "minmax" or largest == 0:
        return largest
    from onnxruntime.quantization.calibrate import HistogramCollector

    collector = HistogramCollector(
        method=calibrator,
        symmetric=True,
        num_bins=_BINS,
        num_quantized_bins=_QUANTIZED_BINS,
        percentile=_PERCENTILE,
        scenario="same",
    )
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        collector.collect({"value": values})
        low, high, *_ = collector.compute_collection_result()["value"]
    return min(largest, max(_magnitude(low), _magnitude(high)))


def _magnitude(found: Any) -> float:
    return float(abs(np.asarray(found)))

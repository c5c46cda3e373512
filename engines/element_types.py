"""Element types of graphs as numpy has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from spec_export.engines.graphs import ElementType

# numpy has no bfloat16. What has that type here is only stored, copied and compared bit by bit.
_OPAQUE = {"bfloat16": np.dtype(np.uint16)}


def numpy_type(name: ElementType) -> np.dtype[Any]:
    """The type of an array that holds such elements; bits alone for bfloat16."""
    return _OPAQUE.get(name) or np.dtype(name)


def as_float32(values: np.ndarray, dtype: ElementType) -> np.ndarray:
    """The numbers of such an array."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def as_element_type(values: np.ndarray, of: ElementType, wanted: ElementType) -> np.ndarray:
    """The same numbers as another type, rounded to nearest; the array itself if it has it."""
    if of == wanted:
        return values
    numbers = as_float32(values, of)
    if wanted != "bfloat16":
        return numbers.astype(numpy_type(wanted))
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)

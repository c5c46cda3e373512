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

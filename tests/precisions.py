"""Exported directories of another precision, derived from float32 ones the way `build` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_export.console import Steps
from spec_export.engines.build import read_exported
from spec_export.engines.graphs import ElementType
from spec_export.engines.prepare import retype_exported
from spec_export.quantizing import Quantizing, quantize_into


def derive(
    exported: Path,
    out: Path,
    dtype: ElementType | None = None,
    backend: str = "tensorrt-rtx",
    **asked: Any,
) -> Path:
    """Quantize, then retype, below `out`; `asked` are the fields of a `Quantizing`."""
    found, graphs, options = exported, read_exported(exported), Quantizing(**asked)
    wanted = options.wanted(graphs, backend)
    if wanted:
        found = out / "quantized"
        found.mkdir(parents=True)
        with Steps(quiet=True) as steps:
            quantize_into(exported, graphs, found, wanted, options, steps)
    if dtype is not None:
        source, found = found, out / "retyped"
        found.mkdir(parents=True)
        retype_exported(source, found, dtype)
    return found

"""Options of `inspect` and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from spec_export.options import argument, option

Inspected = Annotated[Path, argument("PATH", "A bundle, an exported directory, or an .onnx file.")]
Law = Annotated[
    bool, option("Also test the emitted law of every rule: chi-square over rounds.", "--law")
]
ExportedHere = Annotated[
    Path | None,
    option(
        "What the bundle was built from: compare engines with it, where the bundle has no graphs.",
        "--exported",
        metavar="DIR",
    ),
]
PolygraphyRuns = Annotated[
    Path | None,
    option(
        "Have Polygraphy judge the outputs of every pass, and keep them in DIR for its tools.",
        "--polygraphy",
        metavar="DIR",
    ),
]
Record = Annotated[
    bool,
    option("Write exactness and device into the manifest; the bundle's hash changes.", "--record"),
]

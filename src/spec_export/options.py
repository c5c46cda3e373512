"""Makes arguments and options of commands, as types; and those that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

# Groups of options in the help of commands.
DRAFTS, SHAPES, OUTPUT = "Drafts", "Shapes", "Output"


class BackendName(str, Enum):
    """Engine libraries that `build` compiles for."""

    onnxruntime = "onnxruntime"
    onnxruntime_cuda = "onnxruntime-cuda"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


class RuleName(str, Enum):
    """How drafts are accepted."""

    reject = "reject"
    block = "block"
    invariant = "invariant"


def argument(metavar: str, help: str) -> Any:
    """An argument, which has no default."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(
    help: str,
    *names: str,
    metavar: str | None = None,
    group: str | None = None,
    default: str | None = None,
    minimum: int | None = None,
) -> Any:
    """An option; `default` says in words what happens where none is given."""
    return typer.Option(
        *names,
        metavar=metavar,
        help=help,
        rich_help_panel=group,
        show_default=default or False,
        min=minimum,
    )


def shown(help: str, *, metavar: str | None = None, group: str | None = None) -> Any:
    """An option whose help shows the default of its function."""
    return typer.Option(metavar=metavar, help=help, rich_help_panel=group)


BundleIn = Annotated[Path, argument("BUNDLE", "Bundle directory.")]
Backend = Annotated[BackendName, shown("Engine library.", group=SHAPES)]
Threads = Annotated[
    int | None,
    option("Threads to compute with.", metavar="N", default="as built", minimum=1),
]
Quiet = Annotated[bool, option("No progress and no report.", "-q", "--quiet")]
ExportedOut = Annotated[Path, option("Directory to write.", "-o", "--output", metavar="EXPORTED")]
Exported = Annotated[Path, argument("EXPORTED", "Directory made by `export`.")]
AsJson = Annotated[bool, option("One JSON object on stdout.", "--json")]
Report = Annotated[
    Path | None,
    option("Write a page as well: .html, or .png where Chromium is.", metavar="FILE", group=OUTPUT),
]

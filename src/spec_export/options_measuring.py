"""Options of `calibrate` and `plan`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from spec_export.options import RuleName, option, shown

# Groups of options in the help of a command.
_SPECULATION, _MEMORY = "Speculation", "Memory"
_PRECISIONS, _SYNTHETIC = "Precisions", "Set acceptance"


class BoardName(str, Enum):
    """Boards whose memory is known."""

    orin_nano_8gb = "orin-nano-8gb"
    orin_nx_16gb = "orin-nx-16gb"
    agx_orin_64gb = "agx-orin-64gb"
    agx_thor = "agx-thor"


Prompts = Annotated[
    Path | None,
    option(
        "Prompts to measure on: one a line, or .jsonl with `prompt` and `category`.",
        metavar="FILE",
        default="a few of several kinds",
    ),
]
MeasuredTokens = Annotated[int, shown("Tokens to generate after each prompt.", metavar="N")]
MeasuredTemperature = Annotated[float, shown("Of sampling; acceptance depends on it.")]
MeasuredRule = Annotated[RuleName, shown("How drafts are accepted above temperature 0.")]
MeasuredSeed = Annotated[int, shown("Of sampling.", metavar="S")]
ProfileOut = Annotated[
    Path | None,
    option(
        "Profile to write.",
        "-o",
        "--output",
        metavar="FILE",
        default="profile.json in the bundle",
    ),
]
BuiltFrom = Annotated[
    Path | None,
    option(
        "Compare precisions of both models too: the directory the bundle was built from.",
        "--exported",
        metavar="DIR",
        group=_PRECISIONS,
    ),
]
ComparedPrecisions = Annotated[
    str | None,
    option(
        "Which: int8 or int4, with +head and +kv, separated by commas.",
        "--precisions",
        metavar="NAMES",
        group=_PRECISIONS,
        default="int8+head,int4+head",
    ),
]
Synthetic = Annotated[
    str | None,
    option(
        "Instead: drafts that are right as often as this, such as 0.2,0.5,0.8, at no cost.",
        metavar="A,B,..",
        group=_SYNTHETIC,
    ),
]
SyntheticCost = Annotated[
    float | None,
    option(
        "With it: time of a draft step over that of a target step, added by computation.",
        "--cost-ratio",
        metavar="C",
        group=_SYNTHETIC,
    ),
]
VerdictOnly = Annotated[bool, option("The verdict only.", "-q", "--quiet")]
Alpha = Annotated[
    float | None,
    option("Share of tested drafts that are accepted, 0 to 1.", metavar="A", group=_SPECULATION),
]
CostRatio = Annotated[
    float | None,
    option(
        "Time of a draft step over that of a target step; 0 for look-up.",
        metavar="C",
        group=_SPECULATION,
    ),
]
VerifyCost = Annotated[
    Path | None,
    option(
        "Times of target passes by rows (docs/calibration.md), or a profile.json, which has all.",
        metavar="FILE",
        group=_SPECULATION,
        default="a pass over more rows costs a plain step",
    ),
]
GammaMax = Annotated[
    int | None,
    option(
        "The largest gamma to weigh.",
        metavar="N",
        group=_SPECULATION,
        default="16, or as far as the file reaches",
    ),
]
Memory = Annotated[
    Path | None,
    option(
        "Plan memory instead: of a bundle or an exported directory.",
        metavar="PATH",
        group=_MEMORY,
    ),
]
BoardOption = Annotated[BoardName | None, option("What has to hold it.", "--device", group=_MEMORY)]
MemoryLimit = Annotated[
    str | None,
    option("The same as an amount, such as 8GiB.", metavar="SIZE", group=_MEMORY),
]
PlannedMaxLen = Annotated[
    int | None,
    option(
        "Tokens of a context.",
        "--max-len",
        metavar="N",
        group=_MEMORY,
        default="the bundle's, else 1024",
    ),
]
PlannedGamma = Annotated[
    str | None,
    option(
        "Drafts per round, such as 4 or 2,4,8.",
        "--gamma",
        metavar="N",
        group=_MEMORY,
        default="the bundle's, else 4",
    ),
]
PlannedChunk = Annotated[
    int | None,
    option(
        "Tokens of a prefill pass.",
        "--chunk",
        metavar="N",
        group=_MEMORY,
        default="the bundle's, else 128",
    ),
]

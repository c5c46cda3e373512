"""Options of `export`, `build` and `model-to-engine`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from spec_export.options import DRAFTS, SHAPES, argument, option, shown

# The group of options in the help of a command.
_TENSORRT = "TensorRT"


class ElementTypeName(str, Enum):
    """Element types of exported weights and caches."""

    float32 = "float32"
    float16 = "float16"


class BuiltTypeName(str, Enum):
    """Element types that engines compute with."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Target = Annotated[
    str, argument("TARGET", "Checkpoint: a Hugging Face directory, a hub id, or a .gguf file.")
]
Draft = Annotated[
    str,
    shown(
        "A smaller checkpoint with the same tokenizer, ngram (prompt lookup), or none.",
        metavar="DRAFT",
        group=DRAFTS,
    ),
]
BuiltGamma = Annotated[
    str,
    shown(
        "Drafts per round, 1 to 16, or several to choose from, such as 2,4,8.",
        metavar="N",
        group=DRAFTS,
    ),
]
MaxLen = Annotated[
    int | None,
    option(
        "Tokens of a context, prompt included.",
        metavar="N",
        group=SHAPES,
        default="1024, or all that the target has",
    ),
]
Chunk = Annotated[int, shown("Tokens of a prefill pass.", metavar="N", group=SHAPES)]
Dtype = Annotated[ElementTypeName, shown("Of weights and caches.", group=SHAPES)]
BuiltDtype = Annotated[
    BuiltTypeName | None,
    option(
        "Of weights and caches.",
        group=SHAPES,
        default="as exported; float16 for TensorRT",
    ),
]
ComputeCapability = Annotated[
    str | None,
    option(
        "GPUs to build for ahead of time, such as 8.6,8.9; tensorrt-rtx only.",
        metavar="CC",
        group=_TENSORRT,
        default="all that have the kernels",
    ),
]
Workspace = Annotated[
    str | None,
    option(
        "Device memory a kernel may work in, such as 2GiB; tensorrt only.",
        metavar="SIZE",
        group=_TENSORRT,
        default="all there is",
    ),
]
TimingCache = Annotated[
    Path | None,
    option(
        "Start from the kernel times in FILE, and add to them; tensorrt only.",
        metavar="FILE",
        group=_TENSORRT,
    ),
]
OptimizationLevel = Annotated[
    int | None,
    option(
        "How long to search for kernels, 0 to 5; tensorrt only.",
        "--builder-optimization-level",
        metavar="N",
        group=_TENSORRT,
        default="the library's own",
    ),
]
NoSingleRow = Annotated[
    bool,
    option(
        "Steps of one token compute two rows: about half the engine and its memory.",
        "--no-single-row",
        group=_TENSORRT,
    ),
]
BuildThreads = Annotated[
    int | None,
    option("Threads to compute with.", metavar="N", default="all processors", minimum=1),
]
TrustRemoteCode = Annotated[
    bool, option("Run code that comes with a checkpoint.", "--trust-remote-code")
]
KeepExported = Annotated[Path | None, option("Keep the portable ONNX here.", metavar="DIR")]
BundleOut = Annotated[
    Path, option("Bundle directory to write.", "-o", "--output", metavar="BUNDLE")
]

"""Arguments and options of the commands, as types; `cli` puts them together."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

# Groups of options in the help of a command.
_DRAFTS, _SHAPES, _SAMPLING, _OUTPUT = "Drafts", "Shapes", "Sampling", "Output"
_SPECULATION, _MEMORY, _TENSORRT = "Speculation", "Memory", "TensorRT"
_QUANTIZATION, _PRECISIONS = "Quantization", "Precisions"
_SYNTHETIC = "Set acceptance"


class BackendName(str, Enum):
    """Engine libraries that `build` compiles for."""

    onnxruntime = "onnxruntime"
    onnxruntime_cuda = "onnxruntime-cuda"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


class ElementTypeName(str, Enum):
    """Element types of exported weights and caches."""

    float32 = "float32"
    float16 = "float16"


class BuiltTypeName(str, Enum):
    """Element types that engines compute with."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class WeightsName(str, Enum):
    """Formats of quantized weights; the last two quantize nothing, and mean `--dtype`."""

    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"
    nvfp4 = "nvfp4"
    float16 = "float16"
    bfloat16 = "bfloat16"


class QuantizedName(str, Enum):
    """Formats of quantized weights."""

    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"
    nvfp4 = "nvfp4"


class DraftWeightsName(str, Enum):
    """Formats of a draft's weights."""

    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"
    nvfp4 = "nvfp4"
    none = "none"


class QuantizerName(str, Enum):
    """How weights are rounded."""

    rtn = "rtn"
    k_quant = "k-quant"
    hqq = "hqq"
    gptq = "gptq"
    awq = "awq"
    modelopt = "modelopt"


class HeadName(str, Enum):
    """Formats of the matrix that makes the logits."""

    int8 = "int8"
    int4 = "int4"


class CacheName(str, Enum):
    """Formats of quantized caches."""

    int8 = "int8"


class ActivationsName(str, Enum):
    """What matrices are multiplied by."""

    float = "float"
    int8 = "int8"
    fp8 = "fp8"


class CalibratorName(str, Enum):
    """What decides a fixed scale."""

    minmax = "minmax"
    percentile = "percentile"
    entropy = "entropy"


class BoardName(str, Enum):
    """Boards whose memory is known."""

    orin_nano_8gb = "orin-nano-8gb"
    orin_nx_16gb = "orin-nx-16gb"
    agx_orin_64gb = "agx-orin-64gb"
    agx_thor = "agx-thor"


class RuleName(str, Enum):
    """How drafts are accepted."""

    reject = "reject"
    block = "block"
    invariant = "invariant"


class DraftSamplingName(str, Enum):
    """How a drafting model chooses its tokens."""

    probabilistic = "probabilistic"
    greedy = "greedy"


def _argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def _option(
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


def _shown(help: str, *, metavar: str | None = None, group: str | None = None) -> Any:
    """An option whose help shows the default of its function."""
    return typer.Option(metavar=metavar, help=help, rich_help_panel=group)


# --- making -------------------------------------------------------------------------------------

Target = Annotated[
    str, _argument("TARGET", "Checkpoint: a Hugging Face directory, a hub id, or a .gguf file.")
]
Exported = Annotated[Path, _argument("EXPORTED", "Directory made by `export`.")]
Draft = Annotated[
    str,
    _shown(
        "A smaller checkpoint with the same tokenizer, ngram (prompt lookup), or none.",
        metavar="DRAFT",
        group=_DRAFTS,
    ),
]
BuiltGamma = Annotated[
    str,
    _shown(
        "Drafts per round, 1 to 16, or several to choose from, such as 2,4,8.",
        metavar="N",
        group=_DRAFTS,
    ),
]
MaxLen = Annotated[
    int | None,
    _option(
        "Tokens of a context, prompt included.",
        metavar="N",
        group=_SHAPES,
        default="1024, or all that the target has",
    ),
]
Chunk = Annotated[int, _shown("Tokens of a prefill pass.", metavar="N", group=_SHAPES)]
Dtype = Annotated[ElementTypeName, _shown("Of weights and caches.", group=_SHAPES)]
BuiltDtype = Annotated[
    BuiltTypeName | None,
    _option(
        "Of weights and caches.",
        group=_SHAPES,
        default="as exported; float16 for TensorRT",
    ),
]
Backend = Annotated[BackendName, _shown("Engine library.", group=_SHAPES)]
Weights = Annotated[
    WeightsName | None,
    _option(
        "Quantize the matrices inside the layers; float16 and bfloat16: the same as --dtype.",
        group=_QUANTIZATION,
        default="as --dtype",
    ),
]
QuantizedWeights = Annotated[
    QuantizedName | None,
    _option("Quantize the matrices inside the layers.", group=_QUANTIZATION, default="as exported"),
]
DraftWeights = Annotated[
    DraftWeightsName | None,
    _option("Those of the draft; changes no text.", group=_QUANTIZATION, default="as --weights"),
]
Quantizer = Annotated[
    QuantizerName | None,
    _option("How weights are rounded.", group=_QUANTIZATION, default="int4: awq, others: rtn"),
]
Block = Annotated[
    int | None,
    _option(
        "Rows of a column that share a scale; 0: all.",
        metavar="N",
        group=_QUANTIZATION,
        default="32; TensorRT: 128, int8 0",
    ),
]
Head = Annotated[
    HeadName | None,
    _option(
        "Quantize the matrix that makes the target's logits too.",
        group=_QUANTIZATION,
        default="as exported",
    ),
]
Kv = Annotated[
    CacheName | None,
    _option("Quantize the caches.", group=_QUANTIZATION, default="as exported"),
]
ActivationsOption = Annotated[
    ActivationsName | None,
    _option(
        "Round what quantized matrices are multiplied by.",
        "--activations",
        group=_QUANTIZATION,
        default="int8 by row; TensorRT: float",
    ),
]
CalibratorOption = Annotated[
    CalibratorName | None,
    _option(
        "How far the fixed scales of --activations reach; TensorRT only.",
        "--calibrator",
        group=_QUANTIZATION,
        default="minmax",
    ),
]
Calibration = Annotated[
    Path | None,
    _option(
        "Texts for gptq, awq, --kv and --activations: a line each, .jsonl, or .npz of input_ids.",
        "--calibration",
        metavar="FILE",
        group=_QUANTIZATION,
        default="some of several kinds",
    ),
]
ComputeCapability = Annotated[
    str | None,
    _option(
        "GPUs to build for ahead of time, such as 8.6,8.9; tensorrt-rtx only.",
        metavar="CC",
        group=_TENSORRT,
        default="all that have the kernels",
    ),
]
Workspace = Annotated[
    str | None,
    _option(
        "Device memory a kernel may work in, such as 2GiB; tensorrt only.",
        metavar="SIZE",
        group=_TENSORRT,
        default="all there is",
    ),
]
TimingCache = Annotated[
    Path | None,
    _option(
        "Start from the kernel times in FILE, and add to them; tensorrt only.",
        metavar="FILE",
        group=_TENSORRT,
    ),
]
OptimizationLevel = Annotated[
    int | None,
    _option(
        "How long to search for kernels, 0 to 5; tensorrt only.",
        "--builder-optimization-level",
        metavar="N",
        group=_TENSORRT,
        default="the library's own",
    ),
]
NoSingleRow = Annotated[
    bool,
    _option(
        "Steps of one token compute two rows: about half the engine and its memory.",
        "--no-single-row",
        group=_TENSORRT,
    ),
]
BuildThreads = Annotated[
    int | None,
    _option("Threads to compute with.", metavar="N", default="all processors", minimum=1),
]
TrustRemoteCode = Annotated[
    bool, _option("Run code that comes with a checkpoint.", "--trust-remote-code")
]
KeepExported = Annotated[Path | None, _option("Keep the portable ONNX here.", metavar="DIR")]
BundleOut = Annotated[
    Path, _option("Bundle directory to write.", "-o", "--output", metavar="BUNDLE")
]
ExportedOut = Annotated[Path, _option("Directory to write.", "-o", "--output", metavar="EXPORTED")]
Quiet = Annotated[bool, _option("No progress and no report.", "-q", "--quiet")]

# --- looking ------------------------------------------------------------------------------------

BundleIn = Annotated[Path, _argument("BUNDLE", "Bundle directory.")]
Inspected = Annotated[Path, _argument("PATH", "A bundle, an exported directory, or an .onnx file.")]
Law = Annotated[
    bool, _option("Also test the emitted law of every rule: chi-square over rounds.", "--law")
]
ExportedHere = Annotated[
    Path | None,
    _option(
        "What the bundle was built from: compare engines with it, where the bundle has no graphs.",
        "--exported",
        metavar="DIR",
    ),
]
PolygraphyRuns = Annotated[
    Path | None,
    _option(
        "Have Polygraphy judge the outputs of every pass, and keep them in DIR for its tools.",
        "--polygraphy",
        metavar="DIR",
    ),
]
Record = Annotated[
    bool,
    _option("Write exactness and device into the manifest; the bundle's hash changes.", "--record"),
]
AsJson = Annotated[bool, _option("One JSON object on stdout.", "--json")]

# --- calibrating --------------------------------------------------------------------------------

Prompts = Annotated[
    Path | None,
    _option(
        "Prompts to measure on: one a line, or .jsonl with `prompt` and `category`.",
        metavar="FILE",
        default="a few of several kinds",
    ),
]
MeasuredTokens = Annotated[int, _shown("Tokens to generate after each prompt.", metavar="N")]
MeasuredTemperature = Annotated[float, _shown("Of sampling; acceptance depends on it.")]
MeasuredRule = Annotated[RuleName, _shown("How drafts are accepted above temperature 0.")]
MeasuredSeed = Annotated[int, _shown("Of sampling.", metavar="S")]
ProfileOut = Annotated[
    Path | None,
    _option(
        "Profile to write.",
        "-o",
        "--output",
        metavar="FILE",
        default="profile.json in the bundle",
    ),
]
BuiltFrom = Annotated[
    Path | None,
    _option(
        "Compare precisions of both models too: the directory the bundle was built from.",
        "--exported",
        metavar="DIR",
        group=_PRECISIONS,
    ),
]
ComparedPrecisions = Annotated[
    str | None,
    _option(
        "Which: int8 or int4, with +head and +kv, separated by commas.",
        "--precisions",
        metavar="NAMES",
        group=_PRECISIONS,
        default="int8+head,int4+head",
    ),
]
Synthetic = Annotated[
    str | None,
    _option(
        "Instead: drafts that are right as often as this, such as 0.2,0.5,0.8, at no cost.",
        metavar="A,B,..",
        group=_SYNTHETIC,
    ),
]
SyntheticCost = Annotated[
    float | None,
    _option(
        "With it: time of a draft step over that of a target step, added by computation.",
        "--cost-ratio",
        metavar="C",
        group=_SYNTHETIC,
    ),
]
VerdictOnly = Annotated[bool, _option("The verdict only.", "-q", "--quiet")]

# --- planning -----------------------------------------------------------------------------------

Alpha = Annotated[
    float | None,
    _option("Share of tested drafts that are accepted, 0 to 1.", metavar="A", group=_SPECULATION),
]
CostRatio = Annotated[
    float | None,
    _option(
        "Time of a draft step over that of a target step; 0 for look-up.",
        metavar="C",
        group=_SPECULATION,
    ),
]
VerifyCost = Annotated[
    Path | None,
    _option(
        "Times of target passes by rows (docs/calibration.md), or a profile.json, which has all.",
        metavar="FILE",
        group=_SPECULATION,
        default="a pass over more rows costs a plain step",
    ),
]
GammaMax = Annotated[
    int | None,
    _option(
        "The largest gamma to weigh.",
        metavar="N",
        group=_SPECULATION,
        default="16, or as far as the file reaches",
    ),
]
Memory = Annotated[
    Path | None,
    _option(
        "Plan memory instead: of a bundle or an exported directory.",
        metavar="PATH",
        group=_MEMORY,
    ),
]
BoardOption = Annotated[
    BoardName | None, _option("What has to hold it.", "--device", group=_MEMORY)
]
MemoryLimit = Annotated[
    str | None,
    _option("The same as an amount, such as 8GiB.", metavar="SIZE", group=_MEMORY),
]
PlannedMaxLen = Annotated[
    int | None,
    _option(
        "Tokens of a context.",
        "--max-len",
        metavar="N",
        group=_MEMORY,
        default="the bundle's, else 1024",
    ),
]
PlannedGamma = Annotated[
    str | None,
    _option(
        "Drafts per round, such as 4 or 2,4,8.",
        "--gamma",
        metavar="N",
        group=_MEMORY,
        default="the bundle's, else 4",
    ),
]
PlannedChunk = Annotated[
    int | None,
    _option(
        "Tokens of a prefill pass.",
        "--chunk",
        metavar="N",
        group=_MEMORY,
        default="the bundle's, else 128",
    ),
]
Report = Annotated[
    Path | None,
    _option(
        "Write a page as well: .html, or .png where Chromium is.", metavar="FILE", group=_OUTPUT
    ),
]

# --- running ------------------------------------------------------------------------------------

Threads = Annotated[
    int | None,
    _option("Threads to compute with.", metavar="N", default="as built", minimum=1),
]
Pipeline = Annotated[
    bool | None,
    _option(
        "Enqueue a round before the last one was read.",
        "--pipeline/--no-pipeline",
        default="where the device works on its own",
    ),
]
Stdin = Annotated[str | None, _argument("-", "Read the prompt from stdin.")]
Prompt = Annotated[str | None, _option("The prompt.", metavar="TEXT", default="read from stdin")]
Chat = Annotated[bool, _option("Put the prompt into the chat template.", "--chat")]
Gamma = Annotated[
    str | None,
    _option(
        "Drafts per round, 0 (off) to the built gamma, or auto: what pays, by the profile.",
        metavar="N",
        group=_DRAFTS,
        default="the built one",
    ),
]
DraftConfidence = Annotated[
    float | None,
    _option(
        "Draft no further than a token whose row gives its best one less, 0 (off) to 1.",
        metavar="P",
        group=_DRAFTS,
        default="off, or with --gamma auto what the profile says",
    ),
]
FastPlain = Annotated[
    bool,
    _option(
        "Passes without drafts compute one row: faster, perhaps other bits.",
        "--fast-plain",
        group=_DRAFTS,
    ),
]
MaxTokens = Annotated[
    int | None,
    _option(
        "Tokens to generate at most.",
        metavar="N",
        group=_SAMPLING,
        default="to the end of the context",
    ),
]
Temperature = Annotated[
    float, _shown("0 takes the most probable token.", metavar="T", group=_SAMPLING)
]
Seed = Annotated[
    int | None,
    _option("Of all randomness.", metavar="S", group=_SAMPLING, default="drawn, and reported"),
]
Samples = Annotated[
    int | None,
    _option(
        "Texts to generate, each with a seed of its own.",
        metavar="N",
        group=_SAMPLING,
        default="1",
    ),
]
Rule = Annotated[
    RuleName | None,
    _option(
        "How drafts are accepted above temperature 0; all follow the target's law.",
        group=_SAMPLING,
        default="invariant with --seed, else reject",
    ),
]
DraftSampling = Annotated[
    DraftSamplingName, _shown("How a drafting model chooses.", group=_SAMPLING)
]
TopK = Annotated[int, _shown("Keep the K most probable tokens; 0: all.", group=_SAMPLING)]
TopP = Annotated[float, _shown("Keep the most probable tokens up to this share.", group=_SAMPLING)]
MinP = Annotated[
    float, _shown("Drop tokens less probable than this share of the best.", group=_SAMPLING)
]
TypicalP = Annotated[
    float, _shown("Keep tokens whose surprise is nearest the entropy.", group=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float, _shown("Divides logits of tokens seen, prompt included.", group=_SAMPLING)
]
PresencePenalty = Annotated[float, _shown("Taken off logits of tokens generated.", group=_SAMPLING)]
FrequencyPenalty = Annotated[
    float, _shown("Taken off logits of tokens generated, once for each time.", group=_SAMPLING)
]
NoRepeatNgram = Annotated[int, _shown("No n-gram twice; 0: off.", metavar="N", group=_SAMPLING)]
LogitBias = Annotated[
    list[str] | None,
    _option("Added to a logit; may be given again.", metavar="ID=BIAS", group=_SAMPLING),
]
Ban = Annotated[
    list[int] | None,
    _option("A token that may not come; may be given again.", metavar="ID", group=_SAMPLING),
]
Allow = Annotated[
    list[int] | None,
    _option(
        "A token that may come, and no others; may be given again.", metavar="ID", group=_SAMPLING
    ),
]
MinTokens = Annotated[int, _shown("No end token before these.", metavar="N", group=_SAMPLING)]
JsonSchema = Annotated[
    Path | None,
    _option("The text matches the JSON schema in FILE.", metavar="FILE", group=_SAMPLING),
]
Regex = Annotated[str | None, _option("The text matches REGEX.", metavar="REGEX", group=_SAMPLING)]
Lark = Annotated[
    Path | None, _option("The text follows the grammar in FILE.", metavar="FILE", group=_SAMPLING)
]
Logprobs = Annotated[
    int,
    _shown("With --json: alternatives listed for each token, 0 to 20.", metavar="N", group=_OUTPUT),
]
Stop = Annotated[
    list[str] | None,
    _option("End before this text; may be given again.", metavar="TEXT", group=_SAMPLING),
]
Compare = Annotated[
    bool,
    _option(
        "Time the text against plain decoding: does speculation pay?",
        "--compare",
        group=_OUTPUT,
    ),
]
RunAsJson = Annotated[
    bool, _option("One JSON object on stdout, nothing else.", "--json", group=_OUTPUT)
]
TextOnly = Annotated[bool, _option("The text only.", "-q", "--quiet", group=_OUTPUT)]

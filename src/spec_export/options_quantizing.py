"""Options of whatever quantizes: bits of weights, caches and products."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from spec_export.options import option

# The group of options in the help of a command.
_QUANTIZATION = "Quantization"


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


Weights = Annotated[
    WeightsName | None,
    option(
        "Quantize the matrices inside the layers; float16 and bfloat16: the same as --dtype.",
        group=_QUANTIZATION,
        default="as --dtype",
    ),
]
QuantizedWeights = Annotated[
    QuantizedName | None,
    option("Quantize the matrices inside the layers.", group=_QUANTIZATION, default="as exported"),
]
DraftWeights = Annotated[
    DraftWeightsName | None,
    option("Those of the draft; changes no text.", group=_QUANTIZATION, default="as --weights"),
]
Quantizer = Annotated[
    QuantizerName | None,
    option("How weights are rounded.", group=_QUANTIZATION, default="int4: awq, others: rtn"),
]
Block = Annotated[
    int | None,
    option(
        "Rows of a column that share a scale; 0: all.",
        metavar="N",
        group=_QUANTIZATION,
        default="32; TensorRT: 128, int8 0",
    ),
]
Head = Annotated[
    HeadName | None,
    option(
        "Quantize the matrix that makes the logits too.",
        group=_QUANTIZATION,
        default="as exported",
    ),
]
Kv = Annotated[
    CacheName | None,
    option("Quantize the caches.", group=_QUANTIZATION, default="as exported"),
]
ActivationsOption = Annotated[
    ActivationsName | None,
    option(
        "Round what quantized matrices are multiplied by.",
        "--activations",
        group=_QUANTIZATION,
        default="int8 by row; TensorRT: float",
    ),
]
CalibratorOption = Annotated[
    CalibratorName | None,
    option(
        "How far the fixed scales of --activations reach; TensorRT only.",
        "--calibrator",
        group=_QUANTIZATION,
        default="minmax",
    ),
]
Calibration = Annotated[
    Path | None,
    option(
        "Texts for gptq, awq, --kv and --activations: a line each, .jsonl, or .npz of input_ids.",
        "--calibration",
        metavar="FILE",
        group=_QUANTIZATION,
        default="some of several kinds",
    ),
]

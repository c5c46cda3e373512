"""How the weights of a bundle are made smaller: options, their defaults and their limits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from spec_export.engines.errors import BuildError, RequestError

if TYPE_CHECKING:
    from spec_export.console import Steps
    from spec_export.engines.graphs import (
        Activations,
        Calibrator,
        GraphsSpec,
        ModelSpec,
        QuantizationSpec,
        Quantizer,
        WeightFormat,
    )
    from spec_export.engines.quantize import Observe, Wanted

_TENSORRT = ("tensorrt", "tensorrt-rtx")
_ON_PROCESSOR = "onnxruntime"
_BLOCK = 32  # of onnxruntime: rows keep their bits whatever the width of a pass
_TENSORRT_BLOCKS = (128, 64)
_LARGEST_BLOCK = 256
_WHOLE = ("int8", "int4")


@dataclass(frozen=True)
class Quantizing:
    """What was asked for; None: not asked for.

    Attributes:
        weights: of the target's matrices and, unless `draft_weights` is given, of the draft's.
        draft_weights: of the draft's; `none`: as exported.
        quantizer: how they are rounded.
        block: rows of a column that share a scale, 0: all.
        head: of the matrices that make the logits, of the models whose weights are quantized.
        kv: of the caches.
        activations: of what matrices are multiplied by; `float`: as exported.
        calibrator: what decides how far the fixed scales of activations reach.
        texts: file to calibrate on.
    """

    weights: WeightFormat | None = None
    draft_weights: WeightFormat | Literal["none"] | None = None
    quantizer: Quantizer | None = None
    block: int | None = None
    head: Literal["int8", "int4"] | None = None
    kv: Literal["int8"] | None = None
    activations: Literal["int8", "fp8", "float"] | None = None
    calibrator: Calibrator | None = None
    texts: Path | None = None

    def wanted(self, graphs: GraphsSpec, backend: str) -> dict[str, QuantizationSpec]:
        """What to make of each model of an exported directory; none of those that stay.

        Raises:
            BuildError: the options do not go together, or with the backend.
        """
        found = {}
        for name, spec in graphs.models.items():
            weights = self.weights
            if name == "draft" and self.draft_weights is not None:
                weights = None if self.draft_weights == "none" else self.draft_weights
            is_left = name == "draft" and self.draft_weights == "none"
            if weights is not None or (self.kv is not None and not is_left):
                found[name] = self._spec(name, spec, weights, backend)
        self._check_used(graphs, found)
        return found

    def _spec(
        self, name: str, spec: ModelSpec, weights: WeightFormat | None, backend: str
    ) -> QuantizationSpec:
        from spec_export.engines.graphs import BY_ROW, QuantizationSpec
        from spec_export.engines.rounding import NEED_ZEROS

        option = "--weights"
        if name == "draft" and self.draft_weights is not None:
            option = "--draft-weights"
        _check_backend(weights, option, self, backend)
        if backend in _TENSORRT:
            _check_formats(weights, option, self)
        is_whole = weights in _WHOLE
        quantizer: Quantizer = self.quantizer or ("awq" if weights == "int4" else "rtn")
        on_gpu = backend in _TENSORRT
        if quantizer != "rtn" and not is_whole:
            raise BuildError(f"--quantizer {quantizer} is for {option} int8 or int4")
        if quantizer in NEED_ZEROS and on_gpu:
            raise BuildError(
                f"--quantizer {quantizer} makes zero points, and {backend} reads weights without; "
                "take rtn, gptq or awq"
            )
        if quantizer == "modelopt" and (weights != "int4" or self.head or self.kv):
            raise BuildError(
                "--quantizer modelopt makes --weights int4 and nothing else; leave out --head and "
                "--kv, or take awq"
            )
        if self.calibrator is not None and (not on_gpu or self.activations not in ("int8", "fp8")):
            raise BuildError(
                "--calibrator decides the fixed scales of --activations int8 or fp8, for TensorRT; "
                "leave it out"
            )
        activations: Activations | None = None
        if self.activations in ("int8", "fp8") or (self.activations is None and not on_gpu):
            activations = self.activations if on_gpu else BY_ROW
        if quantizer in ("awq", "modelopt") and activations in ("int8", "fp8"):
            raise BuildError(f"--quantizer {quantizer} rounds for activations that are not rounded")
        return QuantizationSpec(
            weights=weights,
            quantizer=quantizer,
            block=_block(self.block, weights, spec, backend) if is_whole else 0,
            zeros=not on_gpu and _has_zeros(weights, quantizer),
            head=self.head if weights is not None else None,
            kv=self.kv,
            activations=activations if weights is not None else None,
            calibrator=self.calibrator or "minmax",
        )

    def _check_used(self, graphs: GraphsSpec, found: Wanted) -> None:
        """Refuse options that would change nothing."""
        from spec_export.engines.quantize import needs_observing

        if self.draft_weights is not None and "draft" not in graphs.models:
            raise BuildError("--draft-weights is for a drafting model, and there is none")
        given = {
            "--quantizer": self.quantizer,
            "--block": self.block,
            "--head": self.head,
            "--activations": self.activations,
            "--calibrator": self.calibrator,
            "--calibration": self.texts,
        }
        if any(spec.weights is not None for spec in found.values()):
            given = {}
        elif self.kv is not None:
            del given["--calibration"]
        for option, value in given.items():
            if value is not None:
                raise BuildError(f"{option} goes with --weights, which was not given")
        specs = found.values()
        if self.block is not None and not any(spec.weights in _WHOLE for spec in specs):
            raise BuildError("--block is for --weights int8 or int4; leave it out")
        if self.texts is not None and not any(map(needs_observing, specs)):
            raise BuildError(
                "--calibration is for --quantizer gptq or awq, --kv and, with TensorRT, "
                "--activations; nothing that was asked for goes by texts: leave it out"
            )


def _has_zeros(weights: WeightFormat | None, quantizer: Quantizer) -> bool:
    from spec_export.engines.rounding import NEED_ZEROS

    return quantizer in NEED_ZEROS or (weights == "int4" and quantizer != "modelopt")


def _check_backend(
    weights: WeightFormat | None, option: str, asked: Quantizing, backend: str
) -> None:
    """Refuse what an engine library has no kernels for."""
    if backend in _TENSORRT:
        if asked.kv is not None:
            raise BuildError(
                f"--kv {asked.kv}: {backend} writes caches of floating types only; build it with "
                "--backend onnxruntime, or leave --kv out"
            )
        return
    if backend != _ON_PROCESSOR:
        raise BuildError(
            f"quantized weights are not tried with --backend {backend}; leave them out"
        )
    if weights in ("fp8", "nvfp4"):
        raise BuildError(
            f"{option} {weights}: onnxruntime has no such kernels on a processor; take int8 or "
            "int4, or --backend tensorrt"
        )
    if asked.activations == "fp8":
        raise BuildError("--activations fp8 is for --backend tensorrt or tensorrt-rtx")


def _check_formats(weights: WeightFormat | None, option: str, asked: Quantizing) -> None:
    """Refuse what TensorRT's compiler ends in the middle of."""
    if weights is not None and asked.head not in (None, weights):
        raise BuildError(
            f"--head {asked.head}: TensorRT reads one format in a model; take --weights "
            f"{asked.head}, or leave --head out"
        )
    if asked.activations in ("int8", "fp8") and asked.activations != weights:
        raise BuildError(
            f"--activations {asked.activations} goes with weights of the same format in TensorRT, "
            f"and these are {weights}; take {option} {asked.activations}, or leave --activations "
            "out"
        )


def _block(asked: int | None, weights: WeightFormat | None, spec: ModelSpec, backend: str) -> int:
    if asked is not None:
        if asked and (not 16 <= asked <= _LARGEST_BLOCK or asked & (asked - 1)):
            raise BuildError(f"--block {asked}: 16, 32, 64, 128, 256, or 0 for a scale a column")
        if backend == _ON_PROCESSOR and not asked:
            raise BuildError(
                "--block 0: onnxruntime multiplies by weights with a scale a column in float32, "
                "and gains nothing; take 32"
            )
        if backend in _TENSORRT and asked not in (_TENSORRT_BLOCKS if weights == "int4" else (0,)):
            raise BuildError(
                f"--block {asked}: TensorRT reads int4 in blocks of 128 or 64, and int8 with a "
                "scale a column; leave --block out"
            )
        return asked
    if backend == _ON_PROCESSOR:
        return _BLOCK
    return 0 if weights == "int8" else _TENSORRT_BLOCKS[0]


def check_quantized(graphs: GraphsSpec, backend: str) -> None:
    """Refuse a directory that was quantized for another engine library.

    Raises:
        BuildError: names the model, how it was quantized and the remedy.
    """
    for name, spec in graphs.models.items():
        found = spec.quantization
        if found is None:
            continue
        reads = _tensorrt_reads(found) if backend in _TENSORRT else _processor_reads(found)
        if not reads:
            raise BuildError(
                f"the {name} is quantized in a form that {backend} does not read "
                f"({found.describe()}); quantize the float32 directory with `spec-export quantize "
                f"--backend {backend}`"
            )


def _tensorrt_reads(found: QuantizationSpec) -> bool:
    blocks = _TENSORRT_BLOCKS if found.weights == "int4" else (0,)
    is_plain = found.kv is None and not found.zeros
    return is_plain and (found.weights is None or found.block in blocks)


def _processor_reads(found: QuantizationSpec) -> bool:
    return found.weights not in ("fp8", "nvfp4") and found.activations != "fp8"


@contextlib.contextmanager
def quantized(
    exported: Path,
    graphs: GraphsSpec,
    wanted: Wanted,
    asked: Quantizing,
    beside: Path,
    steps: Steps,
) -> Iterator[Path]:
    """The exported directory, or a quantized one that goes away."""
    if not wanted:
        yield exported
        return
    from spec_export.making import directory_beside

    with directory_beside(beside, None) as folder:
        folder.mkdir()
        quantize_into(exported, graphs, folder, wanted, asked, steps)
        yield folder


def quantize_into(
    exported: Path, graphs: GraphsSpec, out: Path, wanted: Wanted, asked: Quantizing, steps: Steps
) -> None:
    """Write a quantized exported directory."""
    from spec_export.engines.quantize import needs_observing, quantize_exported

    observe = None
    if any(needs_observing(spec) for spec in wanted.values()):
        observe = _observer(exported, graphs, asked.texts, steps)
    for name, spec in wanted.items():
        steps.say(f"{name}: {spec.describe()}")
    quantize_exported(exported, out, wanted, observe, steps)


def quantize_directory(
    exported: Path, out: Path, asked: Quantizing, backend: str, steps: Steps
) -> GraphsSpec:
    """`quantize`: from an exported directory to another one, as a whole or not at all.

    Raises:
        BuildError: nothing was asked for, or what was does not go together.
    """
    from spec_export.engines.atomic import new_directory
    from spec_export.engines.build import read_exported
    from spec_export.engines.extras import require
    from spec_export.engines.graphs import GRAPHS_FILE

    require("build", "onnx_ir")
    graphs = read_exported(exported)
    _check_apart(exported, out)
    wanted = asked.wanted(graphs, backend)
    if not wanted:
        raise BuildError("nothing to quantize: give --weights, --draft-weights or --kv")
    with new_directory(out, GRAPHS_FILE) as work:
        quantize_into(exported, graphs, work, wanted, asked, steps)
    return read_exported(out)


def _check_apart(exported: Path, out: Path) -> None:
    """Refuse to write over what is read, or into it: of few bits float32 is not made again."""
    source, made = exported.resolve(), out.resolve()
    if source == made or source in made.parents or made in source.parents:
        raise BuildError(
            f"-o {out} is, holds or lies in {exported}, which is read and has to stay; choose "
            "another -o"
        )


def _observer(exported: Path, graphs: GraphsSpec, file: Path | None, steps: Steps) -> Observe:
    """Runs a model of an exported directory over the texts of a file, or over the default ones."""
    from spec_export.calibration.observe import observe
    from spec_export.calibration.texts import token_texts
    from spec_export.engines.ort import default_threads
    from spec_export.engines.quantize import Observed

    texts = token_texts(exported / graphs.text.tokenizer, file)

    def run(name: str) -> Observed:
        spec = graphs.models[name]
        highest = max((max(text) for text in texts if text), default=0)
        if highest >= spec.vocabulary:
            raise RequestError(
                f"a calibration text has the id {highest}, the {name} knows {spec.vocabulary}"
            )
        return observe(exported / spec.file, spec, texts, default_threads(), progress=steps)

    return run

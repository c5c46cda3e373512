"""Derive an exported directory of fewer bits from one in float32.

A stage between export and build: what comes out is an exported directory like any other, and any
backend that has the formats builds it. The graphs stay standard ONNX. A quantized target *is* the
target from here on: what speculative decoding emits follows the quantized model's law, exactly.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from spec_export.engines.activations import quantize_activations
from spec_export.engines.build import read_exported, verify_exported
from spec_export.engines.bundle import Progress, VerifiedFiles, no_progress
from spec_export.engines.caches import quantize_caches
from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import GRAPHS_FILE, GraphsSpec, ModelSpec, QuantizationSpec
from spec_export.engines.hashing import describe_files
from spec_export.engines.modelopt import equal_texts, quantized_by_modelopt
from spec_export.engines.passes import whole_pass
from spec_export.engines.products import products
from spec_export.engines.rounding import NEED_SAMPLES
from spec_export.engines.strict import to_json
from spec_export.engines.weight_blocks import Samples, dividing_block, quantize_weights
from spec_export.engines.weight_files import Pending, write_model

Wanted = Mapping[str, QuantizationSpec]
"""What to make of each model, by its name; models that are not named stay as they are."""


@dataclass(frozen=True)
class Observed:
    """What a float32 model did with calibration texts.

    Attributes:
        inputs: of matrices, `[rows, K]` float32, by the name of the value.
        largest: magnitude of each channel of a cache, `[Hkv, D]` float32, by the cache's input.
        texts: that it read, as token ids.
    """

    inputs: Samples
    largest: Mapping[str, np.ndarray]
    texts: Sequence[Sequence[int]] = ()


Observe = Callable[[str], Observed]
"""Runs a model, given by its name, over calibration texts."""


def needs_observing(wanted: QuantizationSpec) -> bool:
    """Whether calibration texts decide anything."""
    is_sampled = wanted.weights is not None and wanted.quantizer in NEED_SAMPLES
    return is_sampled or wanted.kv is not None or wanted.activations in ("int8", "fp8")


def quantize_exported(
    exported: Path,
    out: Path,
    wanted: Wanted,
    observe: Observe | None = None,
    progress: Progress = no_progress,
    memory: VerifiedFiles | None = None,
) -> None:
    """Write a quantized exported directory.

    Args:
        exported: in float32; not changed.
        out: an empty directory.
        wanted: what to make of each model.
        observe: for what goes by calibration texts.
        progress: called with (step, done, total).
        memory: which files were hashed before.

    Raises:
        BuildError: the directory is not in float32, is quantized already, or does not fit what is
            wanted.
        StorageError: the disk is full.
    """
    graphs = read_exported(exported)
    verify_exported(exported, graphs, memory)
    _check(graphs, wanted)
    models = {}
    for done, (name, spec) in enumerate(graphs.models.items()):
        progress("quantizing", done, len(graphs.models))
        (out / spec.file).parent.mkdir(parents=True, exist_ok=True)
        if name in wanted:
            observed = None
            if needs_observing(wanted[name]):
                assert observe is not None
                observed = observe(name)
            models[name] = _quantize(exported, out, spec, wanted[name], observed)
        else:
            models[name] = spec
            shutil.copytree(
                (exported / spec.file).parent,
                (out / spec.file).parent,
                dirs_exist_ok=True,
            )
    for folder in ("sampling", "text"):
        shutil.copytree(exported / folder, out / folder, copy_function=link_or_copy)
    text = to_json(replace(graphs, models=models, files=describe_files(out)))
    (out / GRAPHS_FILE).write_text(text, encoding="utf-8")
    progress("quantizing", len(graphs.models), len(graphs.models))


def link_or_copy(source: str, target: str) -> None:
    """Have the same file in two directories: twice the name, or else twice the bytes."""
    with contextlib.suppress(OSError):  # another file system, or one without links
        Path(target).hardlink_to(source)
        return
    shutil.copyfile(source, target)


@contextlib.contextmanager
def requantized(exported: Path, wanted: Wanted) -> Iterator[Path]:
    """The graphs that an engine with small weights is held against, made again where need be.

    What small weights round is not the engine's doing, what its own type rounds is within the
    tolerance of a comparison.

    Args:
        exported: the directory the engine was built from.
        wanted: how the engine's models are quantized.

    Raises:
        BuildError: the directory is in float32 and what was done to it depends on texts.
    """
    found = {name: spec.quantization for name, spec in read_exported(exported).models.items()}
    missing = {name: spec for name, spec in wanted.items() if found.get(name) != spec}
    if not missing:
        yield exported
        return
    for name, spec in missing.items():
        if needs_observing(spec):
            raise BuildError(
                f"the {name} was quantized by calibration texts ({spec.describe()}), which the "
                "exported directory does not hold: name the directory that `spec-export quantize` "
                "wrote"
            )
    with tempfile.TemporaryDirectory(prefix="spec-export.", ignore_cleanup_errors=True) as folder:
        quantize_exported(exported, Path(folder), missing)
        yield Path(folder)


def _check(graphs: GraphsSpec, wanted: Wanted) -> None:
    for name in wanted:
        if name not in graphs.models:
            raise BuildError(
                f"there is no {name} to quantize: the directory has drafts of method "
                f"{graphs.method!r}"
            )
        spec = graphs.models[name]
        if spec.quantization is not None:
            raise BuildError(
                f"the {name} is quantized already ({spec.quantization.describe()}); start from the "
                "float32 directory"
            )
        if spec.dtype != "float32":
            raise BuildError(
                f"the {name} was exported as {spec.dtype}, and only float32 is quantized; export "
                "it again with --dtype float32"
            )


def _quantize(
    exported: Path,
    out: Path,
    spec: ModelSpec,
    wanted: QuantizationSpec,
    observed: Observed | None,
) -> ModelSpec:
    """Write one model, and return its description."""
    if wanted.quantizer == "modelopt":
        assert observed is not None
        return _by_modelopt(exported, out, spec, wanted, observed)
    model = ir.load(exported / spec.file)
    originals = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    found = products(model.graph, head=False)
    pending: dict[str, Pending] = {}
    if wanted.weights is not None:
        samples = None if observed is None else observed.inputs
        pending |= quantize_weights(model, originals, wanted, samples)
    if wanted.activations == "int8" or wanted.activations == "fp8":
        assert observed is not None
        kind = wanted.activations
        pending |= quantize_activations(
            model.graph, found, kind, observed.inputs, wanted.calibrator
        )
    if wanted.kv is not None:
        assert observed is not None
        made, spec = quantize_caches(model.graph, spec, observed.largest)
        pending |= made
    size = write_model(model, pending, out / spec.file)
    return replace(spec, parameters_bytes=size, quantization=wanted)


def _by_modelopt(
    exported: Path, out: Path, spec: ModelSpec, wanted: QuantizationSpec, observed: Observed
) -> ModelSpec:
    """Write one model that nvidia-modelopt quantized, and return its description."""
    graph = exported / spec.file
    matrices = products(ir.load(graph).graph, head=False)
    block = min(dividing_block(wanted.block, matrix) for matrix in matrices)
    passes = [whole_pass(spec, text) for text in equal_texts(observed.texts)]
    model = quantized_by_modelopt(graph, passes, block)
    size = write_model(model, {}, out / spec.file)
    return replace(spec, parameters_bytes=size, quantization=replace(wanted, block=block))

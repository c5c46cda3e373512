"""Derive an exported directory of another precision from one in float32.

So one exported directory serves every device. What comes out is an exported directory like any
other: any backend builds it, and its graphs are the standard ones its engines are held against.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from spec_export.engines.build import read_exported, verify_exported
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import GRAPHS_FILE, ElementType, GraphsSpec, ModelSpec, TensorSpec
from spec_export.engines.hashing import describe_files
from spec_export.engines.retype import HALF_TYPES, retype
from spec_export.engines.strict import to_json
from spec_export.engines.weight_blocks import WeightFormat, quantize_weights
from spec_export.engines.weight_files import write_model


@dataclass(frozen=True)
class Precision:
    """What to compute with.

    Attributes:
        dtype: of activations, caches and weights that are not quantized; None: as exported.
        weights: of the matrices inside the layers; None: like the rest.
    """

    dtype: ElementType | None = None
    weights: WeightFormat | None = None

    def changes(self, graphs: GraphsSpec) -> bool:
        """Whether anything differs from how it was exported."""
        kinds = {spec.dtype for spec in graphs.models.values()}
        return self.weights is not None or (self.dtype is not None and kinds != {self.dtype})


def prepare_exported(
    exported: Path, out: Path, precision: Precision, progress: Progress = no_progress
) -> None:
    """Write an exported directory of another precision.

    Args:
        exported: as it was exported; not changed.
        out: an empty directory.
        precision: what to compute with.
        progress: called with (step, done, total).

    Raises:
        BuildError: the exported directory cannot be retyped, or a weight does not fit the type.
        StorageError: the disk is full.
    """
    graphs = read_exported(exported)
    verify_exported(exported, graphs)
    models = {}
    for done, (name, spec) in enumerate(graphs.models.items()):
        progress("changing the precision", done, len(graphs.models))
        models[name] = prepare_model(exported, out, spec, precision)
    for folder in ("sampling", "text"):
        shutil.copytree(exported / folder, out / folder, copy_function=_link)
    text = to_json(replace(graphs, models=models, files=describe_files(out)))
    (out / GRAPHS_FILE).write_text(text, encoding="utf-8")
    progress("changing the precision", len(graphs.models), len(graphs.models))


@contextlib.contextmanager
def comparable(exported: Path, weights: WeightFormat | None) -> Iterator[Path]:
    """The graphs that an engine is held against: as exported, with the engine's small weights.

    What an engine rounds by its element type is within the tolerance of a comparison, and
    onnxruntime has no kernels for bfloat16; what small weights round is not the engine's doing.

    Args:
        exported: the directory the engine was built from.
        weights: format of its quantized weights.
    """
    if weights is None:
        yield exported
        return
    with tempfile.TemporaryDirectory(prefix="spec-export.", ignore_cleanup_errors=True) as folder:
        prepare_exported(exported, Path(folder), Precision(None, weights))
        yield Path(folder)


def prepare_model(exported: Path, out: Path, spec: ModelSpec, precision: Precision) -> ModelSpec:
    """Write one model of another precision, and return its description.

    Raises:
        BuildError: it cannot be retyped, or a weight does not fit the type.
        StorageError: the disk is full.
    """
    model = ir.load(exported / spec.file)
    originals = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    dtype = precision.dtype or spec.dtype
    pending = {}
    if dtype != spec.dtype:
        if spec.dtype != "float32" or dtype not in HALF_TYPES:
            raise BuildError(
                f"--dtype {dtype}: the directory was exported as {spec.dtype}, and only float32 "
                "is retyped; export it again with --dtype float32"
            )
        pending = retype(model, dtype)
    if precision.weights is not None:
        pending |= quantize_weights(model, originals, precision.weights)
        pending = {n: made for n, made in pending.items() if n in model.graph.initializers}
    file = out / spec.file
    file.parent.mkdir(parents=True, exist_ok=True)
    size = write_model(model, pending, file)
    return replace(_retyped(spec, dtype), parameters_bytes=size)


def _retyped(spec: ModelSpec, dtype: ElementType) -> ModelSpec:
    """The description with every float but the logits of another type."""

    def tensor(found: TensorSpec) -> TensorSpec:
        is_changed = found.dtype == spec.dtype and found.name != "logits"
        return replace(found, dtype=dtype) if is_changed else found

    return replace(
        spec,
        dtype=dtype,
        inputs=tuple(map(tensor, spec.inputs)),
        outputs=tuple(map(tensor, spec.outputs)),
        states=tuple(replace(state, dtype=dtype) for state in spec.states),
    )


def _link(source: str, target: str) -> None:
    with contextlib.suppress(OSError):  # another file system, or one without links
        Path(target).hardlink_to(source)
        return
    shutil.copyfile(source, target)

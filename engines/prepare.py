"""Derive an exported directory in half precision from one in float32.

So one exported directory serves every device. What comes out is an exported directory like any
other: any backend builds it, and its graphs are the standard ones its engines are held against.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from spec_export.engines.build import read_exported, verify_exported
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import GRAPHS_FILE, ElementType, ModelSpec, TensorSpec
from spec_export.engines.hashing import describe_files
from spec_export.engines.quantize import link_or_copy
from spec_export.engines.retype import HALF_TYPES, retype
from spec_export.engines.strict import to_json
from spec_export.engines.weight_files import write_model


def retype_exported(
    exported: Path, out: Path, dtype: ElementType, progress: Progress = no_progress
) -> None:
    """Write an exported directory of another element type.

    Args:
        exported: in float32, its weights perhaps quantized; not changed.
        out: an empty directory.
        dtype: of activations, caches and weights that are not quantized.
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
        models[name] = retype_model(exported, out, spec, dtype)
    for folder in ("sampling", "text"):
        shutil.copytree(exported / folder, out / folder, copy_function=link_or_copy)
    text = to_json(replace(graphs, models=models, files=describe_files(out)))
    (out / GRAPHS_FILE).write_text(text, encoding="utf-8")
    progress("changing the precision", len(graphs.models), len(graphs.models))


def retype_model(exported: Path, out: Path, spec: ModelSpec, dtype: ElementType) -> ModelSpec:
    """Write one model of another element type, and return its description.

    Raises:
        BuildError: it cannot be retyped, or a weight does not fit the type.
        StorageError: the disk is full.
    """
    if dtype != spec.dtype and (spec.dtype != "float32" or dtype not in HALF_TYPES):
        raise BuildError(
            f"--dtype {dtype}: the directory was exported as {spec.dtype}, and only float32 "
            "is retyped; export it again with --dtype float32"
        )
    if spec.quantization is not None and spec.quantization.kv is not None:
        raise BuildError(f"--dtype {dtype}: caches of int8 go with float32")
    model = ir.load(exported / spec.file)
    pending = retype(model, dtype) if dtype != spec.dtype else {}
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

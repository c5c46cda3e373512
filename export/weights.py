"""Stream weights from a checkpoint into the external-data file of a graph, one tensor at a time.

At no moment are two weights in memory. Transposed tensors are written as the graph reads them.
The file is written once, in graph order; each tensor starts at a multiple of 4096 bytes, so that
it can be mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from spec_export.engines.atomic import storage_error
from spec_export.engines.errors import CheckpointError, ExportError

ALIGNMENT = 4096
DTYPES: dict[str, tuple[npt.DTypeLike, ir.DataType, torch.dtype]] = {
    "float32": (np.float32, ir.DataType.FLOAT, torch.float32),
    "float16": (np.float16, ir.DataType.FLOAT16, torch.float16),
}
_SMALL_BYTES = 1024


class WeightReader(Protocol):
    """Reads one parameter by name; nothing is kept."""

    def read(self, name: str) -> np.ndarray:
        """Content of a parameter."""


def attach_weights(
    model: ir.Model,
    transposed: dict[str, bool],
    reader: WeightReader,
    dtype: str,
    data_file: Path,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the weights beside the graph and point the initializers at them.

    Args:
        model: portable graph; initializers named in `transposed` have no value yet.
        transposed: parameter name to whether the graph reads it transposed.
        reader: where values come from.
        dtype: `float32` or `float16`.
        data_file: file to write, in the directory the graph will be saved to.
        progress: called with the bytes written after each tensor.

    Returns:
        Bytes of all weights.

    Raises:
        CheckpointError: a value overflows `dtype` or is not finite.
        StorageError: the disk is full.
    """
    numpy_dtype, ir_dtype, _ = DTYPES[dtype]
    total = 0
    try:
        with data_file.open("wb") as sink:
            for name, flip in transposed.items():
                value = model.graph.initializers[name]
                content = _converted(reader.read(name), numpy_dtype, name)
                stored = content.T if flip else content
                offset = _pad_to_alignment(sink.tell(), sink.write)
                _write_rows(sink.write, stored)
                value.const_value = ir.ExternalTensor(
                    data_file.name,
                    offset,
                    stored.nbytes,
                    ir_dtype,
                    shape=ir.Shape(stored.shape),
                    name=name,
                    base_dir=data_file.parent,
                )
                value.dtype, value.shape = ir_dtype, ir.Shape(stored.shape)
                total += stored.nbytes
                del content, stored
                progress(value.const_value.nbytes)
    except OSError as error:
        raise storage_error(error, data_file) from error
    return total


def save_graph(model: ir.Model, path: Path) -> None:
    """Write the graph itself; its weights stay in the external file."""
    try:
        ir.save(model, path)
    except OSError as error:
        raise storage_error(error, path) from error


def map_weights(module: torch.nn.Module, model: ir.Model, transposed: dict[str, bool]) -> None:
    """Point a torch module's parameters at the written file, memory mapped, without a copy."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, flip in transposed.items():
        tensor = model.graph.initializers[name].const_value
        assert isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None
        torch_dtype = next(t for _, i, t in DTYPES.values() if i == tensor.dtype)
        mapped = torch.from_file(
            str(tensor.path),
            shared=False,
            size=(tensor.offset + tensor.nbytes) // torch_dtype.itemsize,
            dtype=torch_dtype,
        )[tensor.offset // torch_dtype.itemsize :].view(*tensor.shape.numpy())
        data = mapped.t() if flip else mapped
        if data.shape != parameters[name].shape:
            raise ExportError(f"{name} was written with shape {tuple(data.shape)}")
        parameters[name].data = data
    tied = [n for n in parameters if n not in transposed and parameters[n].numel()]
    canonical = {id(parameters[n]) for n in transposed}
    lost = [n for n in tied if id(parameters[n]) not in canonical]
    if lost:
        _drop_unread(module, lost)


def _drop_unread(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Parameters the graph never reads must not influence the reference either."""
    for name in names:
        parameter = module.get_parameter(name)
        parameter.data = torch.full_like(parameter.data, float("nan"))


def _converted(value: np.ndarray, dtype: npt.DTypeLike, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        converted = value.astype(dtype, copy=False)
    for start in range(0, max(len(converted), 1), 4096) if converted.ndim else ():
        if not np.isfinite(converted[start : start + 4096]).all():
            was_finite = bool(np.isfinite(value[start : start + 4096]).all())
            raise CheckpointError(
                f"{name} overflows {np.dtype(dtype).name}; use another --dtype"
                if was_finite
                else f"{name} holds NaN or infinity; the checkpoint is damaged"
            )
    return converted


def _pad_to_alignment(position: int, write: Callable[[bytes], int]) -> int:
    padding = -position % ALIGNMENT
    write(b"\0" * padding)
    return position + padding


def _write_rows(write: Callable[[memoryview], int], array: np.ndarray) -> None:
    """Write in blocks of about 16 MiB, so that a transposed view is never copied whole."""
    if array.ndim == 0 or array.nbytes <= _SMALL_BYTES:
        write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return
    rows = max(1, (16 << 20) // max(1, array.nbytes // len(array)))
    for start in range(0, len(array), rows):
        block = np.ascontiguousarray(array[start : start + rows])
        write(block.reshape(-1).view(np.uint8).data)

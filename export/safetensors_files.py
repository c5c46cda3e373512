"""Map the tensors of a safetensors checkpoint, one file or sharded, without reading them.

Headers come from strangers: every size in them is checked against the file before it is used, and
a shard index can only name files of its own directory. Knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from spec_export.engines.errors import CheckpointError
from spec_export.export.json_files import parse_json_object, read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def safetensors_files(directory: Path) -> list[Path]:
    """The files that together hold a checkpoint; empty when the directory has none.

    A shard index decides where there is one; else `model.safetensors`; else the only safetensors
    file there is.

    Raises:
        CheckpointError: the index is malformed, names a file outside the directory or a missing
            one; or several files and no index.
    """
    if (directory / INDEX).exists():
        return _shards(directory)
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} has {len(found)} safetensors files and no {INDEX} that says which "
            f"belong together ({found[0].name}, {found[1].name}, ...); add the index"
        )
    return found


def _shards(directory: Path) -> list[Path]:
    weight_map = read_json_object(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX} has no weight_map; download it again")
    names = list(dict.fromkeys(weight_map.values()))
    for name in names:
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                f"{directory / INDEX} names {name!r}; a shard is a .safetensors file of the same "
                "directory. Do not trust this checkpoint"
            )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(names)} shards are missing, first {missing[0]}; "
            "finish the download"
        )
    return [directory / name for name in names]


def _is_plain_name(name: str) -> bool:
    return PurePosixPath(name).name == name and "\\" not in name and name.endswith(".safetensors")


def map_safetensors(files: list[Path]) -> dict[str, np.ndarray]:
    """Map every tensor of the files.

    Args:
        files: as from `safetensors_files`.

    Returns:
        Read-only views of the mapped files by tensor name; no page of them is read.

    Raises:
        CheckpointError: a file is truncated, its header is wrong, or a tensor appears twice.
    """
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        for name, tensor in _mapped(file):
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} is in another shard too")
            tensors[name] = tensor
    return tensors


def _mapped(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    header, data_start = _read_header(file)
    data = _map_from(file, data_start)
    covered = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        dtype, shape, start, end = _checked(entry, name, file)
        if start != covered:
            raise CheckpointError(
                f"{file}: tensor {name} starts at byte {start}, expected {covered}; the header is "
                "damaged"
            )
        covered = end
        if end > len(data):
            raise CheckpointError(
                f"{file} is truncated: tensor {name} ends at byte {data_start + end}, the file at "
                f"{data_start + len(data)}; download it again"
            )
        yield name, data[start:end].view(dtype).reshape(shape)
    if covered != len(data):
        raise CheckpointError(f"{file} has {len(data) - covered} bytes that belong to no tensor")


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is truncated or not safetensors: its header claims {length} bytes, "
                    f"the file has {size}; download it again"
                )
            content = opened.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    header = parse_json_object(content, f"the header of {file}")
    header.pop("__metadata__", None)
    return header, _LENGTH_BYTES + length


def _map_from(file: Path, start: int) -> np.ndarray:
    if file.stat().st_size == start:  # an empty range cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(file, np.uint8, "r", offset=start).view(np.ndarray)


def _offsets(entry: Any) -> tuple[int, int]:
    """Sort key; anything malformed sorts first, where `_checked` names it."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return (offsets[0], offsets[1]) if _are_sizes(offsets) and len(offsets) == 2 else (-1, -1)


def _checked(entry: Any, name: str, file: Path) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{file}: the header entry of {name} is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: tensor {name} has shape {shape!r} and bytes {offsets!r}")
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {shape} in {dtype} takes {nbytes} bytes, its header "
            f"says {offsets[1] - offsets[0]}"
        )
    return _DTYPES[dtype], tuple(shape), offsets[0], offsets[1]


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

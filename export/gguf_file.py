"""Read the header of a GGUF file and map its tensors.

A strict reader of its own, because the file comes from strangers and the one in the `gguf` package
trusts it: an array that claims 2^60 elements must be one sentence, not an endless loop. Knows the
format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and nothing of models.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from spec_export.engines.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # ggml's own limit
_MAX_NAME_BYTES = 65535
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)


class _BadHeader(Exception):
    """What is wrong, without the name of the file."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        shape: outermost dimension first, as torch has it.
        kind: how its values are stored.
        start: first byte in the file.
        nbytes: bytes in the file.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose header was found consistent with its size.

    Attributes:
        path: the file.
        metadata: values by key; arrays are lists.
        tensors: by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    _bytes: np.ndarray

    def rows(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, `[rows, bytes per row]` uint8, mapped and read only."""
        tensor = self.tensors[name]
        stored = self._bytes[tensor.start : tensor.start + tensor.nbytes]
        return stored.reshape(math.prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path) -> GGUFFile:
    """Read and check a header; no tensor is read.

    Args:
        path: the file.

    Raises:
        CheckpointError: not GGUF, truncated, or inconsistent with itself.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with mapped:
            metadata, tensors = _Header(mapped).read()
        data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    except _BadHeader as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header ends early ({error}); download it again"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
    return GGUFFile(path, metadata, tensors, data)


class _Header:
    """One pass over a header. Every count is checked against the bytes left before it is used."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped, self._size, self._at = mapped, len(mapped), 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._mapped[:4] != _MAGIC:
            raise _BadHeader("it does not start with GGUF, so it is no GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise _BadHeader(f"GGUF version {version}; versions 2 and 3, little endian, are read")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        self._expect(key_count, 13, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._name("metadata key")
            if key in metadata:
                raise _BadHeader(f"metadata key {key} appears twice")
            metadata[key] = self._value(self._scalar("I"), key)
        self._expect(tensor_count, 24, "tensors")
        described = [self._tensor() for _ in range(tensor_count)]
        return metadata, self._placed(described, metadata)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._mapped, self._at)
        self._at += struct.calcsize(code)
        return value

    def _expect(self, count: int, at_least: int, what: str) -> None:
        if count * at_least > self._size - self._at:
            raise _BadHeader(
                f"truncated or damaged: it claims {count} {what} with {self._size - self._at} "
                "bytes left"
            )

    def _string(self) -> bytes:
        length = self._scalar("Q")
        self._expect(length, 1, "bytes of text")
        self._at += length
        return self._mapped[self._at - length : self._at]

    def _name(self, what: str) -> str:
        name = self._string()
        if len(name) > _MAX_NAME_BYTES:
            raise _BadHeader(f"a {what} of {len(name)} bytes")
        return name.decode("utf-8")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string().decode("utf-8", errors="replace")
        if kind == _ARRAY:
            return self._array(key)
        raise _BadHeader(f"{key} has the unknown type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._expect(count, 8, f"strings in {key}")
            return [self._string().decode("utf-8", errors="replace") for _ in range(count)]
        if kind not in _SCALARS:
            raise _BadHeader(f"{key} is an array of the unknown type {kind}")
        code = _SCALARS[kind]
        self._expect(count, struct.calcsize(code), f"elements in {key}")
        values = struct.unpack_from(f"<{count}{code}", self._mapped, self._at)
        self._at += count * struct.calcsize(code)
        return list(values)

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._name("tensor name")
        dims = self._scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise _BadHeader(f"tensor {name} has {dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = tuple(reversed([self._scalar("Q") for _ in range(dims)]))
        kind, offset = self._scalar("I"), self._scalar("Q")
        try:
            return name, shape, GGMLQuantizationType(kind), offset
        except ValueError:
            raise _BadHeader(f"tensor {name} is of ggml type {kind}, which is unknown") from None

    def _placed(
        self,
        described: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]],
        metadata: dict[str, Any],
    ) -> dict[str, GGUFTensor]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _BadHeader(f"general.alignment is {alignment!r}, expected a power of two")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                raise _BadHeader(f"tensor {name} appears twice")
            tensor = GGUFTensor(shape, kind, data_start + offset, _nbytes(name, shape, kind))
            if tensor.start + tensor.nbytes > self._size:
                raise _BadHeader(
                    f"truncated: tensor {name} ends at byte {tensor.start + tensor.nbytes}, the "
                    f"file at {self._size}; download it again"
                )
            tensors[name] = tensor
        return tensors


def _nbytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise _BadHeader(f"tensor {name} of shape {list(shape)} cannot be stored as {kind.name}")
    return math.prod(shape) // block * int(block_bytes)

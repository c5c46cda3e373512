"""Write the weights of a rewritten graph, one block of rows at a time.

A pass that changes weights does not compute them: it leaves a `Pending` for each, and what is
written here is made block by block from the mapped file of the exported directory. No weight is
ever in memory as a whole, and of those that are quantized one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from spec_export.engines.atomic import storage_error
from spec_export.engines.errors import BuildError

ALIGNMENT = 4096  # a tensor that starts at a page can be mapped
_BLOCK_BYTES = 16 << 20
_SMALL_BYTES = 1024

Blocks = Callable[[], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Pending:
    """A weight that is yet to be written.

    Attributes:
        dtype: of its elements; two elements of 4 bits share a byte, the first one in the low half.
        shape: of the tensor.
        blocks: makes its content, in order; the bytes of all blocks together are the tensor.
    """

    dtype: ir.DataType
    shape: tuple[int, ...]
    blocks: Blocks

    @classmethod
    def of(cls, content: np.ndarray | np.generic) -> Pending:
        """A small array that is there already."""
        array = np.asarray(content)
        return cls(ir.DataType.from_numpy(array.dtype), array.shape, lambda: iter((array,)))


def row_blocks(array: np.ndarray, multiple: int = 1) -> Iterator[np.ndarray]:
    """Slices of the first axis, of about 16 MiB and `multiple` rows each."""
    if array.ndim == 0:
        yield array
        return
    row = max(1, array.nbytes // max(1, len(array)))
    rows = max(1, _BLOCK_BYTES // (row * multiple)) * multiple
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def write_model(model: ir.Model, pending: dict[str, Pending], out: Path) -> int:
    """Write a graph and its weights, the latter to `<out>.data` beside it.

    Args:
        model: the graph. Initializers that are not in `pending` are copied.
        pending: weights to make, by initializer.
        out: the graph's file.

    Returns:
        Bytes of all weights.

    Raises:
        BuildError: the weights that are read have several names.
        StorageError: the disk is full or cannot be written.
    """
    data = out.with_name(f"{out.name}.data")
    total = 0
    try:
        with data.open("wb") as sink:
            for name, value in model.graph.initializers.items():
                made = pending.get(name) or _copied(value)
                offset = _align(sink.tell(), sink.write)
                for block in made.blocks():
                    sink.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                length = sink.tell() - offset
                total += length
                if length > _SMALL_BYTES or made.dtype.bitwidth < 8:
                    value.const_value = ir.ExternalTensor(
                        data.name,
                        offset,
                        length,
                        made.dtype,
                        shape=ir.Shape(made.shape),
                        name=name,
                        base_dir=data.parent,
                    )
                else:
                    sink.seek(offset)
                    sink.truncate()
                    value.const_value = _inline(name, made)
                value.dtype, value.shape = made.dtype, ir.Shape(made.shape)
        ir.save(model, out)
    except OSError as error:
        raise storage_error(error, out) from error
    except ValueError as error:
        if "hard link" not in str(error):
            raise
        raise BuildError(
            f"the weights beside {out.name} have several names (hard links), which onnx_ir does "
            "not read; copy the directory, and go on with the copy"
        ) from error
    return total


def _copied(value: ir.Value) -> Pending:
    tensor = value.const_value
    assert tensor is not None, value.name
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype.bitwidth < 8:  # an array of these has a byte for each, a file has not
        packed = np.frombuffer(tensor.tobytes(), np.uint8)
        return Pending(tensor.dtype, shape, lambda: row_blocks(packed))
    content = tensor.numpy()
    return Pending(tensor.dtype, shape, lambda: row_blocks(content))


def _inline(name: str, made: Pending) -> ir.TensorProtocol:
    raw = np.concatenate(
        [np.ascontiguousarray(b).reshape(-1).view(np.uint8) for b in made.blocks()]
    )
    return ir.tensor(raw.view(made.dtype.numpy()).reshape(made.shape), dtype=made.dtype, name=name)


def _align(position: int, write: Callable[[bytes], int]) -> int:
    padding = -position % ALIGNMENT
    write(b"\0" * padding)
    return position + padding

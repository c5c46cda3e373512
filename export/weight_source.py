"""What reading weights means to the rest of the export, and the check made before any is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from spec_export.engines.errors import CheckpointError

Shape = tuple[int, ...]
_NAMED = 4  # tensors an error names before it counts


class WeightSource(Protocol):
    """Weights by model parameter name, one tensor at a time; nothing is kept.

    Attributes:
        unused: tensors of the checkpoint that no parameter reads, by their names there.
    """

    unused: tuple[str, ...]

    def read(self, name: str) -> np.ndarray:
        """The value of one parameter, in the shape the model gives it.

        Args:
            name: parameter name as passed to `weights_for`.

        Returns:
            A read-only memory map where the file holds the value as it is (float32, float16,
            bfloat16 of `ml_dtypes`); a new array where it is computed. GGUF: float32.
        """
        ...

    def nbytes_largest(self) -> int:
        """Bytes of the largest array `read` returns."""
        ...


def check_shapes(wanted: Mapping[str, Shape], found: Mapping[str, Shape], where: str) -> None:
    """Refuse a checkpoint that lacks a parameter or holds it in another shape.

    Args:
        wanted: shape of every parameter of the model.
        found: shape of every parameter the checkpoint has.
        where: the checkpoint, for the message.

    Raises:
        CheckpointError: names the first few missing and misshapen parameters.
    """
    missing = [name for name in wanted if name not in found]
    misshapen = [
        f"{name} is {list(found[name])}, the model has {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != tuple(shape)
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(wanted)} weights are missing: {_some(missing)}")
    if misshapen:
        problems.append(f"{len(misshapen)} weights have another shape: {_some(misshapen)}")
    if problems:
        raise CheckpointError(
            f"{where} does not fit its configuration: {'; '.join(problems)}. "
            "Is the checkpoint complete, and is the configuration its own?"
        )


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")

"""Checks that every engine makes of what it is given to bind."""

from __future__ import annotations

from collections.abc import Mapping

from spec_export.engines.backend import Buffer
from spec_export.engines.element_types import numpy_type
from spec_export.engines.errors import EngineError
from spec_export.engines.graphs import ModelSpec, SamplingSpec, TensorSpec


def role_symbols(spec: ModelSpec | SamplingSpec) -> dict[str, dict[str, int]]:
    """What `T` and `R` are, by role; a sampling graph has one role, `run`, and no symbols."""
    if isinstance(spec, SamplingSpec):
        return {"run": {}}
    return {role.name: {"T": int(role.rows), "R": int(role.logit_rows)} for role in spec.roles}


def aliases_of(spec: ModelSpec | SamplingSpec) -> dict[str, str]:
    """Outputs that are the same memory as an input, by name."""
    if isinstance(spec, SamplingSpec):
        return {}
    return {state.output: state.input for state in spec.states if state.aliased}


def symbols_of(roles: Mapping[str, dict[str, int]], role: str) -> dict[str, int]:
    """The symbols of a role.

    Raises:
        EngineError: there is no such role.
    """
    if role not in roles:
        raise EngineError(f"no role {role!r}; this engine has {', '.join(roles) or 'none'}")
    return roles[role]


def shape_of(spec: TensorSpec, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """The dimensions of a tensor; -1 for a symbol that has no value."""
    return tuple(symbols.get(dim, -1) if isinstance(dim, str) else dim for dim in spec.dims)


def checked(
    buffers: Mapping[str, Buffer], spec: TensorSpec, symbols: Mapping[str, int], role: str
) -> Buffer:
    """The buffer of a tensor.

    Raises:
        EngineError: it is missing or of another shape or type.
    """
    if spec.name not in buffers:
        raise EngineError(f"role {role}: nothing is bound to {spec.name}")
    buffer, wanted = buffers[spec.name], shape_of(spec, symbols)
    if buffer.shape != wanted or buffer.dtype != numpy_type(spec.dtype):
        raise EngineError(
            f"role {role}: {spec.name} is {spec.dtype} {list(wanted)}, "
            f"bound was {buffer.dtype} {list(buffer.shape)}"
        )
    return buffer


def check_aliases(buffers: Mapping[str, Buffer], aliases: Mapping[str, str]) -> None:
    """Refuse a cache that does not come out where it went in.

    Raises:
        EngineError: an output and its input are different memory.
    """
    for output, source in aliases.items():
        if buffers[output].address != buffers[source].address:
            raise EngineError(f"{output} must be the same memory as {source}: caches grow in place")

"""Which optimization profile of an engine serves a role, read from the roles alone."""

from __future__ import annotations

from spec_export.engines.graphs import ModelSpec, RoleSpec

Shapes = dict[str, tuple[int, ...]]


def role_profiles(spec: ModelSpec) -> dict[str, int]:
    """The profile of every role of a pinned model; roles of one shape share one."""
    numbers: dict[tuple[int, int], int] = {}
    return {role.name: numbers.setdefault(_rows(role), len(numbers)) for role in spec.roles}


def profile_shapes(spec: ModelSpec, capacity: int) -> list[Shapes]:
    """The shape of every input in every profile, in the order of their numbers."""
    by_rows = {_rows(role): None for role in spec.roles}
    return [_shapes(spec, rows, logit_rows, capacity) for rows, logit_rows in by_rows]


def _rows(role: RoleSpec) -> tuple[int, int]:
    return int(role.rows), int(role.logit_rows)


def _shapes(spec: ModelSpec, rows: int, logit_rows: int, capacity: int) -> Shapes:
    pins = {"T": rows, "R": logit_rows, "C": capacity}
    return {
        tensor.name: tuple(pins[dim] if isinstance(dim, str) else dim for dim in tensor.dims)
        for tensor in spec.inputs
    }

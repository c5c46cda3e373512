"""Before a model is compiled: for which GPUs there are kernels, and with how many rows.

Asked of the library, with the attention and the weights of the model at hand. A pass of one row
without a kernel is compiled for two, the second one junk: the runtime reads the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx

from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import JUNK_ROLES, ModelSpec, RoleSpec
from spec_export.engines.trt_api import TensorRt
from spec_export.engines.trt_build import TrtOptions, missing_kernel
from spec_export.engines.trt_prepare import (
    AttentionShape,
    attention_model,
    attention_shapes,
    product_model,
    weight_blocks,
    weight_format,
)


@dataclass(frozen=True)
class RolePlan:
    """What a model is compiled for.

    Attributes:
        roles: with the rows they are compiled for.
        capabilities: GPUs; empty where the library builds for the one at hand.
        notes: what differs from what was asked for, in words.
    """

    roles: tuple[RoleSpec, ...]
    capabilities: tuple[str, ...]
    notes: tuple[str, ...]


class _Questions:
    """Asks the library once for each small graph and GPU."""

    def __init__(
        self,
        api: TensorRt,
        options: TrtOptions,
        model: onnx.ModelProto,
        spec: ModelSpec,
        capacity: int,
    ) -> None:
        self._api, self._options, self._dtype = api, options, spec.dtype
        self._shapes, self._weights = sorted(attention_shapes(model)), weight_format(model)
        self._blocks = weight_blocks(model)
        self._capacity, self._known = capacity, dict[tuple[bytes, str | None], str | None]()

    def weights(self, gpu: str | None) -> str | None:
        """Why a GPU cannot read the weights."""
        if self._weights is None:
            return None
        for block in self._blocks:
            reason = self._ask(product_model(self._dtype, self._weights, block), gpu)
            if reason is not None:
                return f"{self._weights} weights: {reason}"
        return None

    def attention(self, rows: int, gpu: str | None) -> str | None:
        """Why a GPU cannot run the attention of a pass of so many rows."""
        for shape in self._shapes:
            reason = self._ask(attention_model(shape, rows, self._capacity, self._dtype), gpu)
            if reason is not None:
                return f"{_subject(self._dtype, shape, rows)}: {reason}"
        return None

    def _ask(self, model: bytes, gpu: str | None) -> str | None:
        key = (model, gpu)
        if key not in self._known:
            self._known[key] = missing_kernel(self._api, model, self._options, gpu)
        return self._known[key]


def _subject(dtype: str, shape: AttentionShape, rows: int) -> str:
    return f"{dtype} attention of {rows} row{'s' * (rows != 1)}, {shape}"


def plan_roles(
    api: TensorRt,
    options: TrtOptions,
    model: onnx.ModelProto,
    spec: ModelSpec,
    capacity: int,
    among: tuple[str, ...] | None = None,
) -> RolePlan:
    """Find out what a model can be compiled for.

    Args:
        api: the library.
        options: what is asked of it.
        model: the graph, cache capacity pinned.
        spec: its description, roles pinned.
        capacity: rows of a cache.
        among: GPUs that the models before it are compiled for, where that matters.

    Raises:
        BuildError: for a GPU that was asked for, or for all that are left, there is no kernel;
            names the operator, its shape, the GPU and the remedy.
    """
    if spec.dtype == "float32":
        raise BuildError(
            f"{api.name} has no fused attention for float32, and unfused it would read and copy "
            "whole caches for every row; build with --dtype float16 or --dtype bfloat16"
        )
    questions = _Questions(api, options, model, spec, capacity)
    asked = options.compute_capabilities
    served: list[str | None] = []
    notes: list[str] = []
    gpus: tuple[str | None, ...] = asked or among or tuple(api.compute_capabilities()) or (None,)
    refusals = []
    for gpu in gpus:
        reason = questions.weights(gpu) or _wide_passes(questions, spec, gpu)
        if reason is None:
            served.append(gpu)
            continue
        refusals.append(f"compute capability {gpu}: {reason}" if gpu else reason)
        if asked:
            break
    if not served or (asked and refusals):
        rest = f", and the other model is for {', '.join(among)} alone" if among else ""
        raise BuildError(
            f"{api.name} {api.version} cannot compile {spec.architecture}: {refusals[0]}{rest}. "
            "Leave that GPU out, build with another --dtype or --weights, or with --backend "
            "onnxruntime"
        )
    notes += [f"not for {refusal}" for refusal in refusals]
    roles = tuple(
        _with_junk(role, questions, served, notes, options.single_row) for role in spec.roles
    )
    return RolePlan(roles, tuple(gpu for gpu in served if gpu is not None), tuple(notes))


def _wide_passes(questions: _Questions, spec: ModelSpec, gpu: str | None) -> str | None:
    for rows in sorted(_needed_rows(spec)):
        reason = questions.attention(rows, gpu)
        if reason is not None:
            return reason
    return None


def _needed_rows(spec: ModelSpec) -> Iterator[int]:
    """Rows that a pass cannot do without; one row may become two."""
    for role in spec.roles:
        yield max(2, int(role.rows)) if role.name in JUNK_ROLES else int(role.rows)


def _with_junk(
    role: RoleSpec,
    questions: _Questions,
    gpus: list[str | None],
    notes: list[str],
    single_row: bool,
) -> RoleSpec:
    if role.name not in JUNK_ROLES or role.rows != 1:
        return role
    if not single_row:
        notes.append(f"{role.name}: 2 rows, the second one junk, as asked for")
        return replace(role, rows=2, logit_rows=2)
    reasons = [(gpu, questions.attention(1, gpu)) for gpu in gpus]
    missing = [f"{reason} ({gpu})" if gpu else reason for gpu, reason in reasons if reason]
    if not missing:
        return role
    notes.append(f"{role.name}: 2 rows, the second one junk, for {missing[0]}")
    return replace(role, rows=2, logit_rows=2)

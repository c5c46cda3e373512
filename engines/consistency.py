"""Does a description fit together? What types cannot say of `graphs.json` and `manifest.json`.

Both are untrusted. What they say is allocated, bound and indexed with, so that a description that
contradicts itself has to end here, in one sentence, and not as a stray exception of the runtime.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spec_export.engines.errors import SchemaError
from spec_export.engines.graphs import (
    DRAFT_ROLES,
    TARGET_ROLES,
    Dim,
    ElementType,
    GraphsSpec,
    ModelSpec,
    RoleSpec,
    TensorSpec,
    pinned_roles,
    without_junk,
)
from spec_export.engines.manifest import Manifest
from spec_export.engines.sampling_names import exported_sampling, missing_sampling

_BLOCKS = (0, 16, 32, 64, 128, 256)
GAMMA_RANGE = (1, 16)
LONGEST_CHUNK = 4096
_LARGEST_DIM = 1 << 24  # above every vocabulary and context there is
_LARGEST_HEADS = 1 << 12  # above every head count and head size
_MOST_THREADS = 1 << 10
_READ = (
    TensorSpec("input_ids", "int64", (1, "T")),
    TensorSpec("kv_len", "int64", (1,)),
    TensorSpec("depth", "int64", ("T",)),
    TensorSpec("tree_mask", "bool", ("T", "T")),
    TensorSpec("logit_rows", "int64", ("R",)),
)


def check_graphs(graphs: GraphsSpec, origin: str) -> None:
    """Hold the parts of `graphs.json` against one another.

    Raises:
        SchemaError: naming the part that does not fit.
    """
    _check_models(graphs.models, _roles(graphs.method), "C", origin)
    needed = exported_sampling(graphs.method, draft_differs=_draft_differs(graphs.models))
    _need(needed.difference(graphs.sampling), origin)


def check_manifest(manifest: Manifest, origin: str) -> None:
    """Hold the parts of `manifest.json` against one another.

    Raises:
        SchemaError: naming the part that does not fit.
    """
    method, gamma, gammas = manifest.method, manifest.gamma, manifest.gammas
    low, high = (0, 0) if method == "none" else GAMMA_RANGE
    _within("gamma", gamma, low, high, origin)
    for narrower in gammas:
        _within("gammas", narrower, low, high, origin)
    widest = () if method == "none" else (gamma,)
    _equal("gammas", (gammas, gammas[-1:]), (tuple(sorted(set(gammas))), widest), origin)
    _within("chunk", manifest.chunk, 2, LONGEST_CHUNK, origin)
    _within("max_len", manifest.max_len, 2, _LARGEST_DIM, origin)
    capacity = rounded_capacity(manifest.max_len, manifest.chunk, gamma)
    _equal("capacity", manifest.capacity, capacity, origin)
    _within("device.threads", manifest.device.threads, 1, _MOST_THREADS, origin)
    pinned = {
        name: pinned_roles(roles, manifest.chunk, gammas) for name, roles in _roles(method).items()
    }
    _check_models(manifest.models, pinned, capacity, origin)
    _within("max_len", manifest.max_len, 2, manifest.models["target"].max_position, origin)
    differs = _draft_differs(manifest.models)
    _need(missing_sampling(manifest.sampling, method, gammas, draft_differs=differs), origin)
    tokenizer = manifest.files.get(manifest.text.tokenizer)
    recorded = manifest.text.tokenizer_sha256
    _equal("text.tokenizer_sha256", recorded, tokenizer and tokenizer.sha256, origin)


def rounded_capacity(max_len: int, chunk: int, gamma: int) -> int:
    """Rows of a cache: the context and the rows that may be written past it, rounded up to 16.

    Two rounds may be under way: the second is enqueued before it is known where the first ended.
    """
    return -(-(max_len + max(chunk, 2 * (gamma + 1))) // 16) * 16


def _roles(method: str) -> dict[str, tuple[RoleSpec, ...]]:
    roles: dict[str, tuple[RoleSpec, ...]] = {"target": TARGET_ROLES}
    return roles | ({"draft": DRAFT_ROLES} if method == "model" else {})


def _check_models(
    models: dict[str, ModelSpec],
    wanted: dict[str, tuple[RoleSpec, ...]],
    capacity: Dim,
    origin: str,
) -> None:
    _equal("models", sorted(models), sorted(wanted), origin)
    for name, roles in wanted.items():
        _check_model(models[name], roles, capacity, f"{origin}: models.{name}")


def _check_model(spec: ModelSpec, roles: tuple[RoleSpec, ...], capacity: Dim, origin: str) -> None:
    _within("vocabulary", spec.vocabulary, 1, _LARGEST_DIM, origin)
    _within("max_position", spec.max_position, 2, _LARGEST_DIM, origin)
    _equal("roles", tuple(map(without_junk, spec.roles)), roles, origin)
    _equal("states", len(spec.states), 2 * spec.layers, origin)
    _check_quantization(spec, origin)
    for index, state in enumerate(spec.states):
        place = f"{origin}.states[{index}]"
        heads, size = (state.dims[1], state.dims[3]) if len(state.dims) == 4 else (0, 0)
        _within("heads", heads, 1, _LARGEST_HEADS, place)
        _within("size", size, 1, _LARGEST_HEADS, place)
        _equal("dims", state.dims, (1, heads, capacity, size), place)
        _equal("kind", (state.kind, state.length_axis, state.aliased), ("self", 2, True), place)
        _equal("dtype", state.dtype, _cache_type(spec), place)
        if state.window is not None:
            _within("window", state.window, 1, _LARGEST_DIM, place)
    past = [TensorSpec(s.input, s.dtype, s.dims) for s in spec.states]
    present = [TensorSpec(s.output, s.dtype, s.dims) for s in spec.states]
    logits = TensorSpec("logits", "float32", (1, "R", spec.vocabulary))
    taps = {tap.name for tap in spec.taps}
    _equal("inputs", list(spec.inputs), [*_READ, *past], origin)
    made = [tensor for tensor in spec.outputs if tensor.name not in taps]
    _equal("outputs", made, [logits, *present], origin)
    _equal("names", len({t.name for t in (*past, *present)}), 2 * len(spec.states), origin)


def _check_quantization(spec: ModelSpec, place: str) -> None:
    found = spec.quantization
    if found is None:
        return
    _equal("quantization.block", found.block in _BLOCKS, True, place)
    is_whole = found.weights in ("int8", "int4")
    if not is_whole:
        _equal("quantization.zeros", found.zeros, False, place)
        _equal("quantization.block", found.block, 0, place)
    if found.weights is None:
        _equal("quantization.head", found.head, None, place)
        _equal("quantization.activations", found.activations, None, place)
    if found.kv is not None:
        _equal("dtype", spec.dtype, "float32", place)


def _cache_type(spec: ModelSpec) -> ElementType:
    kv = None if spec.quantization is None else spec.quantization.kv
    return kv or spec.dtype


def _within(what: str, found: Any, low: int, high: int, origin: str) -> None:
    if not isinstance(found, int) or not low <= found <= high:
        _refuse(f"{what} is {found!r}, which is outside {low} to {high}", origin)


def _equal(what: str, found: Any, wanted: Any, origin: str) -> None:
    if found != wanted:
        _refuse(f"{what} is {found!r:.200}, which does not fit the rest ({wanted!r:.200})", origin)


def _draft_differs(models: dict[str, ModelSpec]) -> bool:
    return "draft" in models and models["draft"].vocabulary != models["target"].vocabulary


def _need(missing: Iterable[str], origin: str) -> None:
    for name in sorted(missing):
        _refuse(f"the sampling graph {name!r} is missing", origin)


def _refuse(reason: str, origin: str) -> None:
    raise SchemaError(f"{origin}: {reason}; it was altered, or made by something else")

"""Hold one engine against another of the same model: same inputs, every role, several lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from spec_export.engines.backend import Device, Engine
from spec_export.engines.element_types import as_element_type, as_float32
from spec_export.engines.graphs import ModelSpec
from spec_export.engines.passes import PassRunner

# Of the largest logit. Two float32 kernels of one graph differ by summation order (2e-6 measured
# on 30 layers); half precision by its epsilon of 1e-3 times the depth.
_RELATIVE = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
# With caches of 8 bits a number may round to its neighbour, and what follows with it.
_RELATIVE_INT8_CACHES, _INT8_STEPS = 3e-2, 8.0

# Called with the outputs of a pass, float32 by name: those of the engine, those of the standard.
Watch = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], None]


def unwatched(_: Mapping[str, np.ndarray], __: Mapping[str, np.ndarray]) -> None:
    """Looks at nothing."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        passes: passes compared.
        worst_logit: largest difference of a logit.
        tolerance: what it was held against.
        argmax_agreement: share of rows with the same best token.
        touched: a pass that changed cache rows other than its own, or None.
        where: role and length of the worst difference.
        worst_cache: largest difference of a cache entry that a pass wrote.
        cache_tolerance: what it was held against.
        as_run: share of rows with the same best token as it runs, where that is by other sums
            than the graph says: in 8 bits, row by row; None: it was compared as it runs.
    """

    passes: int
    worst_logit: float
    tolerance: float
    argmax_agreement: float
    touched: str | None
    where: str
    worst_cache: float
    cache_tolerance: float
    as_run: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether everything is within bounds."""
        return (
            self.touched is None
            and self.worst_logit <= self.tolerance
            and self.worst_cache <= self.cache_tolerance
        )

    def describe(self) -> str:
        """One line for a message."""
        if self.touched is not None:
            return f"{self.touched} wrote cache rows outside its own"
        if self.worst_logit <= self.tolerance:
            return (
                f"cache entries differ by {self.worst_cache:.3g} (allowed: "
                f"{self.cache_tolerance:.3g})"
            )
        return (
            f"logits differ by {self.worst_logit:.3g} at {self.where} (allowed: "
            f"{self.tolerance:.3g})"
        )


def compare_engines(
    device: Device,
    engine: Engine,
    standard: Engine,
    spec: ModelSpec,
    max_len: int,
    standard_device: Device | None = None,
    standard_spec: ModelSpec | None = None,
    watch: Watch = unwatched,
) -> Comparison:
    """Run both engines over the same tokens and the same caches.

    Also checks that `engine` writes its cache in place: rows outside `kv_len .. kv_len + T` keep
    their bits.

    Args:
        device: where `engine` runs.
        engine: what is checked.
        standard: what it is held against.
        spec: of both, dimensions pinned.
        max_len: tokens of a context.
        standard_device: where `standard` runs, unless that is `device` too.
        standard_spec: its description where that is another one: of the type it was exported in.
        watch: called with what both made of each pass: logits, and the cache rows it wrote.
    """
    ours = PassRunner(device, engine, spec)
    theirs = PassRunner(standard_device or device, standard, standard_spec or spec)
    tokens = np.random.default_rng(7).integers(0, spec.vocabulary, max_len)
    ours.prefill(tokens)
    filled = ours.read_caches()
    worst, scale, agreed, rows, passes = -1.0, 1.0, 0, 0, 0
    worst_cache, cache_scale, where, touched = 0.0, 1.0, "", None
    kinds = [(m.dtype, o.dtype) for m, o in zip(spec.states, theirs.spec.states, strict=True)]
    given = [as_element_type(c, *kind) for c, kind in zip(filled, kinds, strict=True)]
    for role in spec.roles:
        width = min(int(role.rows), max_len)
        for kv_len in sorted({0, max_len // 2, max_len - width}):
            ours.write_caches(filled)
            theirs.write_caches(given)
            chosen = np.arange(width)[-int(role.logit_rows) :]
            part = tokens[kv_len : kv_len + width]
            logits = ours.run(role.name, part, kv_len, chosen)
            expected = theirs.run(role.name, part, kv_len, chosen)
            difference = _difference(logits, expected)
            if difference > worst or not np.isfinite(difference):
                worst, where = difference, f"role {role.name}, kv_len {kv_len}"
            after = ours.read_caches()
            if _wrote_elsewhere(after, filled, kv_len, int(role.rows)):
                touched = touched or f"role {role.name} at kv_len {kv_len}"
            made, wanted = {"logits": logits}, {"logits": expected}
            pairs = zip(spec.states, kinds, after, theirs.read_caches(), strict=True)
            for state, (of_mine, of_other), mine, other in pairs:
                rows_mine = as_float32(mine[:, :, kv_len : kv_len + width], of_mine)
                rows_other = as_float32(other[:, :, kv_len : kv_len + width], of_other)
                worst_cache = max(worst_cache, _difference(rows_mine, rows_other))
                cache_scale = max(cache_scale, float(np.abs(rows_other).max()))
                made[state.output], wanted[state.output] = rows_mine, rows_other
            watch(made, wanted)
            scale = max(scale, float(np.abs(expected).max()))
            agreed += int((logits.argmax(-1) == expected.argmax(-1)).sum())
            rows += len(logits)
            passes += 1
    has_small_caches = any(state.dtype == "int8" for state in spec.states)
    relative = _RELATIVE_INT8_CACHES if has_small_caches else _RELATIVE[spec.dtype]
    return Comparison(
        passes,
        worst,
        relative * scale,
        agreed / rows,
        touched,
        where,
        worst_cache,
        _INT8_STEPS if has_small_caches else relative * cache_scale,
    )


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    worst = float(np.abs(a - b).max())
    return worst if np.isfinite(worst) else float("inf")


def _wrote_elsewhere(
    after: list[np.ndarray], before: list[np.ndarray], kv_len: int, rows: int
) -> bool:
    return any(
        not np.array_equal(new[:, :, :kv_len], old[:, :, :kv_len])
        or not np.array_equal(new[:, :, kv_len + rows :], old[:, :, kv_len + rows :])
        for new, old in zip(after, before, strict=True)
    )

"""Compare an exported graph with the checkpoint's own torch code, pass by pass.

The reference is the unchanged transformers model with eager attention, its own cache and its own
masks, over the weights just written (memory mapped). It runs once over a random token sequence;
every case then seeds the graph's caches with the reference's rows and compares what the graph adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from spec_export.engines.errors import ExportError, ParityError
from spec_export.engines.graphs import ModelSpec, ParitySpec
from spec_export.export.skeleton import cache_argument, embedding_rows, output_head

_CHUNK = 128
_PADDED_CHUNK = 24
_LONGEST = 1024
# Work of the reference run: some tens of seconds on two CPU cores, where torch multiplies float16
# about forty times slower than float32.
_FLOPS = {"float32": 2e12, "float16": 5e10}
_CACHE_BYTES = 256 << 20
# Largest difference allowed, relative to the largest logit of the reference: float32 runs differ by
# summation order only (4e-7 on tiny models, 2e-5 on a 30-layer one); half precision by its epsilon
# (1e-3) times the depth of the model.
_TOLERANCE = {"float32": 5e-5, "float16": 2e-2}


@dataclass(frozen=True)
class Reference:
    """What torch computes for one token sequence.

    Attributes:
        tokens: `[context]` int64.
        logits: row index to `[V]` float32.
        caches: per state `[1, Hkv, context, D]`, key and value alternating.
    """

    tokens: np.ndarray
    logits: dict[int, np.ndarray]
    caches: list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """One pass: `rows` rows of which `valid` carry tokens, after `kv_len` cached ones."""

    rows: int
    valid: int
    kv_len: int


def check_parity(
    reference_model: PreTrainedModel,
    graph: Path,
    spec: ModelSpec,
    widths: tuple[int, ...] = (1, 2, 5, 9),
) -> ParitySpec:
    """Run every case and hold the differences against the tolerance.

    Args:
        reference_model: the checkpoint's model, eager attention, weights attached.
        graph: the exported file.
        spec: its description.
        widths: row counts of a pass to compare; a padded chunk is always compared too.

    Raises:
        ParityError: a difference is above the tolerance, with the case that shows it.
    """
    context = parity_context(spec)
    cases = list(_cases(context, widths))
    wanted = {row for c in cases for row in range(c.kv_len, c.kv_len + c.valid)}
    reference = run_reference(reference_model, context, frozenset(wanted))
    scale = max(1.0, *(float(np.abs(row).max()) for row in reference.logits.values()))
    worst = _Worst(spec, _TOLERANCE[spec.dtype] * scale)
    session = _mapped_session(graph)
    for case in cases:
        logits, rows = _run_case(session, spec, reference, case)
        span = slice(case.kv_len, case.kv_len + case.valid)
        expected = np.stack([reference.logits[row] for row in range(span.start, span.stop)])
        worst.add_logits(logits, expected, f"with T={case.rows} rows at kv_len={case.kv_len}")
        worst.add_caches(rows, [whole[:, :, span] for whole in reference.caches])
    shifted = _check_last_positions(session, reference_model, spec, reference, worst)
    return ParitySpec(
        cases=len(cases) + shifted,
        positions=spec.max_position if shifted else context,
        worst_logit=worst.logit,
        worst_cache=worst.cache,
        tolerance=worst.tolerance,
        argmax_agreement=worst.agreed / worst.compared,
    )


class _Worst:
    """The largest differences so far; one above the tolerance ends the check."""

    def __init__(self, spec: ModelSpec, tolerance: float) -> None:
        self._architecture, self.tolerance = spec.architecture, tolerance
        self.logit = self.cache = 0.0
        self.agreed = self.compared = 0

    def add_logits(self, logits: np.ndarray, expected: np.ndarray, where: str) -> None:
        """Compare `[rows, V]` logits."""
        worst = float(np.abs(logits - expected).max())
        if not worst <= self.tolerance:
            raise ParityError(
                f"{self._architecture}: {where} the exported graph differs from torch by "
                f"{worst:.3g} in a logit (allowed: {self.tolerance:.3g}); nothing was written. The "
                "architecture does something that the export does not carry over"
            )
        self.logit = max(self.logit, worst)
        self.agreed += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        self.compared += len(logits)

    def add_caches(self, rows: list[np.ndarray], expected: list[np.ndarray]) -> None:
        """Compare the cache rows a pass wrote."""
        for got, want in zip(rows, expected, strict=True):
            self.cache = max(self.cache, float(np.abs(got - want).max()))


def parity_context(spec: ModelSpec) -> int:
    """Tokens of the compared sequence: the model's context, as far as the budgets go."""
    per_token = sum(
        2 * int(s.dims[1]) * int(s.dims[3]) for s in spec.states
    )  # two float32 copies of a row
    by_memory = _CACHE_BYTES // (4 * per_token)
    parameters = max(1, spec.parameters_bytes // np.dtype(spec.dtype).itemsize)
    by_compute = int(_FLOPS[spec.dtype] / (2 * parameters))
    return max(32, min(spec.max_position, _LONGEST, by_memory, by_compute))


def _cases(context: int, widths: tuple[int, ...]) -> Iterator[Case]:
    for rows in widths:
        for kv_len in sorted({0, 1, context // 2, context - rows}):
            yield Case(rows, rows, kv_len)
    padded = min(_PADDED_CHUNK, context // 2)
    for kv_len in sorted({0, context // 2, context - padded + 3}):
        yield Case(padded, padded - 3, kv_len)


def run_reference(model: PreTrainedModel, context: int, rows: frozenset[int]) -> Reference:
    """Run torch over `context` random tokens in chunks, keeping the logits of `rows`."""
    vocabulary = embedding_rows(model)
    tokens = np.random.default_rng(20231116).integers(0, vocabulary, context)
    cache = DynamicCache()
    logits: dict[int, np.ndarray] = {}
    for start in range(0, context, _CHUNK):
        stop = min(start + _CHUNK, context)
        keep = [row for row in range(start, stop) if row in rows] or [stop - 1]
        positions = torch.arange(start, stop)[None]
        output = run_torch(model, tokens[start:stop], positions, cache, [k - start for k in keep])
        logits.update(zip(keep, output, strict=True))
    layers: list[Any] = cache.layers
    caches = [tensor.float().numpy() for layer in layers for tensor in (layer.keys, layer.values)]
    if caches[0].shape[2] != context:
        raise ExportError(f"the reference cache holds {caches[0].shape[2]} of {context} tokens")
    return Reference(tokens, {k: v for k, v in logits.items() if k in rows}, caches)


def run_torch(
    model: PreTrainedModel,
    tokens: np.ndarray,
    positions: torch.Tensor,
    cache: DynamicCache,
    keep: list[int],
) -> np.ndarray:
    """One pass of the torch model; returns the logits of the rows in `keep`, `[len(keep), V]`."""
    argument = cache_argument(model)
    index = torch.tensor(keep)
    head = output_head(model)
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].index_select(1, index),))
    try:
        with torch.no_grad():
            output = model(
                input_ids=torch.from_numpy(np.asarray(tokens, np.int64))[None],
                position_ids=positions,
                use_cache=True,
                **{argument: cache},
            )
    finally:
        hook.remove()
    result: np.ndarray = output.logits[0].float().numpy()
    return result


def _mapped_session(graph: Path) -> ort.InferenceSession:
    """A session that reads weights where they lie: nothing folded, nothing packed."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _run_case(
    session: ort.InferenceSession, spec: ModelSpec, reference: Reference, case: Case
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of the valid rows and the cache rows they wrote, as float32."""
    tokens = np.zeros(case.rows, np.int64)
    tokens[: case.valid] = reference.tokens[case.kv_len : case.kv_len + case.valid]
    feeds = _inputs(spec, tokens, case.kv_len, np.arange(case.rows), case.valid)
    feeds |= _seeded_caches(spec, reference, case.kv_len, case.kv_len + case.rows)
    logits, *caches = session.run(None, feeds)
    written = slice(case.kv_len, case.kv_len + case.valid)
    return logits[0], [cache[:, :, written].astype(np.float32) for cache in caches]


def _inputs(
    spec: ModelSpec, tokens: np.ndarray, kv_len: int, depth: np.ndarray, valid: int
) -> dict[str, Any]:
    rows = len(tokens)
    return {
        "input_ids": tokens[None],
        "kv_len": np.array([kv_len], np.int64),
        "depth": depth.astype(np.int64),
        "tree_mask": np.tril(np.ones((rows, rows), bool)),
        "logit_rows": np.arange(valid, dtype=np.int64),
    }


def _seeded_caches(
    spec: ModelSpec, reference: Reference, kv_len: int, needed: int
) -> dict[str, np.ndarray]:
    capacity = -(-(needed + 1) // 16) * 16
    seeded = {}
    for state, rows in zip(spec.states, reference.caches, strict=True):
        cache = np.zeros((1, rows.shape[1], capacity, rows.shape[3]), np.dtype(state.dtype))
        cache[:, :, :kv_len] = rows[:, :, :kv_len]
        seeded[state.input] = cache
    return seeded


def _check_last_positions(
    session: ort.InferenceSession,
    model: PreTrainedModel,
    spec: ModelSpec,
    reference: Reference,
    found: _Worst,
) -> int:
    """Compare a pass at the model's last positions, reached by depth instead of a full cache.

    Says whether it applied: with a sliding window, distance and position cannot be set apart.
    """
    rows, kv_len = 4, 8
    context = len(reference.tokens)
    if context >= spec.max_position or any(s.window is not None for s in spec.states):
        return 0
    shift = spec.max_position - rows - kv_len
    tokens = reference.tokens[kv_len : kv_len + rows]
    cache = DynamicCache()
    run_torch(model, reference.tokens[:kv_len], torch.arange(kv_len)[None], cache, [0])
    positions = torch.arange(kv_len + shift, kv_len + shift + rows)[None]
    expected = run_torch(model, tokens, positions, cache, list(range(rows)))
    feeds = _inputs(spec, tokens, kv_len, np.arange(rows) + shift, rows)
    feeds |= _seeded_caches(spec, reference, kv_len, kv_len + rows)
    logits = session.run(["logits"], feeds)[0][0]
    found.add_logits(logits, expected, f"at the last of its {spec.max_position} positions")
    return 1

"""The exactness probe: do the bits of a row depend on what surrounds it in a pass?

Speculation gives the same bytes as plain decoding only if a row of the verify pass has the bits
that a plain pass would give it. That is a property of one engine on one machine, so it is
measured: the same positions are computed at every row, with every built row count, before true and
before junk neighbours, at several lengths, and logits and cache rows are compared bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from spec_export.engines.backend import Device, Engine
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.graphs import ModelSpec, RoleSpec
from spec_export.engines.manifest import ExactnessSpec
from spec_export.engines.passes import PassRunner

_STEP = "probing exactness"


@dataclass(frozen=True)
class _Pass:
    """One pass of the probe: true tokens up to row `true_rows`, junk after it."""

    role: str
    rows: int
    start: int
    true_rows: int
    junk: int


@dataclass
class _Findings:
    """Hashes by position, and the first difference of each kind."""

    seen: dict[int, tuple[str, str]] = field(default_factory=dict)
    by_width: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    across: str | None = None
    within: str | None = None
    compared: int = 0

    def add(self, probe: _Pass, position: int, digest: str) -> None:
        """Record the bits one pass gave a position."""
        place = f"row {position - probe.start} of T={probe.rows} at kv_len={probe.start}"
        first = self.seen.setdefault(position, (digest, place))
        same = self.by_width.setdefault((probe.rows, position), (digest, place))
        self.compared += 1
        if same[0] != digest and self.within is None:
            self.within = f"{place} has other bits than {same[1]}, junk rows differing"
        if first[0] != digest and self.across is None:
            self.across = f"{place} has other bits than {first[1]}"


def probe_exactness(
    device: Device,
    engine: Engine,
    spec: ModelSpec,
    capacity: int,
    max_len: int,
    progress: Progress = no_progress,
) -> ExactnessSpec:
    """Probe a target engine; every role with 2 rows or more takes part.

    Args:
        device: where the engine runs.
        engine: the opened target.
        spec: its description, dimensions pinned.
        capacity: rows of a cache.
        max_len: tokens of a context.
        progress: called with (step, done, total).
    """
    roles = [role for role in spec.roles if int(role.rows) >= 2]
    runner = PassRunner(device, engine, spec)
    tokens = np.random.default_rng(11).integers(0, spec.vocabulary, max_len)
    runner.prefill(tokens)
    filled = runner.read_caches()
    lengths = _lengths(max_len)
    findings = _Findings()
    plan = [probe for length in lengths for probe in _passes(roles, length, max_len, capacity)]
    for done, probe in enumerate(plan):
        progress(_STEP, done, len(plan))
        runner.write_caches(filled)
        _run(runner, probe, tokens, findings)
    progress(_STEP, len(plan), len(plan))
    widths = tuple(sorted({int(role.rows) for role in roles}))
    if findings.across is None:
        kind, reason = "width_invariant", "every row had the same bits everywhere"
    elif findings.within is None:
        kind, reason = "row_invariant", findings.across
    else:
        kind, reason = "none", findings.within
    return ExactnessSpec(kind, widths, lengths, findings.compared, reason)  # type: ignore[arg-type]


def _lengths(max_len: int) -> tuple[int, ...]:
    """Positions to probe, from the start of the context to its end."""
    return tuple(sorted({0, min(5, max_len - 1), max_len // 2, max_len - 1}))


def _passes(roles: list[RoleSpec], position: int, max_len: int, capacity: int) -> Iterator[_Pass]:
    """Passes that contain `position`, at every row of narrow roles and some of wide ones."""
    for role in roles:
        rows = int(role.rows)
        spots = range(rows) if rows <= 17 else (0, rows // 2, rows - 1)
        for spot in spots:
            start = position - spot
            if start < 0 or start + rows > capacity:
                continue
            yield _Pass(role.name, rows, start, min(rows, max_len - start), 0)
            if spot + 1 < rows:
                yield _Pass(role.name, rows, start, spot + 1, 1)


def _run(runner: PassRunner, probe: _Pass, tokens: np.ndarray, findings: _Findings) -> None:
    """Run one pass and record the bits of its last true rows."""
    vocabulary = runner.spec.vocabulary
    row_tokens = np.full(probe.rows, probe.junk % vocabulary, np.int64)
    row_tokens[: probe.true_rows] = tokens[probe.start : probe.start + probe.true_rows]
    if probe.junk:
        noise = np.random.default_rng(probe.start).integers(0, vocabulary, probe.rows)
        row_tokens[probe.true_rows :] = noise[probe.true_rows :]
    wanted = int(runner.spec.role(probe.role).logit_rows)
    chosen = np.arange(max(0, probe.true_rows - wanted), probe.true_rows)
    logits = runner.run(probe.role, row_tokens, probe.start, chosen)
    caches = [runner.caches[state.input] for state in runner.spec.states]
    hosts = [cache.host for cache in caches]
    contents = runner.read_caches() if any(h is None for h in hosts) else hosts
    for index, row in enumerate(chosen):
        position = probe.start + int(row)
        digest = hashlib.sha256(logits[index].tobytes())
        for content in contents:
            assert content is not None
            digest.update(np.ascontiguousarray(content[:, :, position]).tobytes())
        findings.add(probe, position, digest.hexdigest())

"""Which precision of the target and the draft: quality, acceptance, size and speed of each.

A draft may be rounded as one likes: what is emitted follows the target, whatever drafts. A rounded
target is another target: how near it is to the one in float32 is measured, token by token, and what
is emitted follows the rounded one from there on.

Both models of every precision read the same texts, and their passes are timed in turns, so that
what is compared was measured within seconds. Acceptance of a drafting model is beta = sum of
min(p, q) at each token (Leviathan et al., arXiv 2211.17192, Corollary 3.6), of look-up what becomes
of its drafts along the target's own texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spec_export.calibration.candidates import Candidate
from spec_export.calibration.measure import Task
from spec_export.calibration.precision_costs import Costs, PassTimer
from spec_export.calibration.precision_reading import Reading
from spec_export.calibration.precision_result import (
    DraftPrecision,
    Pairing,
    Precisions,
    TargetPrecision,
)
from spec_export.calibration.profile import PartTimes
from spec_export.engines.bundle import Progress, no_progress
from spec_export.runtime import OpenedBundle

_CLIFF = 1.25  # by which a pass may cost more than one of a row less


def compare_precisions(
    opened: OpenedBundle,
    candidates: Mapping[str, Sequence[Candidate]],
    task: Task,
    times: PartTimes,
    progress: Progress = no_progress,
) -> Precisions:
    """Compare the models of a bundle in several precisions.

    Args:
        opened: the bundle as it was built.
        candidates: for `target`, and for `draft` where it has a drafting model.
        task: prompts and how to go on from them.
        times: of the bundle's rounds: what is no pass of a model is taken from there.
        progress: called with (step, done, total).
    """
    targets, drafts = candidates["target"], candidates.get("draft", ())
    reading = Reading(opened, targets, drafts, task)
    for number, ids in enumerate(task.ids):
        progress("comparing precisions", number, len(task.ids))
        reading.read(ids)
    progress("comparing precisions", len(task.ids), len(task.ids))
    milliseconds = PassTimer(opened, targets, drafts, task.kv_len).timed(progress)
    described = [_described(target, reading, milliseconds) for target in targets]
    drafting = [
        DraftPrecision(
            name=draft.name,
            weights_bytes=draft.weights_bytes,
            catch_up_ms=milliseconds["draft", draft.name, 2],
            step_ms=milliseconds["draft", draft.name, 1],
        )
        for draft in drafts
    ]
    paired: Sequence[DraftPrecision | None] = drafting or [None]
    costs = Costs(opened, described[0], times)
    pairings = [
        costs.best(target, draft, reading.passes(target.name, draft))
        for target in described
        for draft in paired
    ]
    return Precisions(tuple(described), tuple(drafting), _marked(pairings, described))


def _described(
    target: Candidate, reading: Reading, milliseconds: Mapping[tuple[str, str, int], float]
) -> TargetPrecision:
    found = {
        rows: ms
        for (kind, name, rows), ms in milliseconds.items()
        if (kind, name) == ("target", target.name)
    }
    rows = tuple(sorted(found))
    times = tuple(found[m] for m in rows)
    steps = [
        (after / before, m) for before, after, m in zip(times, times[1:], rows[1:], strict=False)
    ]
    worst, at = max(steps, default=(1.0, 0))
    return TargetPrecision(
        name=target.name,
        weights_bytes=target.weights_bytes,
        quality=reading.quality(target.name),
        rows=rows,
        rows_ms=times,
        cliff=at if worst > _CLIFF else None,
    )


def _marked(pairings: Sequence[Pairing], targets: Sequence[TargetPrecision]) -> tuple[Pairing, ...]:
    """The pairings, those marked that no other beats in speed, nearness and size."""
    apart = {t.name: t.quality.divergence for t in targets}
    size = {t.name: t.weights_bytes for t in targets}

    def merits(pairing: Pairing) -> tuple[float, float, float]:
        return pairing.speedup, -apart[pairing.target], -float(size[pairing.target])

    def beats(one: Pairing, other: Pairing) -> bool:
        a, b = merits(one), merits(other)
        return a != b and all(x >= y for x, y in zip(a, b, strict=True))

    return tuple(
        replace(p, is_best=not any(beats(other, p) for other in pairings)) for p in pairings
    )

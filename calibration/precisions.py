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
from spec_export.calibration.precision_race import raced
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

_CLIFF = 0.25


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
    marked = _marked(pairings, described, drafting)
    found = _raced(opened, targets, drafts, marked, task, progress)
    return Precisions(tuple(described), tuple(drafting), found)


def _raced(
    opened: OpenedBundle,
    targets: Sequence[Candidate],
    drafts: Sequence[Candidate],
    pairings: Sequence[Pairing],
    task: Task,
    progress: Progress,
) -> tuple[Pairing, ...]:
    """The pairings, the fastest of each target decoded as it is predicted to be best."""
    by_target = {candidate.name: candidate for candidate in targets}
    by_draft = {candidate.name: candidate for candidate in drafts}
    found = []
    for number, pairing in enumerate(pairings):
        progress("decoding in other precisions", number, len(pairings))
        rivals = [p.speedup for p in pairings if p.target == pairing.target]
        measured = None
        if pairing.speedup == max(rivals):
            draft = None if pairing.draft is None else by_draft[pairing.draft]
            measured = raced(opened, by_target[pairing.target], draft, pairing.gamma, task)
        found.append(replace(pairing, measured=measured))
    progress("decoding in other precisions", len(pairings), len(pairings))
    return tuple(found)


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
    return TargetPrecision(
        name=target.name,
        weights_bytes=target.weights_bytes,
        quality=reading.quality(target.name),
        rows=rows,
        rows_ms=times,
        cliffs=cliffs(rows, times),
    )


def cliffs(rows: Sequence[int], times: Sequence[float]) -> tuple[int, ...]:
    """Rows at which a pass gets dearer by a quarter of the one before, or more, for each row."""
    found = []
    for n in range(1, len(rows)):
        a_row = (times[n] / times[n - 1] - 1) / (rows[n] - rows[n - 1])
        if a_row >= _CLIFF:
            found.append(rows[n])
    return tuple(found)


def _marked(
    pairings: Sequence[Pairing],
    targets: Sequence[TargetPrecision],
    drafts: Sequence[DraftPrecision] = (),
) -> tuple[Pairing, ...]:
    """The pairings, those marked that no other beats in speed, nearness and size."""
    apart = {t.name: t.quality.divergence for t in targets}
    size = {t.name: t.weights_bytes for t in targets}
    beside = {d.name: d.weights_bytes for d in drafts}

    def merits(pairing: Pairing) -> tuple[float, float, float]:
        total = size[pairing.target] + (0 if pairing.draft is None else beside[pairing.draft])
        return pairing.speedup, -apart[pairing.target], -float(total)

    def beats(one: Pairing, other: Pairing) -> bool:
        a, b = merits(one), merits(other)
        return a != b and all(x >= y for x, y in zip(a, b, strict=True))

    return tuple(
        replace(p, is_best=not any(beats(other, p) for other in pairings)) for p in pairings
    )

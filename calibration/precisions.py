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

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from spec_export.calibration.acceptance import overlap
from spec_export.calibration.calibrate import widths_of
from spec_export.calibration.candidates import Candidate
from spec_export.calibration.measure import Task
from spec_export.calibration.precision_names import AS_BUILT
from spec_export.calibration.precision_result import (
    DraftPrecision,
    Pairing,
    Precisions,
    Quality,
    TargetPrecision,
)
from spec_export.calibration.profile import PartTimes
from spec_export.calibration.replays import Passes, passes_along, passes_of_lookup
from spec_export.calibration.teacher import distributions, in_vocabulary, logits_along
from spec_export.engines.backend import Call
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.passes import PassRunner, allocate_caches, bind_role
from spec_export.runtime import OpenedBundle, Session

_TURNS, _WARM_UP = 14, 2
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
    reading = _Reading(opened, targets, drafts, task)
    for number, ids in enumerate(task.ids):
        progress("comparing precisions", number, len(task.ids))
        reading.read(ids)
    progress("comparing precisions", len(task.ids), len(task.ids))
    milliseconds = _Passes(opened, targets, drafts, task.kv_len).timed(progress)
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
    costs = _Costs(opened, described[0], times)
    pairings = [
        costs.best(target, draft, reading.passes(target.name, draft))
        for target in described
        for draft in paired
    ]
    return Precisions(tuple(described), tuple(drafting), _marked(pairings, described))


def _described(
    target: Candidate, reading: _Reading, milliseconds: Mapping[tuple[str, str, int], float]
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


# --- texts ----------------------------------------------------------------------------------------


class _Reading:
    """Reads texts with every model and keeps what they say of each token."""

    def __init__(
        self,
        opened: OpenedBundle,
        targets: Sequence[Candidate],
        drafts: Sequence[Candidate],
        task: Task,
    ) -> None:
        self._task = task
        self._targets, self._drafts = targets, drafts
        device = opened.device
        self._runners = {
            (kind, c.name): PassRunner(device, c.engine, c.spec)
            for kind, found in (("target", targets), ("draft", drafts))
            for c in found
        }
        own = targets if not drafts else targets[:1]
        self._sessions = {c.name: Session(in_precision(opened, c)) for c in own}
        self._vocabulary = targets[0].spec.vocabulary
        self._losses: dict[str, list[np.ndarray]] = {c.name: [] for c in targets}
        self._apart: dict[str, list[np.ndarray]] = {c.name: [] for c in targets}
        self._same: dict[str, list[np.ndarray]] = {c.name: [] for c in targets}
        self._betas: dict[tuple[str, str], list[np.ndarray]] = {}
        self._texts: dict[str, list[tuple[list[int], int]]] = {c.name: [] for c in own}

    def read(self, ids: Sequence[int]) -> None:
        """Go on from a prompt, and read prompt and text."""
        for name, session in self._sessions.items():
            self._texts[name].append((plain_text(session, ids, self._task), len(ids)))
        text, start = self._texts[AS_BUILT][-1]
        if len(text) - start < 2:
            return
        tokens = np.asarray(text, np.int64)
        exact: np.ndarray | None = None
        judged: dict[str, np.ndarray] = {}
        for target in self._targets:
            logits = logits_along(self._runners["target", target.name], "verify", tokens, 1)
            chances = _log_softmax(logits)
            judged[target.name] = distributions(
                logits[start - 1 :], self._task.sampling.temperature
            )
            exact = chances if exact is None else exact
            self._compare(target.name, exact, chances, tokens, start)
        for draft in self._drafts:
            rows = logits_along(self._runners["draft", draft.name], "step", tokens, start)
            known = in_vocabulary(rows, self._vocabulary)
            q = distributions(known, self._task.sampling.temperature)
            for name, p in judged.items():
                self._betas.setdefault((name, draft.name), []).append(overlap(p[: len(q)], q))

    def _compare(
        self, name: str, exact: np.ndarray, chances: np.ndarray, tokens: np.ndarray, start: int
    ) -> None:
        prompt = np.arange(start - 1)
        self._losses[name].append(-chances[prompt, tokens[1:start]])
        p, other = exact[start - 1 :], chances[start - 1 :]
        self._apart[name].append((np.exp(p) * (p - other)).sum(axis=1))
        self._same[name].append(p.argmax(axis=1) == other.argmax(axis=1))

    def quality(self, name: str) -> Quality:
        """How near a target is to the first."""
        losses, apart = np.concatenate(self._losses[name]), np.concatenate(self._apart[name])
        return Quality(
            perplexity=float(np.exp(losses.mean())) if len(losses) else 1.0,
            agreement=float(np.concatenate(self._same[name]).mean()),
            divergence=max(0.0, float(apart.mean())),
            tokens=len(apart),
        )

    def passes(self, target: str, draft: DraftPrecision | None) -> Passes:
        """Counts passes of any gamma."""
        if draft is None:
            return passes_of_lookup(self._texts[target])
        return passes_along(self._betas[target, draft.name])


def in_precision(opened: OpenedBundle, target: Candidate) -> OpenedBundle:
    """The bundle with another target."""
    manifest = opened.manifest
    models = {**manifest.models, "target": target.spec}
    bundle = replace(opened.bundle, manifest=replace(manifest, models=models))
    return replace(opened, bundle=bundle, target=target.engine)


def plain_text(session: Session, ids: Sequence[int], task: Task) -> list[int]:
    """A prompt and what the target goes on with, without drafts."""
    ends = session.opened.manifest.text.end_ids
    session.begin(task.sampling, "decode")
    session.prefill(ids, drafts=False)
    token = session.first().tokens[0]
    while token not in ends and len(session.history) < len(ids) + task.tokens and session.room > 0:
        token = session.plain().tokens[0]
    return list(session.history)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


# --- times ----------------------------------------------------------------------------------------


class _Passes:
    """A pass of every model over every number of rows, in turns."""

    def __init__(
        self,
        opened: OpenedBundle,
        targets: Sequence[Candidate],
        drafts: Sequence[Candidate],
        kv_len: int,
    ) -> None:
        self._opened, self._kv_len = opened, kv_len
        self._calls = {
            (kind, candidate.name, rows): call
            for kind, found in (("target", targets), ("draft", drafts))
            for candidate in found
            for rows, call in self._bound(candidate).items()
        }
        self._flag = opened.device.allocate((1,), np.int64)
        self._read = np.zeros(1, np.int64)

    def _bound(self, candidate: Candidate) -> dict[int, Call]:
        device, spec = self._opened.device, candidate.spec
        caches, calls = allocate_caches(device, spec), dict[int, Call]()
        for role in spec.roles:
            rows = int(role.rows)
            if role.name == "prefill" or rows in calls:
                continue
            bound = bind_role(device, candidate.engine, spec, role.name, caches)
            kv_len = min(self._kv_len, spec.max_position - rows)
            device.upload(bound.buffers["kv_len"], np.array([kv_len], np.int64))
            calls[rows] = bound.call
        return calls

    def timed(self, progress: Progress) -> dict[tuple[str, str, int], float]:
        """Medians in milliseconds by model, precision and rows."""
        found: dict[tuple[str, str, int], list[float]] = {key: [] for key in self._calls}
        for turn in range(_WARM_UP + _TURNS):
            progress("timing precisions", turn, _WARM_UP + _TURNS)
            for key, call in self._calls.items():
                started = time.perf_counter()
                call.enqueue()
                self._opened.device.download(self._flag, self._read)
                if turn >= _WARM_UP:
                    found[key].append((time.perf_counter() - started) * 1e3)
        progress("timing precisions", _WARM_UP + _TURNS, _WARM_UP + _TURNS)
        return {key: statistics.median(values) for key, values in found.items()}


# --- costs ----------------------------------------------------------------------------------------


class _Costs:
    """What passes of rounds take, by the times of this comparison and of the bundle's calibration.

    Args:
        opened: the bundle as it was built.
        base: its target.
        times: of its rounds.
    """

    def __init__(self, opened: OpenedBundle, base: TargetPrecision, times: PartTimes) -> None:
        self._gammas = opened.manifest.gammas
        self._plain_rows = widths_of(opened).plain_rows
        one = next(found.ms.median for found in times.target if found.rows == 1)
        self._rest = max(0.0, times.plain.median - one)  # of a plain step, but for its pass
        self._propose, self._accept, self._host = (
            0.0 if part is None else part.median
            for part in (times.propose, times.accept, times.host)
        )
        self._plain = self._at(base, 1) + self._rest

    def best(
        self, target: TargetPrecision, draft: DraftPrecision | None, passes: Passes
    ) -> Pairing:
        """The pairing with the drafts a round that are fastest, 0 included."""
        plain = self._plain / (self._at(target, 1) + self._rest)
        speeds = {0: plain}
        for gamma in range(1, self._gammas[-1] + 1):
            counted = passes.count(gamma)
            total = sum(
                times * self._round(target, draft, n) for n, times in counted.passes.items()
            )
            if total:
                speeds[gamma] = counted.tokens / total * self._plain
        gamma = max(speeds, key=speeds.__getitem__)
        name = None if draft is None else draft.name
        return Pairing(target.name, name, passes.alpha, gamma, speeds[gamma], plain, False)

    def _round(self, target: TargetPrecision, draft: DraftPrecision | None, n: int) -> float:
        if n == 0:
            return self._at(target, self._plain_rows) + self._rest
        rows = next(gamma for gamma in self._gammas if gamma >= n) + 1
        total = self._at(target, rows) + self._accept + self._host
        if draft is not None:
            total += draft.catch_up_ms + (n - 1) * draft.step_ms + n * self._propose
        return total

    def _at(self, target: TargetPrecision, rows: int) -> float:
        return target.rows_ms[target.rows.index(rows)]

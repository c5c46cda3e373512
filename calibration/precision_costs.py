"""What passes of every precision take, and which number of drafts is fastest with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from spec_export.calibration.calibrate import widths_of
from spec_export.calibration.candidates import Candidate
from spec_export.calibration.parts import every_width
from spec_export.calibration.precision_result import DraftPrecision, Pairing, TargetPrecision
from spec_export.calibration.profile import PartTimes
from spec_export.calibration.replays import Passes
from spec_export.engines.backend import Call
from spec_export.engines.bundle import Progress
from spec_export.engines.passes import allocate_caches, bind_role
from spec_export.runtime import OpenedBundle

_TURNS, _WARM_UP = 14, 2


class PassTimer:
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
        device = self._opened.device
        most = 1 if candidate.is_draft else self._opened.manifest.gammas[-1] + 1
        engine, spec = every_width(candidate.engine, candidate.spec, most)
        caches, calls = allocate_caches(device, spec), dict[int, Call]()
        for role in sorted(spec.roles, key=lambda role: int(role.rows)):
            rows = int(role.rows)
            if role.name == "prefill" or rows in calls:
                continue
            bound = bind_role(device, engine, spec, role.name, caches)
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


class Costs:
    """What passes of rounds take, by the times of this comparison and of the bundle's calibration.

    Args:
        opened: the bundle as it was built.
        base: its target.
        times: of its rounds.
    """

    def __init__(self, opened: OpenedBundle, base: TargetPrecision, times: PartTimes) -> None:
        self._widths = widths_of(opened)
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
        for gamma in range(1, self._widths.gammas[-1] + 1):
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
            return self._at(target, self._widths.plain_rows) + self._rest
        total = self._at(target, self._widths.rows(n)) + self._accept + self._host
        if draft is not None:
            total += draft.catch_up_ms + (n - 1) * draft.step_ms + n * self._propose
        return total

    def _at(self, target: TargetPrecision, rows: int) -> float:
        return target.rows_ms[target.rows.index(rows)]

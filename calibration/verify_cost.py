"""v(m) = T(m)/T(1) from measured times, and the file it is read from.

    {"schema": 1, "rows": [1, 2, 3, 5, 9], "ms": [22.0, 23.8, 24.3, 25.5, 30.0]}

`rows` are row counts of a target pass, from 1 upwards; `ms` the time of each. Between two measured
row counts the time is taken to grow in a straight line, which a kernel with a cliff does not do:
measure the widths that are to be chosen from. Past the largest nothing is known, and nothing said.
"""

from __future__ import annotations

import bisect
import itertools
import math
import stat
from dataclasses import dataclass
from pathlib import Path

from spec_export.calibration.ranges import LARGEST_GAMMA
from spec_export.engines.errors import IntegrityError, RequestError, SchemaError
from spec_export.engines.strict import read_json

VERIFY_COST_SCHEMA = 1
_LARGEST_BYTES = 1 << 20
_LARGEST_ROWS = 1 << 20
_SHORTEST_MS, _LONGEST_MS = 1e-6, 1e9


@dataclass(frozen=True)
class VerifyTimes:
    """Times of target passes by their rows: what a --verify-cost file holds.

    Attributes:
        schema: version of this description.
        rows: row counts, ascending from 1.
        ms: time of a pass of as many rows, such as the median of many.
    """

    schema: int
    rows: tuple[int, ...]
    ms: tuple[float, ...]


class MeasuredVerifyCost:
    """v(m), exact at measured row counts and a straight line between two of them.

    Args:
        rows: row counts, ascending from 1.
        times: time of each, in milliseconds.

    Raises:
        RequestError: they are no times of a target pass.
    """

    def __init__(self, rows: tuple[int, ...], times: tuple[float, ...]) -> None:
        _check(rows, times)
        self._rows, self._ratios = rows, tuple(time / times[0] for time in times)

    @property
    def most_rows(self) -> int:
        """The widest pass that was measured."""
        return self._rows[-1]

    def is_measured(self, rows: int) -> bool:
        """Whether `rows` was measured, and does not lie between two that were."""
        return rows in self._rows

    def __call__(self, rows: int) -> float:
        """T(rows)/T(1).

        Raises:
            RequestError: a pass of so many rows was not measured.
        """
        if not 1 <= rows <= self.most_rows:
            raise RequestError(
                f"a target pass of {rows} rows is outside what was measured (1 to "
                f"{self.most_rows}); measure it, or ask for a smaller gamma or batch"
            )
        right = bisect.bisect_left(self._rows, rows)
        if self._rows[right] == rows:
            return self._ratios[right]
        (low, high), (before, after) = (
            self._rows[right - 1 : right + 1],
            self._ratios[right - 1 : right + 1],
        )
        return before + (after - before) * (rows - low) / (high - low)


def read_verify_cost(path: Path) -> MeasuredVerifyCost:
    """Read v(m) from a file; the file is untrusted.

    Raises:
        IntegrityError: it is missing, too large or unreadable.
        SchemaError: it is not such a file, or its numbers are no times.
    """
    check_size(path)
    times = read_json(path, VerifyTimes, schema=VERIFY_COST_SCHEMA)
    try:
        return MeasuredVerifyCost(times.rows, times.ms)
    except RequestError as error:
        raise SchemaError(f"{path}: {error}") from error


def check_size(path: Path) -> None:
    """Refuse a file that is too large to be one of times, or is no plain one.

    Raises:
        IntegrityError: it is, or it is missing.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise IntegrityError(f"{path} is not a plain file")
    if status.st_size > _LARGEST_BYTES:
        raise IntegrityError(
            f"{path} has {status.st_size} bytes; at most {_LARGEST_BYTES} are read"
        )


def _check(rows: tuple[int, ...], times: tuple[float, ...]) -> None:
    if len(rows) != len(times):
        raise RequestError(f"{len(rows)} row counts but {len(times)} times; one time for each")
    if not 2 <= len(rows) <= LARGEST_GAMMA + 1:
        raise RequestError(
            f"{len(rows)} row counts; expected 2 to {LARGEST_GAMMA + 1}, with 1 among them"
        )
    if rows[0] != 1 or any(a >= b for a, b in itertools.pairwise(rows)):
        raise RequestError("row counts have to begin with 1 and ascend")
    if rows[-1] > _LARGEST_ROWS:
        raise RequestError(f"{rows[-1]} rows; at most {_LARGEST_ROWS}")
    for time in times:
        if not math.isfinite(time) or not _SHORTEST_MS <= time <= _LONGEST_MS:
            raise RequestError(
                f"a time is {time!r}; expected {_SHORTEST_MS:g} to {_LONGEST_MS:g} ms"
            )

"""`plan`: what to expect before anything is built, as a report on stdout or in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.engines.errors import RequestError

if TYPE_CHECKING:
    from spec_export.calibration.plan import SpeculationPlan


@dataclass(frozen=True)
class Supposed:
    """What a plan is made for, as the user gave it."""

    alpha: float | None
    cost_ratio: float | None
    verify_cost: Path | None
    gamma_max: int | None


def plan(supposed: Supposed, report: Path | None, *, as_json: bool) -> None:
    """Print a plan, and write it where a report is asked for.

    Raises:
        RequestError: a number is missing or means nothing.
        BundleError: the file of verify costs cannot be read.
        StorageError: the report cannot be written.
    """
    from spec_export.calibration import plan_report

    made = _make(supposed)
    if report is not None:
        _write(report, plan_report.html(made))
    if as_json:
        print(json.dumps(plan_report.as_json(made), allow_nan=False), flush=True)
    else:
        print_wrapped(plan_report.terminal_lines(made))


def print_wrapped(lines: list[str], width: int = 79) -> None:
    """Print lines; sentences that are longer than a narrow terminal go on below."""
    import textwrap

    for line in lines:
        below = "  " if line.startswith("- ") else ""
        parts = [line]
        if len(line) > width:
            parts = textwrap.wrap(line, width, subsequent_indent=below, break_on_hyphens=False)
        print("\n".join(parts))
    print(end="", flush=True)


def _make(supposed: Supposed) -> SpeculationPlan:
    from spec_export.calibration.plan import plan_speculation
    from spec_export.calibration.verify_cost import read_verify_cost

    if supposed.alpha is None or supposed.cost_ratio is None:
        raise RequestError(
            "a plan needs --alpha and --cost-ratio: the share of drafts that are accepted, and the "
            "time of a draft step over that of a target step"
        )
    cost = None if supposed.verify_cost is None else read_verify_cost(supposed.verify_cost)
    return plan_speculation(supposed.alpha, supposed.cost_ratio, cost, supposed.gamma_max)


def _write(path: Path, text: str) -> None:
    from spec_export.engines.atomic import storage_error

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise storage_error(error, path) from error

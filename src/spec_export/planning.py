"""`plan`: what to expect, and what fits, as a report on stdout or in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.commands import complain
from spec_export.engines.errors import RequestError

if TYPE_CHECKING:
    from spec_export.calibration.memory_plan import Limit
    from spec_export.calibration.plan import SpeculationPlan
    from spec_export.calibration.plan_costs import GivenCosts

_PLAN_HEIGHT, _MEMORY_HEIGHT = 1750, 1000  # pixels of a picture, at most 33 and 16 rows of a table


@dataclass(frozen=True)
class Supposed:
    """What a plan is made for, as the user gave it."""

    alpha: float | None
    cost_ratio: float | None
    verify_cost: Path | None
    gamma_max: int | None


@dataclass(frozen=True)
class MemoryAsked:
    """Whose memory is planned, for what device and with what shapes, as the user gave it."""

    path: Path
    device: str | None
    limit: str | None
    max_len: int | None
    gammas: tuple[int, ...] | None
    chunk: int | None


def check_asked(supposed: Supposed, memory: Path | None, shapes: Sequence[object]) -> None:
    """Refuse options of one plan beside the other.

    Raises:
        RequestError: naming which go together.
    """
    speculation = (supposed.alpha, supposed.cost_ratio, supposed.verify_cost, supposed.gamma_max)
    if memory is not None and any(value is not None for value in speculation):
        raise RequestError(
            "--memory plans memory; --alpha, --cost-ratio, --verify-cost and --gamma-max belong to "
            "a plan of speculation: run the two one after the other"
        )
    if memory is None and any(value is not None for value in shapes):
        raise RequestError(
            "--device, --memory-limit, --max-len, --gamma and --chunk belong to a plan of memory: "
            "name a bundle or an exported directory with --memory PATH"
        )
    if shapes[0] is not None and shapes[1] is not None:
        raise RequestError("--device and --memory-limit both say what there is; give one")


def plan_memory(asked: MemoryAsked, report: Path | None, *, as_json: bool) -> bool:
    """Print a plan of memory; returns whether it fits.

    Raises:
        BundleError: the description cannot be read.
        RequestError: the shapes or the limit mean nothing.
        StorageError: the report cannot be written.
    """
    from spec_export.calibration import memory_plan
    from spec_export.calibration.memory import read_described

    described = read_described(
        asked.path, max_len=asked.max_len, gammas=asked.gammas, chunk=asked.chunk
    )
    made = memory_plan.plan_memory(described, _limit(asked))
    if report is not None:
        write_report(report, memory_plan.html(made), _MEMORY_HEIGHT)
    if as_json:
        print(json.dumps(memory_plan.as_json(made), allow_nan=False), flush=True)
    else:
        print_wrapped(memory_plan.terminal_lines(made))
    return made.fits


def _limit(asked: MemoryAsked) -> Limit | None:
    from spec_export.calibration.devices import BOARDS, parse_bytes
    from spec_export.calibration.memory_plan import Limit

    if asked.limit is not None:
        return Limit(parse_bytes(asked.limit), "the limit")
    if asked.device is not None:
        board = BOARDS[asked.device]
        return Limit(board.usable, board.title)
    return None


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
        write_report(report, plan_report.html(made), _PLAN_HEIGHT)
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
    from spec_export.calibration.plan_costs import read_costs, where, why_elsewhere

    given = None if supposed.verify_cost is None else read_costs(supposed.verify_cost)
    alpha, ratio = supposed.alpha, supposed.cost_ratio
    if given is not None:
        alpha = given.alpha if alpha is None else alpha
        ratio = given.cost_ratio if ratio is None else ratio
    if alpha is None or ratio is None:
        raise RequestError(_missing(given))
    if given is None:
        return plan_speculation(alpha, ratio, None, supposed.gamma_max)
    warning = why_elsewhere(given)
    if warning is not None:
        complain(f"warning: {warning}")
    used = where(given, alpha=supposed.alpha is None, cost_ratio=supposed.cost_ratio is None)
    return plan_speculation(alpha, ratio, given.verify_cost, supposed.gamma_max, used)


def _missing(given: GivenCosts | None) -> str:
    if given is not None and given.device is not None:
        return "no draft was tested when the profile was measured: give --alpha"
    return (
        "a plan needs --alpha and --cost-ratio: the share of drafts that are accepted, and the "
        "time of a draft step over that of a target step; or --verify-cost with the profile.json "
        "of a calibration, which has both"
    )


def check_report(path: Path) -> None:
    """Refuse what is neither a page nor a picture by its name.

    Raises:
        RequestError: with the two it may be.
    """
    if path.suffix.lower() not in (".html", ".htm", ".png"):
        raise RequestError(f"--report {path}: a report is a page (.html) or a picture (.png)")


def write_report(path: Path, html: str, height: int) -> None:
    """Write a page, or a picture of it where the name ends in `.png`.

    Raises:
        RequestError: the name ends in something else.
        StorageError: it cannot be written.
        MissingExtra: there is no browser to draw a picture.
    """
    from spec_export.engines.atomic import storage_error

    if path.suffix.lower() == ".png":
        from spec_export.calibration.picture import write_picture

        write_picture(path, html, height)
        return
    check_report(path)
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise storage_error(error, path) from error

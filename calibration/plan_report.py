"""A plan as a table and a chart: for a terminal, for a page, and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from spec_export.calibration import html_report, svg_chart
from spec_export.calibration.plan import (
    TEXT_TOKENS,
    GammaRow,
    SpeculationPlan,
    remarks,
    verdict,
)
from spec_export.calibration.text_chart import text_chart

_MOST_ROWS = 33
HEAD = ("gamma", "tokens a round", "round cost", "speed-up", "break-even c", "varies by")


def terminal_lines(plan: SpeculationPlan) -> list[str]:
    """The verdict, the table and the chart, within 80 columns."""
    widths = [len(name) for name in HEAD]
    lines = [verdict(plan), "", "  " + "  ".join(HEAD)]
    for row in shown_rows(plan):
        cells = (f"{cell:>{width}}" for cell, width in zip(_cells(row), widths, strict=True))
        mark = "->" if row.gamma == plan.gamma else "  "
        lines.append(mark + "  ".join(cells))
    speedups = [row.speedup for row in plan.rows]
    lines += ["", "  speed-up over plain decoding, by gamma"]
    lines += text_chart(speedups, level=1.0, marked=plan.gamma)
    return [*lines, "", *(f"- {line}" for line in [*remarks(plan), _about_columns()])]


def shown_rows(plan: SpeculationPlan) -> list[GammaRow]:
    """All rows, or of many evenly spaced ones and the chosen."""
    step = -(-(len(plan.rows) - 1) // (_MOST_ROWS - 1))
    return [row for row in plan.rows if row.gamma % step == 0 or row.gamma == plan.gamma]


def html(plan: SpeculationPlan) -> str:
    """The page."""
    rows, best = shown_rows(plan), plan.best
    chart = svg_chart.Chart(
        title=f"Expected speed-up by gamma; {verdict(plan)}",
        lines=(svg_chart.Line("gamma", tuple((row.gamma, row.speedup) for row in plan.rows)),),
        x_label="gamma: drafts a round",
        y_label="speed-up",
        level=1.0,
        marked=(best.gamma, best.speedup, f"gamma {best.gamma}: {best.speedup:.2f}x"),
    )
    content = html_report.Table(HEAD, tuple(_cells(row) for row in rows), rows.index(best))
    return html_report.page(
        "spec-export plan",
        _sentence(verdict(plan)),
        [
            ("Expected speed-up over plain decoding", svg_chart.draw(chart)),
            ("By gamma", html_report.table(content)),
            ("What this rests on", html_report.remarks([*remarks(plan), _about_columns()])),
        ],
    )


def as_json(plan: SpeculationPlan) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "verdict": verdict(plan),
        "alpha": plan.alpha,
        "cost_ratio": plan.cost_ratio,
        "gamma": plan.gamma,
        "expected_tokens": plan.best.expected_tokens,
        "speedup": plan.best.speedup,
        "break_even_cost_ratio": plan.break_even_cost_ratio,
        "break_even_alpha": plan.break_even_alpha,
        "is_verify_measured": plan.is_verify_measured,
        "sources": list(plan.sources),
        "by_gamma": [dataclasses.asdict(row) for row in plan.rows],
    }


def _cells(row: GammaRow) -> tuple[str, ...]:
    ratio = row.break_even_cost_ratio
    return (
        f"{row.gamma}",
        f"{row.expected_tokens:.2f}",
        f"{row.round_cost:.2f}",
        f"{row.speedup:.2f}x",
        "-" if ratio is None else f"{ratio:.3f}",
        f"{row.deviation:.1%}",
    )


def _about_columns() -> str:
    return (
        "round cost is in plain steps; a gamma gains where a draft step takes less than its "
        f"break-even c of a target step; the time of {TEXT_TOKENS} tokens varies by that much (one "
        "standard deviation)"
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."

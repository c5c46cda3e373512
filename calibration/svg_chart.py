"""Line charts as inline SVG: no scripts, no fonts, no files beside the page.

Colours are those of the page's style (`html_report`), so that a chart follows its light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 32, 48


@dataclass(frozen=True)
class Line:
    """Points joined by a line, or alone.

    Attributes:
        name: shown above the chart where it has several lines.
        points: (x, y), finite, x ascending.
        style: class of the page's style: `first`, `second` or `third`.
        joined: draw the line between them.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    style: str = "first"
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """What to draw.

    Attributes:
        title: what a reader who does not see the chart is told.
        lines: one or more.
        x_label: under the horizontal axis.
        y_label: above the vertical one.
        level: a height worth a line of its own, such as a speed-up of 1.
        marked: a point to point out, with its text.
    """

    title: str
    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    level: float | None = None
    marked: tuple[float, float, str] | None = None


def draw(chart: Chart) -> str:
    """The `<svg>` element."""
    points = [point for line in chart.lines for point in line.points]
    levels = [] if chart.level is None else [chart.level]
    across = _Scale([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, whole=True)
    up = _Scale([0.0, *levels, *(y for _, y in points)], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f"<title>{escape(chart.title)}</title>",
        *_grid(chart, across, up),
    ]
    for line in chart.lines:
        parts += _line(line, across, up)
    parts += _key(chart.lines) if len(chart.lines) > 1 else []
    if chart.marked is not None:
        x, y, text = chart.marked
        parts.append(f'<circle class="marked" cx="{across(x)}" cy="{up(y)}" r="7"/>')
        parts.append(_text(across(x), up(y) - 13, text, _inward(across(x)), "strong"))
    return "\n".join([*parts, "</svg>"])


class _Scale:
    """Values to coordinates, with ticks at round numbers."""

    def __init__(
        self, values: Sequence[float], start: float, stop: float, *, whole: bool = False
    ) -> None:
        low, high = min(values), max(values)
        step = _round_step((high - low or 1.0) / 6)
        step = max(1.0, step) if whole else step
        self._low = low if whole else math.floor(low / step) * step
        self._high = high if whole else math.ceil(high / step - 1e-9) * step
        self._high = max(self._high, self._low + step)
        self._start, self._stop = start, stop
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        self.ticks = [number * step for number in range(first, last + 1)]

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._stop - self._start), 2)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(lead * power for lead in (1, 2, 5, 10) if lead * power >= rough * (1 - 1e-9))


def _grid(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in up.ticks:
        parts.append(f'<path class="grid" d="M{left} {up(tick)}H{right}"/>')
        parts.append(_text(left - 8, up(tick) + 4, f"{tick:g}", "end"))
    for tick in across.ticks:
        parts.append(_text(across(tick), bottom + 18, f"{tick:g}", "middle"))
    parts.append(f'<path class="axis" d="M{left} {_TOP}V{bottom}H{right}"/>')
    if chart.level is not None:
        parts.append(f'<path class="level" d="M{left} {up(chart.level)}H{right}"/>')
    parts.append(_text((left + right) / 2, _HEIGHT - 8, chart.x_label, "middle"))
    parts.append(_text(8, 14, chart.y_label, "start"))
    return parts


def _line(line: Line, across: _Scale, up: _Scale) -> list[str]:
    places = [(across(x), up(y)) for x, y in line.points]
    parts = []
    if line.joined:
        joined = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline class="{line.style}" points="{joined}"/>')
    for (x, y), (value, height) in zip(places, line.points, strict=True):
        hint = f"{line.name} {value:g}: {height:.4g}"
        parts.append(
            f'<circle class="{line.style}" cx="{x}" cy="{y}" r="3">'
            f"<title>{escape(hint)}</title></circle>"
        )
    return parts


def _key(lines: Sequence[Line]) -> list[str]:
    """Which line is which, above the plot at the right."""
    parts, right = [], float(_WIDTH - _RIGHT)
    for line in reversed(lines):
        parts.append(_text(right, 14, line.name, "end"))
        start = right - 7 * len(line.name) - 10
        parts.append(f'<circle class="{line.style}" cx="{start}" cy="10" r="4"/>')
        right = start - 16
    return parts


def _inward(x: float) -> str:
    """The anchor that keeps a short text inside the chart."""
    third = (_WIDTH - _LEFT - _RIGHT) / 3
    return "start" if x < _LEFT + third / 2 else "end" if x > _LEFT + 2.5 * third else "middle"


def _text(x: float, y: float, text: str, anchor: str, style: str = "label") -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'

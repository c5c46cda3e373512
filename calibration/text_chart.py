"""A line chart in plain characters, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MARK, _BEST, _LEVEL = "*", "O", "-"


def text_chart(
    values: Sequence[float],
    *,
    level: float,
    marked: int,
    width: int = 66,
    height: int = 12,
    unit: str = "x",
) -> list[str]:
    """Draw `values` over 0, 1, 2 ...

    Args:
        values: finite numbers, at least two.
        level: a height to draw a line at.
        marked: the index to draw differently.
        width: columns of the plot, without the scale.
        height: its lines.
        unit: behind the numbers of the scale.

    Returns:
        Lines of at most `width` + 8 columns.
    """
    low, high = min(*values, level), max(*values, level)
    span = (high - low) or 1.0
    grid = [[" "] * width for _ in range(height)]

    def line(value: float) -> int:
        return height - 1 - round((value - low) / span * (height - 1))

    def column(index: int) -> int:
        return round(index * (width - 1) / (len(values) - 1))

    grid[line(level)] = [_LEVEL] * width
    for index, value in enumerate(values):
        grid[line(value)][column(index)] = _MARK
    grid[line(values[marked])][column(marked)] = _BEST
    scale = {line(low): low, line(high): high, line(level): level}
    lines = [
        (f"{scale[row]:5.2f}{unit} |" if row in scale else f"{'':6} |") + "".join(cells).rstrip()
        for row, cells in enumerate(grid)
    ]
    return [*lines, f"{'':6} +{'-' * width}", f"{'':8}{_axis(len(values), column, width)}"]


def _axis(count: int, column: Callable[[int], int], width: int) -> str:
    """Numbers under the plot, as many as stand apart."""
    step = next(s for s in _steps() if (count - 1) / s <= width / 6)
    cells = [" "] * (width + 6)
    for index in range(0, count, step):
        for offset, digit in enumerate(str(index)):
            cells[column(index) + offset] = digit
    return "".join(cells).rstrip()


def _steps() -> Sequence[int]:
    return [lead * 10**power for power in range(5) for lead in (1, 2, 5)]

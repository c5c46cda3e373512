"""Amounts of memory as text."""

from __future__ import annotations


def size(count: int) -> str:
    """Bytes in the decimal unit that keeps the number short."""
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.3g} {unit}"

"""Refuse numbers that mean nothing, in one sentence each.

Whoever calls the theory may have read its arguments from a command line or a file.
"""

from __future__ import annotations

import math

from spec_export.engines.errors import RequestError

LARGEST_GAMMA = 256
LARGEST_COST = 1e6


def check_number(name: str, value: float, low: float, high: float, meaning: str = "") -> None:
    """Refuse a number that is not finite or outside `low` to `high`, ends included.

    Raises:
        RequestError: naming the number, what was found and what is expected.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        hint = f"; {meaning}" if meaning else ""
        raise RequestError(f"{name} is {value!r}, expected {low:g} to {high:g}{hint}")


def check_alpha(alpha: float) -> None:
    """Refuse what is not a share."""
    check_number("alpha", alpha, 0, 1, "it is the share of tested drafts that are accepted")


def check_cost(cost_ratio: float, name: str = "cost_ratio") -> None:
    """Refuse what is not a cost in units of a plain step."""
    check_number(name, cost_ratio, 0, LARGEST_COST, "it is a time over that of a plain target step")


def check_gamma(gamma: int, low: int = 0, name: str = "gamma") -> None:
    """Refuse what is not a number of drafts."""
    if isinstance(gamma, bool) or not isinstance(gamma, int):
        raise RequestError(f"{name} is {gamma!r}, expected a whole number")
    check_number(name, gamma, low, LARGEST_GAMMA)

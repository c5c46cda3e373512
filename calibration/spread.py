"""How much rounds, and the time of a text, vary.

A longer draft raises both the mean and the variance of what a round emits (observed by Chen et al.
2023, arXiv 2302.01318), so that the gamma with the best mean may be the wrong one where what counts
is a time that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spec_export.calibration.ranges import check_alpha, check_gamma, check_number
from spec_export.calibration.theory import Costs

_LONGEST_TEXT = 1 << 16


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a quantity."""

    mean: float
    deviation: float


def accepted_law(alpha: float, gamma: int) -> tuple[float, ...]:
    """P(n drafts accepted) for n = 0 to gamma: geometric, the rest of its mass at gamma.

    Source: arXiv 2211.17192, section 3.1 (P(at least k) = alpha^k).
    """
    check_alpha(alpha)
    check_gamma(gamma)
    return law_of_rates((alpha,) * gamma)


def law_of_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """P(n accepted) where acceptance, given that all before were accepted, depends on position."""
    reached, law = 1.0, []
    for rate in rates:
        check_number("rate", rate, 0, 1)
        law.append(reached * (1 - rate))
        reached *= rate
    return (*law, reached)


def round_spread(law: Sequence[float]) -> Spread:
    """Of the tokens a round emits, given the law of its accepted drafts."""
    mean = math.fsum(p * (n + 1) for n, p in enumerate(law))
    variance = math.fsum(p * (n + 1 - mean) ** 2 for n, p in enumerate(law))
    return Spread(mean, math.sqrt(variance))


def rounds_spread(law: Sequence[float], tokens: int) -> Spread:
    """Of the rounds a text of `tokens` takes, exactly.

    With R(n) the rounds for n more tokens and L what a round emits, R(n) = 1 + R(n - L), so that
    both moments follow from those of shorter texts; the last round may overshoot.
    """
    check_number("tokens", tokens, 1, _LONGEST_TEXT)
    backwards = np.asarray(law, np.float64)[::-1]  # of the longest round first, as history lies
    size = len(backwards)
    first, second = np.zeros((2, size + tokens))  # entries up to `size` are of texts already done
    for left in range(size, size + tokens):
        mean = float(backwards @ first[left - size : left])
        first[left] = 1 + mean
        second[left] = 1 + 2 * mean + float(backwards @ second[left - size : left])
    mean, square = float(first[-1]), float(second[-1])
    return Spread(mean, math.sqrt(max(0.0, square - mean**2)))


def latency_spread(alpha: float, gamma: int, costs: Costs, tokens: int) -> Spread:
    """Of the time of a text of `tokens`, in units of a plain step; its deviation is 0 at gamma 0.

    What comes from acceptance alone: the device is taken to be steady.
    """
    rounds = rounds_spread(accepted_law(alpha, gamma), tokens)
    cost = costs.round_cost(gamma)
    return Spread(rounds.mean * cost, rounds.deviation * cost)

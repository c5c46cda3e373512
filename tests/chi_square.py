"""Does a sample follow a law? One threshold for every statistical test here.

Pearson's statistic against the chi-square quantile at `FALSE_ALARM`. The seeds are fixed, so a
test passes always or never; the level says how unlikely it is that a *right* rule fails when a
seed, a platform or a graph changes. At one in a million, a hundred such tests raise a false alarm
once in ten thousand changes. Cells that expect fewer than 5 are pooled, below which the
statistic is not chi-square distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class Fit:
    statistic: float
    threshold: float

    @property
    def ok(self) -> bool:
        return self.statistic < self.threshold


def fit(counts: ArrayLike, law: ArrayLike) -> Fit:
    """Compare counts with the probabilities of the same cells (any shape, summing to 1)."""
    observed = np.asarray(counts, np.float64).ravel()
    probability = np.asarray(law, np.float64).ravel()
    assert abs(probability.sum() - 1) < 1e-6
    if observed[probability == 0].any():
        return Fit(float("inf"), 0.0)
    expected = probability * observed.sum()
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    # The smallest cells, as many as it takes for the rest and for their own sum to expect 5.
    pooled = int(np.argmax((expected >= 5) & (np.cumsum(expected) - expected >= 5)))
    if expected[0] < 5:
        observed = np.append(observed[pooled:], observed[:pooled].sum())
        expected = np.append(expected[pooled:], expected[:pooled].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return Fit(statistic, float(stats.chi2.isf(FALSE_ALARM, len(expected) - 1)))

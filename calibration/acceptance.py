"""Acceptance as a number: of two distributions, along a chain, over a tree.

p is the target's distribution and q the draft's, as in Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spec_export.calibration.ranges import check_gamma, check_number
from spec_export.engines.errors import RequestError

# A float32 row of 2^18 probabilities adds up to 1 within 2^9 x 2^-24 = 3e-5 where roundings are as
# often up as down.
_SUM_TOLERANCE = 1e-4


def overlap(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The chance that a draft from q is accepted: beta = sum over x of min(p(x), q(x)).

    A greedy or looked-up draft has q = 1 at its token, and beta is p there.

    Args:
        p: `[..., V]` float, the target's distributions after every filter.
        q: the same shape, what the drafts were drawn from.

    Returns:
        `[...]` float64. Its mean over the positions of a text is alpha.

    Raises:
        RequestError: shapes differ, or a row is no distribution.

    Source: arXiv 2211.17192, Theorem 3.5 and Corollary 3.6.
    """
    p, q = _distributions(p, q)
    return np.asarray(np.minimum(p, q).sum(axis=-1))


def naive_overlap(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Acceptance of plain rejection sampling: 1/M = min over x of q(x)/p(x).

    What speculative sampling improves on: it is never more than `overlap`.

    Source: arXiv 2211.17192, section A.2.
    """
    p, q = _distributions(p, q)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(p > 0, q / p, np.inf)
    return np.asarray(ratio.min(axis=-1))


def lenient_overlap(p: np.ndarray, q: np.ndarray, lenience: float) -> np.ndarray:
    """Acceptance if a draft were accepted with min(1, p/(l q)): sum of min(p/l, q).

    For analysis only. Lenience below 1 is lossy, a token may come out with up to p/l in place of p,
    so that nothing at run time offers it.

    Source: arXiv 2211.17192, section A.5.
    """
    check_number("lenience", lenience, 0, 1)
    p, q = _distributions(p, q)
    allowed = np.where(p > 0, np.inf, 0.0) if lenience == 0 else p / lenience
    return np.asarray(np.minimum(allowed, q).sum(axis=-1))


def lenient_greedy_overlap(p: np.ndarray, q: np.ndarray, lenience: float) -> np.ndarray:
    """The same at temperature 0: the mass q has on tokens with p(x) >= l max p. Lossy as well.

    Source: arXiv 2211.17192, section A.5, with its comparison the right way round.
    """
    check_number("lenience", lenience, 0, 1)
    p, q = _distributions(p, q)
    close = p >= lenience * p.max(axis=-1, keepdims=True)
    return np.asarray(np.where(close, q, 0.0).sum(axis=-1))


def chain_tokens(rates: Sequence[float]) -> float:
    """Tokens a round emits when acceptance depends on the position.

    Args:
        rates: for each draft, the chance of being accepted once all before it were (the n-alpha of
            EAGLE, arXiv 2401.15077). The longest possible round has one more token.

    Returns:
        1 + r1 (1 + r2 (1 + ...)); Equation 1 of arXiv 2211.17192 where all are alpha.
    """
    total = 1.0
    for rate in reversed(_rates(rates)):
        total = 1 + rate * total
    return total


def tree_tokens(parents: Sequence[int], rates: Sequence[float]) -> float:
    """Tokens a round emits when it verifies a tree of drafts.

    Args:
        parents: of each node, the index of an earlier node, or -1 for a child of the last token.
        rates: of each node, the chance of being accepted once its parent was; the children of a
            node exclude one another, so that theirs add up to 1 at most.

    Returns:
        1 + the sum over nodes of the product of rates on the path to it.

    Raises:
        RequestError: it is no tree, or its rates are no chances.
    """
    rates = _rates(rates)
    if len(parents) != len(rates):
        raise RequestError(f"{len(parents)} parents but {len(rates)} rates; one for each node")
    reached, among_siblings = [1.0], [0.0] * (len(rates) + 1)
    for node, (parent, rate) in enumerate(zip(parents, rates, strict=True)):
        if isinstance(parent, bool) or not isinstance(parent, int) or not -1 <= parent < node:
            raise RequestError(f"node {node} has the parent {parent!r}; expected -1 to {node - 1}")
        among_siblings[parent + 1] += rate
        reached.append(reached[parent + 1] * rate)
    if max(among_siblings) > 1 + 1e-9:
        raise RequestError(
            f"the children of a node are accepted with {max(among_siblings):.3g} in all; they "
            "exclude one another, so at most 1"
        )
    return math.fsum(reached)


def least_spread_rates(accepted: float, gamma: int) -> tuple[float, ...]:
    """Of all rates by position with that mean, the ones whose rounds differ least in length.

    The number of accepted drafts is then one of the two whole numbers around `accepted`, and its
    variance f (1 - f) with f the fraction: no whole-numbered variable with that mean has less. A
    synthetic draft that follows this schedule gives latency at a set acceptance with little noise.

    Args:
        accepted: drafts accepted a round on average, 0 to gamma.
        gamma: drafts a round.

    Returns:
        Rates of acceptance given that all before were accepted: ones, one fraction, zeros.
    """
    check_gamma(gamma)
    check_number("accepted", accepted, 0, gamma, "drafts accepted a round on average")
    sure = math.floor(accepted)
    return tuple(1.0 if i < sure else accepted - sure if i == sure else 0.0 for i in range(gamma))


def _rates(rates: Sequence[float]) -> list[float]:
    for index, rate in enumerate(rates):
        check_number(f"rate {index}", rate, 0, 1)
    return list(rates)


def _distributions(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = [np.asarray(a, np.float64) for a in (p, q)]
    if wide[0].shape != wide[1].shape or wide[0].ndim == 0 or not wide[0].shape[-1]:
        raise RequestError(
            f"p has the shape {list(wide[0].shape)} and q {list(wide[1].shape)}; expected two of "
            "one shape, probabilities along the last axis"
        )
    for name, rows in zip("pq", wide, strict=True):
        if not np.isfinite(rows).all() or (rows < 0).any():
            raise RequestError(f"{name} has entries that are negative or not finite")
        worst = np.abs(rows.sum(axis=-1) - 1).max(initial=0)
        if worst > _SUM_TOLERANCE:
            raise RequestError(f"a row of {name} adds up to 1 with an error of {worst:.2g}")
    return wide[0], wide[1]

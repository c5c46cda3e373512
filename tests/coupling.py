"""How often do two races on the same exponentials end alike? Exactly, for any two distributions.

It is what rule `invariant` accepts. Two flat races, of p and of q, agree on token i with
probability `1 / sum_j max(p_j / p_i, q_j / q_i)`; in two heats they have to agree twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def agreement(p: Array, q: Array) -> Array:
    """Of flat races, along the last axis.

    With j in the order of p_j / q_j, the larger of the two quotients is that of p from i on.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(np.where(q > 0, p / q, np.inf), axis=-1)
        p, q = (np.take_along_axis(x, order, axis=-1) for x in (p, q))
        from_i = p.sum(axis=-1, keepdims=True) - np.cumsum(p, axis=-1) + p
        before_i = np.cumsum(q, axis=-1) - q
        return np.nan_to_num(1 / (from_i / p + before_i / q)).sum(axis=-1)


def agreement_in_two_heats(p: Array, q: Array, blocks: Array) -> float:
    """Of races over blocks and then inside one; `blocks [B, n]` holds ids."""
    p, q = p[blocks], q[blocks]
    block_p, block_q = p.sum(axis=1), q.sum(axis=1)
    order = np.argsort(block_p / block_q)
    p, q, block_p, block_q = p[order], q[order], block_p[order], block_q[order]
    from_b = block_p.sum() - np.cumsum(block_p) + block_p
    before_b = np.cumsum(block_q) - block_q
    same_block = 1 / (from_b / block_p + before_b / block_q)
    return float((same_block * agreement(p / block_p[:, None], q / block_q[:, None])).sum())

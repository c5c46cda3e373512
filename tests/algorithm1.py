"""Algorithm 1 of Leviathan et al. (arXiv 2211.17192) in numpy: what `accept_*` must compute.

Written from the paper, not from the graphs: float64, one row at a time, nothing padded. p is the
target's distribution, q the draft's. Three statements of the same rule:

- `judge`: one round on given random numbers, so that a graph can be compared number by number;
- `judge_greedy`: temperature 0;
- `round_law`: one round with the random numbers integrated out, exact in `Fraction`s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tokens = tuple[int, ...]
Law = Sequence[Fraction]
Model = Callable[[Tokens], Law]  # the law of the token after a context


@dataclass(frozen=True)
class Verdict:
    """What a round emits: `n_accepted` drafts and one token of the target's own."""

    n_accepted: int
    tokens: list[int]


def softmax(logits: Array, temperature: float = 1.0) -> Array:
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def judge(
    p: Array, q: Array, drafts: Sequence[int], uniforms: Sequence[float], exponentials: Array
) -> Verdict:
    """One round.

    Args:
        p: [len(drafts) + 1, V], the target's distributions.
        q: [len(drafts), V], the distributions the drafts were drawn from.
        drafts: this round's drafts, none of them missing.
        uniforms: one per draft, in [0, 1).
        exponentials: [V / 64 rounded up + 64], for the one token that is drawn.
    """
    for i, d in enumerate(drafts):
        if not uniforms[i] * q[i, d] < p[i, d]:
            left = np.maximum(p[i] - q[i], 0)
            return _verdict(drafts[:i], race(left if left.any() else p[i], exponentials))
    return _verdict(drafts, race(p[len(drafts)], exponentials))


def judge_greedy(logits: Array, drafts: Sequence[int]) -> Verdict:
    """One round at temperature 0: the target's choice is the first index of the maximum."""
    for i, d in enumerate(drafts):
        choice = int(np.argmax(logits[i]))
        if d != choice:
            return _verdict(drafts[:i], choice)
    return _verdict(drafts, int(np.argmax(logits[len(drafts)])))


def race(weights: Array, exponentials: Array) -> int:
    """Draw in proportion to `weights`: which block of 64 tokens, then which token inside it."""
    blocks = [weights[start : start + 64] for start in range(0, len(weights), 64)]
    sums = np.array([block.sum() for block in blocks])
    block = _first_home(sums, exponentials[: len(blocks)])
    inside = blocks[block]
    return block * 64 + _first_home(inside, exponentials[len(blocks) :][: len(inside)])


def _first_home(weights: Array, exponentials: Array) -> int:
    times = np.full(len(weights), np.inf)
    runs = weights > 0
    times[runs] = exponentials[runs] / weights[runs]
    return int(np.argmin(times))


def _verdict(accepted: Sequence[int], drawn: int) -> Verdict:
    return Verdict(len(accepted), [*accepted, drawn])


def round_law(target: Model, draft: Model, context: Tokens, gamma: int) -> dict[Tokens, Fraction]:
    """The law of what one round emits after `context`: tokens to probability."""
    law: dict[Tokens, Fraction] = defaultdict(Fraction)

    def row(prefix: Tokens, mass: Fraction) -> None:
        p = target(context + prefix)
        if len(prefix) == gamma:
            for x, p_x in enumerate(p):
                law[(*prefix, x)] += mass * p_x
            return
        q = draft(context + prefix)
        left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        for d, q_d in enumerate(q):
            if not q_d:
                continue
            accepted = min(Fraction(1), p[d] / q_d)
            if accepted:
                row((*prefix, d), mass * q_d * accepted)
            for x, left_x in enumerate(left):
                if left_x:
                    law[(*prefix, x)] += mass * q_d * (1 - accepted) * left_x / sum(left)

    row((), Fraction(1))
    return law

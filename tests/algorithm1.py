"""The rules of acceptance in numpy and in fractions: what `accept_*` must compute.

Written from the papers, not from the graphs: float64, one row at a time, nothing padded. p is the
target's distribution, q the draft's. Token by token it is Algorithm 1 of Leviathan et al. (arXiv
2211.17192), by blocks that of Sun et al. (arXiv 2403.10444):

- `judge`, `judge_block`, `judge_own`, `judge_greedy`: one round on given random numbers, so that a
  graph can be compared number by number;
- `round_law`, `block_round_law`: one round with the random numbers integrated out, exact in
  `Fraction`s; `block_thresholds`: what block verification compares its uniforms with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_export.engines.graphs import race_blocks

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
        exponentials: of one race, for the one token that is drawn.
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


def judge_own(own: Sequence[int], drafts: Sequence[int]) -> Verdict:
    """The target has a token of its own in every row; drafts stay while they are it."""
    for i, d in enumerate(drafts):
        if d != own[i]:
            return _verdict(drafts[:i], own[i])
    return _verdict(drafts, own[len(drafts)])


def judge_block(
    p: Array, q: Array, drafts: Sequence[int], uniforms: Sequence[float], exponentials: Array
) -> Verdict:
    """One round of block verification; arguments as for `judge`."""
    h = block_thresholds(p, q, drafts)
    kept = [i for i in range(1, len(drafts) + 1) if uniforms[i - 1] < h[i]]
    n = max(kept, default=0)
    if n == len(drafts):
        return _verdict(drafts, race(p[n], exponentials))
    left = np.maximum(_prefix_weights(p, q, drafts)[n] * p[n] - q[n], 0)
    return _verdict(drafts[:n], race(left if left.any() else p[n], exponentials))


def block_thresholds(p: Any, q: Any, drafts: Sequence[int]) -> list[Any]:
    """h_0 .. h_n: the prefix of i drafts is kept if u_i < h_i, and the longest kept one counts."""
    weights, h = _prefix_weights(p, q, drafts), []
    for i, weight in enumerate(weights):
        if i == len(drafts) or weight >= 1:
            h.append(weight)
            continue
        rest = sum(max(weight * a - b, 0) for a, b in zip(p[i], q[i], strict=True))
        h.append(rest / (rest + 1 - weight))
    return h


def _prefix_weights(p: Any, q: Any, drafts: Sequence[int]) -> list[Any]:
    weights = [1]
    for i, d in enumerate(drafts):
        weights.append(min(weights[-1] * p[i][d] / q[i][d], 1))
    return weights


def race(weights: Array, exponentials: Array) -> int:
    """Draw in proportion to `weights`: a block of tokens B apart, then a token of that block."""
    V, B = len(weights), race_blocks(len(weights))
    sums = np.array([weights[block::B].sum() for block in range(min(B, V))])
    block = _first_home(sums, exponentials[: len(sums)])
    places = weights[block::B]
    return block + B * _first_home(places, exponentials[B:][: len(places)])


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


def block_round_law(
    target: Model, draft: Model, context: Tokens, gamma: int
) -> dict[Tokens, Fraction]:
    """`round_law` of block verification."""
    law: dict[Tokens, Fraction] = defaultdict(Fraction)
    for drafts, mass in _drafts_of(draft, context, gamma):
        p = [target(context + drafts[:i]) for i in range(gamma + 1)]
        q = [draft(context + drafts[:i]) for i in range(gamma)]
        for n, chance in enumerate(block_lengths(p, q, drafts)):
            if not chance:
                continue
            left = list(p[n])
            if n < gamma:
                weight = _prefix_weights(p, q, drafts)[n]
                left = [max(weight * a - b, Fraction(0)) for a, b in zip(p[n], q[n], strict=True)]
            for x, left_x in enumerate(left):
                if left_x:
                    law[(*drafts[:n], x)] += mass * chance * left_x / sum(left)
    return law


def block_lengths(p: Any, q: Any, drafts: Sequence[int]) -> list[Fraction]:
    """Chance of keeping 0 .. n drafts, given the drafts."""
    h = block_thresholds(p, q, drafts)
    chances, longer = [Fraction(0)] * len(h), Fraction(1)
    for i in range(len(drafts), 0, -1):
        chances[i] = longer * h[i]
        longer *= 1 - h[i]
    chances[0] = longer
    return chances


def _drafts_of(draft: Model, context: Tokens, gamma: int) -> list[tuple[Tokens, Fraction]]:
    found: list[tuple[Tokens, Fraction]] = [((), Fraction(1))]
    for _ in range(gamma):
        found = [
            ((*drafts, x), mass * q_x)
            for drafts, mass in found
            for x, q_x in enumerate(draft(context + drafts))
            if q_x
        ]
    return found

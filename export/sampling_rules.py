"""Rules of acceptance: which drafts of a round stay, and the token that follows them.

p `[M, V64]` are the target's distributions, row i after i drafts; q `[G, V64]` the ones the drafts
were drawn from. All rules emit the law of p, whatever q is.

- Rows at and beyond `n_draft` may hold anything, NaN and ids outside the vocabulary included:
  they are refused by a comparison, and what they hold is multiplied into nothing. Row `n_draft`
  draws from p itself: one formula, no special case for a round that is accepted whole.
- A residual without mass draws from p. So does a row whose q is empty (the draft has no token that
  may come) or NaN, which is always refused.
- Comparisons are strict, `u q < p`: u = 0 does not accept a token of probability 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from spec_export.export.sampling_ops import (
    NO_WEIGHT,
    Ops,
    Values,
    at,
    column,
    draw,
    first,
    first_maximum,
    inside,
    iota,
)

_NOTHING = ir.tensor(np.zeros((1, 1), np.float32), name="nothing")
Judgement: TypeAlias = Literal["greedy", "one_hot", "dense", "block", "invariant"]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a round: one for each draft and, last, one that has none."""

    index: ir.Value  # [M] 0 .. G
    draft: ir.Value  # [M] ids, anything in a row without a draft
    drafted: ir.Value  # [M] bool, index < n_draft


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decides."""

    n_accepted: ir.Value  # [1]
    drawn: ir.Value  # [1] the token of row n_accepted


Judge: TypeAlias = Callable[[Ops, Values, Rows, ir.Value, int], Verdict]


def rows_of_round(op: Ops, given: Values) -> Rows:
    """The drafts as rows."""
    draft = op.Concat(given["draft_tokens"], [0], axis=0)
    index = iota(op, draft)
    return Rows(index, draft, op.Less(index, given["n_draft"]))


def judge_greedy(op: Ops, given: Values, rows: Rows, scores: ir.Value, V: int) -> Verdict:
    """Temperature 0: drafts stay as long as each is the first of the largest scores `[M, V64]`."""
    return _judge_own(op, rows, first_maximum(op, scores, V))


def judge_invariant(op: Ops, given: Values, rows: Rows, p: ir.Value, V: int) -> Verdict:
    """The target draws in every row, and drafts stay as long as each is the token it drew.

    `race [M, K]` belongs to the positions of the rows, so what is drawn depends on no draft.

    Source: drafter-invariant speculative decoding, arXiv 2408.07978.
    """
    return _judge_own(op, rows, draw(op, p, given["race"], V))


def judge_one_hot(op: Ops, given: Values, rows: Rows, p: ir.Value, V: int) -> Verdict:
    """Q is 1 at the draft: accepted with probability p(d), else p without d.

    Source: arXiv 2211.17192, Algorithm 1.
    """
    draft, judged = _judged(op, rows, V)
    bar = op.Concat(given["uniform"], [1.0], axis=0)  # [M]
    n_accepted = _first_refused(op, judged, bar, at(op, p, draft))
    p_row, place = op.Gather(p, n_accepted), column(op, op.Gather(draft, n_accepted))  # [1, V64]
    residual = op.ScatterElements(p_row, place, _NOTHING, axis=1)
    return _last_token(op, given, n_accepted, judged, p_row, residual, V)


def judge_dense(op: Ops, given: Values, rows: Rows, p: ir.Value, V: int) -> Verdict:
    """Accepted with probability min(1, p(d) / q(d)), else what p has more than q.

    Source: arXiv 2211.17192, Algorithm 1; arXiv 2302.01318, Algorithm 2.
    """
    draft, judged = _judged(op, rows, V)
    q_draft = _at_drafts(op, given["q"], draft)  # [G]
    # Where q is empty, whatever came out was not drawn from it.
    is_from_q = op.Greater(q_draft, 0.0)
    bar = op.Where(is_from_q, op.Mul(given["uniform"], q_draft), math.inf)
    n_accepted = _first_refused(op, judged, op.Concat(bar, [1.0], axis=0), at(op, p, draft))
    p_row = op.Gather(p, n_accepted)  # [1, V64]
    residual = op.Relu(op.Sub(p_row, _row_of_q(op, given, n_accepted)))
    return _last_token(op, given, n_accepted, judged, p_row, residual, V)


def judge_block(op: Ops, given: Values, rows: Rows, p: ir.Value, V: int) -> Verdict:
    """Block verification: never fewer drafts than `dense` on average.

    P_0 = 1 and P_i = min(1, P_(i-1) p(d_i)/q(d_i)), which is the least product of the ratios of the
    last 0, 1, .. i drafts. Z_i is the mass of max(P_i p - q, 0) in row i. The round keeps the
    *longest* prefix i with u_i < h_i, h_i = Z_i / (Z_i + 1 - P_i), and h = P at the last draft.

    The last draft is the one before the first that cannot be judged: where q breaks down or p has
    nothing left, the round is cut, which is known before that row's token was drawn.

    Source: block verification, arXiv 2403.10444.
    """
    draft, judged = _judged(op, rows, V)
    p_rows, q_draft = _without_last(op, p), _at_drafts(op, given["q"], draft)  # [G, V64], [G]
    has_mass = op.Greater(op.ReduceMax(p_rows, [1], keepdims=0), 0.0)  # false for NaN, as below
    drafts = op.And(_without_last(op, judged), op.And(has_mass, op.Greater(q_draft, 0.0)))
    n_draft = first(op, op.Not(op.Concat(drafts, [False], axis=0)))  # [1]
    ratio = op.Div(_without_last(op, at(op, p, draft)), q_draft)  # [G]
    P = _prefix_weights(op, rows, op.Where(drafts, ratio, 0.0))  # [M]

    more = op.Relu(op.Sub(op.Mul(p_rows, column(op, _without_last(op, P))), given["q"]))
    Z = op.Concat(op.ReduceSum(more, [1], keepdims=0), [0.0], axis=0)  # [M]
    h = op.Where(op.Less(P, 1.0), op.Div(Z, op.Sub(op.Add(Z, 1.0), P)), 1.0)
    h = op.Where(op.Less(rows.index, n_draft), h, P)
    u = op.Concat([1.0], given["uniform"], axis=0)  # [M] u_i belongs to draft i, counted from 1
    kept = op.And(op.Less(u, h), op.LessOrEqual(rows.index, n_draft))
    n_accepted = op.ReduceMax(op.Where(kept, rows.index, 0), [0])  # [1]

    p_row, weight = op.Gather(p, n_accepted), column(op, op.Gather(P, n_accepted))
    residual = op.Relu(op.Sub(op.Mul(p_row, weight), _row_of_q(op, given, n_accepted)))
    judged = op.Less(rows.index, n_draft)
    return _last_token(op, given, n_accepted, judged, p_row, residual, V)


JUDGES: dict[Judgement, Judge] = {
    "greedy": judge_greedy,
    "one_hot": judge_one_hot,
    "dense": judge_dense,
    "block": judge_block,
    "invariant": judge_invariant,
}


def _judge_own(op: Ops, rows: Rows, own: ir.Value) -> Verdict:
    accepted = op.And(rows.drafted, op.Equal(rows.draft, own))  # [M]
    n_accepted = first(op, op.Not(accepted))  # [1]
    return Verdict(n_accepted, op.Gather(own, n_accepted))


def _judged(op: Ops, rows: Rows, V: int) -> tuple[ir.Value, ir.Value]:
    """Drafts that are safe to gather with, and which rows have one: p of an unknown id is 0."""
    draft = inside(op, rows.draft, V)
    return draft, op.And(rows.drafted, op.Equal(draft, rows.draft))


def _first_refused(op: Ops, judged: ir.Value, bar: ir.Value, p_draft: ir.Value) -> ir.Value:
    accepted = op.And(judged, op.Less(op.Max(bar, NO_WEIGHT), p_draft))  # [M]
    return first(op, op.Not(accepted))  # [1]


def _last_token(
    op: Ops,
    given: Values,
    n_accepted: ir.Value,
    judged: ir.Value,
    p_row: ir.Value,
    residual: ir.Value,
    V: int,
) -> Verdict:
    """Draw from the residual where a draft was refused and something is left, else from p."""
    refused = op.Gather(judged, n_accepted)  # [1], false in row n_draft: nothing to take off there
    has_mass = op.Greater(op.ReduceMax(residual, keepdims=0), NO_WEIGHT)  # false for NaN
    chosen = op.Cast(op.And(refused, has_mass), to=ir.DataType.INT64)  # [1]
    weights = op.Gather(op.Concat(p_row, residual, axis=0), chosen)  # [1, V64]
    return Verdict(n_accepted, draw(op, weights, given["race"], V))


def _prefix_weights(op: Ops, rows: Rows, ratio: ir.Value) -> ir.Value:
    """P `[M]`: for each i the least product of `ratio[j:i]` over j = 0 .. i."""
    end = op.Unsqueeze(rows.index, [1, 2])  # [M, 1, 1]
    start = op.Unsqueeze(rows.index, [0, 2])  # [1, M, 1]
    draft = iota(op, ratio)  # [G]
    within = op.And(op.GreaterOrEqual(draft, start), op.Less(draft, end))  # [M, M, G]
    product = op.ReduceProd(op.Where(within, ratio, 1.0), [2], keepdims=0)  # [M, M]
    # An overflow times 0 is NaN; a later start has that 0 without the overflow.
    return op.ReduceMin(op.Where(op.Less(product, 1.0), product, 1.0), [1], keepdims=0)


def _at_drafts(op: Ops, q: ir.Value, draft: ir.Value) -> ir.Value:
    """`q(d) [G]`."""
    return at(op, q, _without_last(op, draft))


def _row_of_q(op: Ops, given: Values, row: ir.Value) -> ir.Value:
    """`[1, V64]`: row G, which has no q, takes the one before."""
    return op.Gather(given["q"], op.Min(row, op.Sub(op.Shape(given["draft_tokens"]), 1)))


def _without_last(op: Ops, x: ir.Value) -> ir.Value:
    return op.Slice(x, [0], [-1], [0])

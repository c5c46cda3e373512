"""Several candidates for one position: the rule a tree of drafts needs at each of its nodes.

Rounds are chains today, so no bundle has this graph; the rule and its law are settled here.
"""

from __future__ import annotations

import onnx_ir as ir

from spec_export.engines.graphs import padded_vocabulary, race_size
from spec_export.export.sampling_ops import F32, I64, Ops, Signature, Values, draw, make_model


def candidates_graph(vocabulary: int, count: int) -> ir.Model:
    """Make the graph that tries candidates in turn, each against what the ones before left of p.

    r_0 = p. Candidate j, drawn from q_j, is accepted with min(1, r_j(c_j) / q_j(c_j)); else
    r_(j+1) is max(r_j - q_j, 0), scaled to one. Where none is accepted, the token is drawn from
    what is left, and from p where nothing is. Candidates drawn without replacement have q_j without
    the earlier ones, scaled to one; given ones (the best children of a node) have q_j = 1 at c_j.
    What is emitted follows p in all three cases.

    Inputs: `p [1, V64]`, `q [count, V64]`, `uniform [count]` in [0, 1), `race [1, K]` float32;
    `candidates [count]` int64, inside the vocabulary. Outputs: `choice [1]` int64, the index of the
    accepted candidate or `count`; `token [1]` int64.

    Args:
        vocabulary: V.
        count: candidates, 1 or more.

    Source: arXiv 2305.09781, Algorithm 2; 2401.15077 for given candidates.
    """
    V64 = padded_vocabulary(vocabulary)
    inputs: Signature = {
        "p": (F32, (1, V64)),
        "q": (F32, (count, V64)),
        "candidates": (I64, (count,)),
        "uniform": (F32, (count,)),
        "race": (F32, (1, race_size(vocabulary))),
    }
    outputs: Signature = {"choice": (I64, (1,)), "token": (I64, (1,))}

    def body(op: Ops, given: Values) -> Values:
        left, accepted = given["p"], []
        for j in range(count):
            q, c = _row(op, given["q"], j), op.Slice(given["candidates"], [j], [j + 1], [0])
            bar = op.Mul(op.Slice(given["uniform"], [j], [j + 1], [0]), _at(op, q, c))
            accepted.append(op.And(op.Less(bar, _at(op, left, c)), op.Greater(_at(op, q, c), 0.0)))
            left = _scaled(op, op.Relu(op.Sub(left, q)), left)
        drawn = draw(op, left, given["race"], vocabulary)  # [1]
        choice = op.Where(accepted[-1], [count - 1], [count])  # [1]
        for j in reversed(range(count)):
            candidate = op.Slice(given["candidates"], [j], [j + 1], [0])
            choice = op.Where(accepted[j], [j], choice)
            drawn = op.Where(accepted[j], candidate, drawn)
        return {"choice": choice, "token": drawn}

    return make_model("candidates", inputs, outputs, body)


def _row(op: Ops, rows: ir.Value, j: int) -> ir.Value:
    return op.Slice(rows, [j], [j + 1], [0])  # [1, V64]


def _at(op: Ops, row: ir.Value, token: ir.Value) -> ir.Value:
    return op.Gather(op.Reshape(row, [-1]), token)  # [1]


def _scaled(op: Ops, weights: ir.Value, otherwise: ir.Value) -> ir.Value:
    """Weights that sum to one, or `otherwise` where there are none."""
    total = op.ReduceSum(weights, [1])  # [1, 1]
    return op.Where(op.Greater(total, 0.0), op.Div(weights, total), otherwise)

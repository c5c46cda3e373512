"""How sure a drafting model is of its next token, for rounds that stop drafting early.

A function of a row of the draft's logits and of nothing else: it is known before the token of that
row is drawn, so the length of a round may follow from it and the target's law is emitted all the
same. To leave out a draft by the probability of the token that *was* drawn is lossy.
"""

from __future__ import annotations

import onnx_ir as ir

from spec_export.export.sampling_ops import F32, Ops, Signature, Values, make_model


def confidence_graph(vocabulary: int, draft_vocabulary: int) -> ir.Model:
    """Make the graph that gives the largest probability of a row of the draft's logits.

    Of the ids that the target has too, without temperature, filters or masks of a request, so that
    a threshold means the same for each of them.

    Input: `logits [1, 1, Vd]` float32, raw. Output: `confidence [1]` float32; 0 where the row holds
    NaN or +inf, or where nothing may come.

    Args:
        vocabulary: V, the target's.
        draft_vocabulary: Vd, the drafting model's.
    """
    V, Vd = vocabulary, draft_vocabulary

    def body(op: Ops, given: Values) -> Values:
        row = op.Squeeze(given["logits"], [0])  # [1, Vd]
        if Vd > V:
            row = op.Slice(row, [0], [V], [1])
        # 1 / sum exp(x - max x). A softmax kernel may clamp NaN away; a sum cannot.
        weights = op.Exp(op.Sub(row, op.ReduceMax(row, [1])))
        share = op.Reciprocal(op.ReduceSum(weights, [1], keepdims=0))  # [1]
        return {"confidence": op.Where(op.Greater(share, 0.0), share, 0.0)}

    inputs: Signature = {"logits": (F32, (1, 1, Vd))}
    outputs: Signature = {"confidence": (F32, (1,))}
    return make_model("confidence", inputs, outputs, body)

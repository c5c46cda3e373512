"""Sampling inside the graph, as small standard ONNX graphs.

Knows two vocabulary sizes. Does not know gamma, a model, an engine or where noise comes from.
`sampling_graphs` makes what `export` writes beside the models; `build` pins the symbolic
dimensions `G` (drafts of a round), `M` = G + 1 (verified rows), `D` (passes of the drafting model),
`R` (rows of one pass), `W` (positions whose noise is held) and `C` (capacity).

A token is chosen in steps, each a graph, so that what is off costs nothing and the number of graphs
is a sum and not a product:

1. *Weighing* turns raw logits into what is chosen from, for the target and for the draft alike:
   `distribution`, or `scores` at temperature 0, with the groups of changes that are on; then
   `filter_*`, where there are filters.
2. *Choosing*: `accept_*` judges a round's drafts, `sample_*` draws a token without drafts and
   `propose_*` a draft. At temperature 0 without changes they read the raw logits themselves.

`logprob` is the log-softmax of the raw target row. It is NaN where that row holds NaN or +inf,
which is how the host learns of it, and -inf where nothing in the row may come: a token that is
forbidden is never passed off as drawn.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import onnx_ir as ir

from spec_export.engines.graphs import (
    FILTERS,
    TOP_LOGPROBS,
    WeighingKey,
    padded_vocabulary,
    race_size,
    weighing_keys,
)
from spec_export.export.sampling_confidence import confidence_graph
from spec_export.export.sampling_edits import edit, edit_inputs, mask, mask_inputs
from spec_export.export.sampling_filters import filter_graph
from spec_export.export.sampling_ops import (
    F32,
    I64,
    NO_WEIGHT,
    Ops,
    Signature,
    Values,
    at,
    draw,
    first_maximum,
    make_model,
    number,
    rows_of,
)
from spec_export.export.sampling_rules import JUDGES, Judgement, Rows, rows_of_round

Index: TypeAlias = "ir.Value | list[int]"

# Where a round starts: the last committed token (row 0 of the pass), the length of the target's
# cache before it, and the length at which each pass of the drafting model runs.
_PLACE: Signature = {
    "last_id": (I64, (1,)),
    "kv_len": (I64, (1,)),
    "draft_kv_len": (I64, ("D",)),
}
# The same for the round that follows, and the last two committed tokens.
_NEXT_PLACE: Signature = {
    "next_kv_len": (I64, (1,)),
    "next_ids": (I64, (2,)),
    "next_draft_kv_len": (I64, ("D",)),
}


def sampling_graphs(
    target_vocabulary: int, draft_vocabulary: int | None = None
) -> dict[str, ir.Model]:
    """Make every sampling graph of a pair.

    Args:
        target_vocabulary: V, the width of the target's logits.
        draft_vocabulary: the width of the drafting model's logits, or None where no model drafts:
            then there is no `propose_*` and no `confidence`.

    Returns:
        Models by name: those of `weighing_keys`, also for a draft whose vocabulary has another
        size; `filter_{top,nucleus,any,typical}`;
        `accept_{greedy,edited,one_hot,dense,block,invariant}`; `sample_{greedy,edited,drawn}`;
        with a drafting model `propose_{greedy,edited,drawn}` and `confidence`; `position_races`;
        `top_logprobs`.
    """
    V, Vd = target_vocabulary, draft_vocabulary
    graphs = {key.name: weighing_graph(key, V, V) for key in weighing_keys("target")}
    if Vd is not None and Vd != V:
        graphs |= {key.name: weighing_graph(key, V, Vd) for key in weighing_keys("draft")}
    graphs |= {f"filter_{filters}": filter_graph(filters, V) for filters in FILTERS}
    graphs["accept_edited"] = accept_graph("greedy", V, is_edited=True)
    graphs |= {f"accept_{rule}": accept_graph(rule, V) for rule in JUDGES}
    for name in ("greedy", "edited", "drawn"):
        graphs[f"sample_{name}"] = sample_graph(name, V)
        if Vd is not None:
            graphs[f"propose_{name}"] = propose_graph(name, V, Vd)
    if Vd is not None:
        graphs["confidence"] = confidence_graph(V, Vd)
    graphs["position_races"] = position_races_graph(V)
    return graphs | {"top_logprobs": top_logprobs_graph(V)}


# --- weighing -------------------------------------------------------------------------------------


def weighing_graph(key: WeighingKey, vocabulary: int, width: int) -> ir.Model:
    """Make a graph from raw logits to what a token is chosen from.

    Logits beyond V are cut and missing ones count as -inf, before the softmax: an id that the
    target does not have has no weight, and a distribution sums to one.

    Inputs: `logits [1, R, width]` and, by group, those of `edit_inputs` and `mask_inputs`; for a
    distribution `temperature [1]`, above 0. Output: `scores [R, V64]`, the edited logits, or
    `p [R, V64]`, without weight where nothing may come.

    Args:
        key: what is on.
        vocabulary: V, the target's.
        width: of the logits.
    """
    V, V64 = vocabulary, padded_vocabulary(vocabulary)
    inputs: Signature = {"logits": (F32, (1, "R", width))}
    inputs |= edit_inputs(V) if key.edits else {}
    inputs |= mask_inputs(V) if key.mask else {}
    outputs: Signature = {"scores": (F32, ("R", V64))}
    if key.is_drawn:
        inputs["temperature"] = (F32, (1,))
        outputs = {"p": (F32, ("R", V64))}

    def body(op: Ops, given: Values) -> Values:
        scores = rows_of(op, given["logits"], V, width)  # [R, V64]
        scores = edit(op, scores, given, V) if key.edits else scores
        scores = mask(op, scores, given) if key.mask else scores
        if not key.is_drawn:
            return {"scores": scores}
        p = op.Softmax(op.Div(scores, given["temperature"]), axis=-1)
        if key.edits or key.mask:  # softmax kernels differ where every token is forbidden
            best = op.ReduceMax(scores, [1])  # [R, 1]
            p = op.Mul(p, number(op, op.Greater(best, -math.inf)))
        return {"p": p}

    return make_model(key.name, inputs, outputs, body)


# --- choosing -------------------------------------------------------------------------------------


def accept_graph(rule: Judgement, vocabulary: int, *, is_edited: bool = False) -> ir.Model:
    """Make the graph that judges a round's drafts and draws its last token.

    Inputs: `logits [1, M, V]` float32, raw; `draft_tokens [G]`, `n_draft [1]` (0 to G) and those
    of `_PLACE`. With edits at temperature 0 `scores [M, V64]`; above it `p [M, V64]`, `race [1, K]`
    exponentials (for `invariant` `[M, K]`), and except for `invariant` `uniform [G]` in [0, 1); for
    `dense` and `block` `q [G, V64]`; all float32.

    Outputs: `tokens [M]` (0 beyond row `n_accepted`), `n_accepted [1]`, `logprob [M]`, and those of
    `_NEXT_PLACE`.

    Args:
        rule: `greedy` (temperature 0), `one_hot` (q is 1 at the draft), `dense`, `block` or
            `invariant`.
        vocabulary: V.
        is_edited: `greedy` reads scores.
    """
    V, V64 = vocabulary, padded_vocabulary(vocabulary)
    inputs: Signature = {
        "logits": (F32, (1, "M", V)),
        "draft_tokens": (I64, ("G",)),
        "n_draft": (I64, (1,)),
        **_PLACE,
    }
    if is_edited:
        inputs["scores"] = (F32, ("M", V64))
    if rule != "greedy":
        race_rows = "M" if rule == "invariant" else 1
        inputs |= {"p": (F32, ("M", V64)), "race": (F32, (race_rows, race_size(V)))}
    if rule in ("one_hot", "dense", "block"):
        inputs["uniform"] = (F32, ("G",))
    if rule in ("dense", "block"):
        inputs["q"] = (F32, ("G", V64))
    outputs: Signature = {
        "tokens": (I64, ("M",)),
        "n_accepted": (I64, (1,)),
        "logprob": (F32, ("M",)),
        **_NEXT_PLACE,
    }

    def body(op: Ops, given: Values) -> Values:
        logits = rows_of(op, given["logits"], V)  # [M, V64]
        rows = rows_of_round(op, given)
        weights = given.get("p", given.get("scores", logits))  # [M, V64]
        verdict = JUDGES[rule](op, given, rows, weights, V)
        made = _commit(op, given, rows, verdict.n_accepted, verdict.drawn)
        logprob = _logprob(op, logits, made["tokens"], given)
        emitted = op.LessOrEqual(rows.index, verdict.n_accepted)  # [M]
        return made | {"logprob": op.Where(emitted, logprob, 0.0)}

    name = "accept_edited" if is_edited else f"accept_{rule}"
    return make_model(name, inputs, outputs, body)


def sample_graph(variant: str, vocabulary: int) -> ir.Model:
    """Make the graph that chooses a token without drafts: after prefill, and in plain decoding.

    Inputs: `logits [1, 1, V]` float32, raw, and those of `_PLACE`; for `edited` also `scores [1,
    V64]`, for `drawn` `p [1, V64]` and `race [1, K]`. Outputs: `tokens [1]` int64, `logprob [1]`
    float32, and those of `_NEXT_PLACE`.

    Args:
        variant: `greedy`, `edited` (temperature 0 with edits or a mask) or `drawn`.
        vocabulary: V.
    """
    V = vocabulary
    inputs: Signature = {"logits": (F32, (1, 1, V))} | _PLACE | _chosen_from(variant, V)

    def body(op: Ops, given: Values) -> Values:
        logits = rows_of(op, given["logits"], V)  # [1, V64]
        weights = given.get("p", given.get("scores"))
        token = _choose(op, logits if weights is None else weights, given, V)  # [1]
        place = _next_place(op, given, [0], token)
        return {"tokens": token, "logprob": _logprob(op, logits, token, given)} | place

    outputs: Signature = {"tokens": (I64, (1,)), "logprob": (F32, (1,))} | _NEXT_PLACE
    return make_model(f"sample_{variant}", inputs, outputs, body)


def propose_graph(variant: str, vocabulary: int, draft_vocabulary: int) -> ir.Model:
    """Make the graph that chooses one draft token, in the *target's* vocabulary.

    Inputs: `logits [1, 1, Vd]` for `greedy`, `scores [1, V64]` for `edited`, `p [1, V64]` and
    `race [1, K]` for `drawn`, float32. p is the q of the round. Output: `token [1]` int64.

    Args:
        variant: `greedy` and `edited` (a one-hot draft) or `drawn`.
        vocabulary: V, the target's.
        draft_vocabulary: Vd, the drafting model's.
    """
    V, Vd = vocabulary, draft_vocabulary
    inputs = _chosen_from(variant, V) or {"logits": (F32, (1, 1, Vd))}

    def body(op: Ops, given: Values) -> Values:
        weights = given.get("p", given.get("scores"))
        if weights is None:
            weights = rows_of(op, given["logits"], V, Vd)  # [1, V64]
        return {"token": _choose(op, weights, given, V)}

    return make_model(f"propose_{variant}", inputs, {"token": (I64, (1,))}, body)


def position_races_graph(vocabulary: int) -> ir.Model:
    """Make the graph that picks the races of a round's positions out of the ones held.

    The noise of a position is put in place before it is known where the round starts that needs it:
    `ring [W, K]` holds the races of W consecutive positions, that of position i in row i modulo W.
    `kv_len [1]` says where the round starts; its first token has position `kv_len + 1`. Output:
    `race [M, K]`, M = W / 2.
    """
    K = race_size(vocabulary)
    inputs: Signature = {"ring": (F32, ("W", K)), "kv_len": (I64, (1,))}

    def body(op: Ops, given: Values) -> Values:
        held = op.Shape(given["ring"], start=0, end=1)  # [1]
        row = op.Range(1, op.Add(op.Squeeze(op.Div(held, 2)), 1), 1)  # 1 .. M
        return {"race": op.Gather(given["ring"], op.Mod(op.Add(row, given["kv_len"]), held))}

    return make_model("position_races", inputs, {"race": (F32, ("M", K))}, body)


def top_logprobs_graph(vocabulary: int) -> ir.Model:
    """Make the graph that lists the most probable tokens of raw target rows.

    Inputs: `logits [1, R, V]` float32. Outputs: `ids [R, 20]` int64, `values [R, 20]` float32, the
    log-softmax, largest first. Where V is below 20, ids from V on have value -inf.
    """
    V = vocabulary

    def body(op: Ops, given: Values) -> Values:
        logits = rows_of(op, given["logits"], V)
        values, ids = op.TopK(op.LogSoftmax(logits, axis=-1), [TOP_LOGPROBS], axis=1, _outputs=2)
        return {"ids": ids, "values": values}

    shape = ("R", TOP_LOGPROBS)
    outputs: Signature = {"ids": (I64, shape), "values": (F32, shape)}
    return make_model("top_logprobs", {"logits": (F32, (1, "R", V))}, outputs, body)


def _chosen_from(variant: str, V: int) -> Signature:
    row = (1, padded_vocabulary(V))
    if variant == "drawn":
        return {"p": (F32, row), "race": (F32, (1, race_size(V)))}
    return {"scores": (F32, row)} if variant == "edited" else {}


def _choose(op: Ops, weights: ir.Value, given: Values, V: int) -> ir.Value:
    if "race" in given:
        return draw(op, weights, given["race"], V)
    return first_maximum(op, weights, V)


def _commit(op: Ops, given: Values, rows: Rows, n_accepted: ir.Value, drawn: ir.Value) -> Values:
    tokens = op.Where(op.Less(rows.index, n_accepted), rows.draft, 0)
    tokens = op.Where(op.Equal(rows.index, n_accepted), drawn, tokens)  # [M]
    made = {"tokens": tokens, "n_accepted": n_accepted}
    return made | _next_place(op, given, n_accepted, tokens)


def _next_place(op: Ops, given: Values, n_accepted: Index, tokens: ir.Value) -> Values:
    """Where a round that follows starts, `n_accepted + 1` tokens on."""
    committed = op.Concat(given["last_id"], tokens, axis=0)  # [M + 1]
    emitted = op.Add(n_accepted, [1])  # [1]
    return {
        "next_kv_len": op.Add(given["kv_len"], emitted),
        "next_ids": op.Gather(committed, op.Add(n_accepted, [0, 1])),
        "next_draft_kv_len": op.Add(given["draft_kv_len"], emitted),
    }


def _logprob(op: Ops, logits: ir.Value, tokens: ir.Value, given: Values) -> ir.Value:
    """Log-softmax of the raw rows at `tokens`; NaN and -inf as the module says."""
    logprob = at(op, op.LogSoftmax(logits, axis=-1), tokens)
    # A softmax kernel may clamp NaN away; a sum cannot. It is -inf where a token is banned.
    total = op.ReduceSum(logits, [1], keepdims=0)
    logprob = op.Where(op.Less(total, math.inf), logprob, math.nan)
    for name, none in (("p", NO_WEIGHT), ("scores", -math.inf)):
        if name in given:
            may_come = op.Greater(at(op, given[name], tokens), none)
            logprob = op.Add(logprob, op.Where(may_come, 0.0, -math.inf))
    return logprob

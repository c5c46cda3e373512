"""Sampling inside the graph: propose, accept and sample as small standard ONNX graphs.

Knows two vocabulary sizes. Does not know gamma, a model, an engine or where noise comes from.
`sampling_graphs` makes what `export` writes beside the models; `build` pins the symbolic
dimensions `G` (drafts), `M` = G + 1 (verified rows) and `R` (rows of one pass).

The rule is `reject`: Leviathan et al., arXiv 2211.17192, Algorithm 1. p = target, q = draft.
Row i is accepted while `u_i q_i(d_i) < p_i(d_i)`; the first row that is not draws from the
normalized `max(p - q, 0)`, and row `n_draft`, which has no draft, from p.

- Rows at and beyond `n_draft` may hold anything, NaN and ids outside the vocabulary included:
  they are refused by a comparison, and what they hold is multiplied into nothing.
- A residual without mass draws from p. A row of q that is NaN is always refused, and its residual
  has no mass: the law stays p.
- Ties go to the first index on every engine: no graph uses ArgMax, whose ties TensorRT leaves
  open. A drawn id is inside the vocabulary whatever the logits hold.
- `logprob` is the log-softmax of the raw target row; NaN where the row holds NaN or +inf, which is
  how the host learns of it. -inf (a banned token) is fine.

A draw is an exponential race in two heats, over blocks of 64 tokens and then inside the block
that won: a product of two exact races is exact, and needs `V/64 + 64` exponentials, not V.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import onnx_ir as ir
from onnxscript import GraphBuilder

OPSET = 24
IR_VERSION = 11
BLOCK = 64  # also the alignment of a row: some CPU kernels change bits by row without it

AcceptVariant: TypeAlias = Literal["greedy", "one_hot", "dense"]
SampleVariant: TypeAlias = Literal["greedy", "temperature"]
ProposeVariant: TypeAlias = Literal["greedy", "dense"]
Values: TypeAlias = dict[str, ir.Value]
Signature: TypeAlias = dict[str, tuple[ir.DataType, tuple[int | str, ...]]]


class Ops(Protocol):
    """`onnxscript.OpBuilder` with a type: `op.Add(x, 1)` appends a node and returns its value."""

    def __getattr__(self, op_type: str, /) -> Callable[..., ir.Value]: ...


_F32, _I64 = ir.DataType.FLOAT, ir.DataType.INT64


def sampling_graphs(
    target_vocabulary: int, draft_vocabulary: int | None = None
) -> dict[str, ir.Model]:
    """Make every sampling graph of a pair.

    Args:
        target_vocabulary: V, the width of the target's logits.
        draft_vocabulary: the width of the drafting model's logits, or None where no model drafts:
            then there is no `propose_*`.

    Returns:
        Models by name: `accept_{greedy,one_hot,dense}`, `sample_{greedy,temperature}` and, with a
        drafting model, `propose_{greedy,dense}`.
    """
    V = target_vocabulary
    graphs = {
        "accept_greedy": accept_graph("greedy", V),
        "accept_one_hot": accept_graph("one_hot", V),
        "accept_dense": accept_graph("dense", V),
        "sample_greedy": sample_graph("greedy", V),
        "sample_temperature": sample_graph("temperature", V),
    }
    if draft_vocabulary is not None:
        graphs["propose_greedy"] = propose_graph("greedy", V, draft_vocabulary)
        graphs["propose_dense"] = propose_graph("dense", V, draft_vocabulary)
    return graphs


def accept_graph(variant: AcceptVariant, vocabulary: int) -> ir.Model:
    """Make the graph that judges a round's drafts and draws its last token.

    Inputs: `logits [1, M, V]` float32, `draft_tokens [G]`, `n_draft [1]` (0 to G), `last_id [1]`
    (the last committed token, row 0 of the pass), `kv_len [1]` (before it), int64. Sampling adds
    `temperature [1]` (above 0), `uniform [G]` in [0, 1), `race [K]` exponentials, all float32;
    `dense` adds `q [G, V]` float32.

    Outputs: `tokens [M]` (0 beyond row `n_accepted`), `n_accepted [1]`, `logprob [M]`, and what
    the next round needs: `next_kv_len [1]`, `next_ids [2]` (the last two committed tokens) and
    `next_draft_kv_len [G]`, the length at which the drafting model's i-th pass runs: pass 0
    catches up on two rows, each later one is a single row.

    Args:
        variant: `greedy` (temperature 0), `one_hot` (q is 1 at the draft) or `dense`.
        vocabulary: V.

    Source: arXiv 2211.17192, Algorithm 1; arXiv 2302.01318, Algorithm 2.
    """
    V = vocabulary
    inputs: Signature = {
        "logits": (_F32, (1, "M", V)),
        "draft_tokens": (_I64, ("G",)),
        "n_draft": (_I64, (1,)),
        "last_id": (_I64, (1,)),
        "kv_len": (_I64, (1,)),
    }
    if variant != "greedy":
        inputs |= _sampling_inputs(V) | {"uniform": (_F32, ("G",))}
    if variant == "dense":
        inputs["q"] = (_F32, ("G", V))
    outputs: Signature = {
        "tokens": (_I64, ("M",)),
        "n_accepted": (_I64, (1,)),
        "logprob": (_F32, ("M",)),
        "next_kv_len": (_I64, (1,)),
        "next_ids": (_I64, (2,)),
        "next_draft_kv_len": (_I64, ("G",)),
    }
    judge = _judge_greedy if variant == "greedy" else _judge_sampled

    def body(op: Ops, given: Values) -> Values:
        logits = _pad(op, op.Squeeze(given["logits"], [0]), V)  # [M, V64]
        rows = _rows(op, given)
        n_accepted, drawn = judge(op, given, rows, logits, V)  # [1], [1]
        return _commit(op, given, rows, logits, n_accepted, drawn)

    return _model(f"accept_{variant}", inputs, outputs, body)


def sample_graph(variant: SampleVariant, vocabulary: int) -> ir.Model:
    """Make the graph that draws one token from a target row: after prefill, and in plain decoding.

    Inputs: `logits [1, R, V]` float32, `row [1]` int64 (which row); for `temperature` also
    `temperature [1]`, `race [K]` float32. Outputs: `tokens [1]` int64, `logprob [1]` float32.

    Args:
        variant: `greedy` (temperature 0) or `temperature`.
        vocabulary: V.
    """
    V = vocabulary
    inputs: Signature = {"logits": (_F32, (1, "R", V)), "row": (_I64, (1,))}
    if variant == "temperature":
        inputs |= _sampling_inputs(V)

    def body(op: Ops, given: Values) -> Values:
        logits = _pad(op, _chosen_row(op, given), V)  # [1, V64]
        if variant == "greedy":
            token = _first_maximum(op, logits, V)  # [1]
        else:
            token = _draw(op, _softmax(op, logits, given), given, V)  # [1]
        return {"tokens": token, "logprob": _logprob(op, logits, token)}

    outputs: Signature = {"tokens": (_I64, (1,)), "logprob": (_F32, (1,))}
    return _model(f"sample_{variant}", inputs, outputs, body)


def propose_graph(variant: ProposeVariant, vocabulary: int, draft_vocabulary: int) -> ir.Model:
    """Make the graph that draws one draft token, in the *target's* vocabulary.

    Draft logits beyond V are cut and missing ones count as -inf, before the softmax: an id the
    target does not have is never proposed, and `q` sums to one.

    Inputs: `logits [1, R, Vd]` float32, `row [1]` int64; for `dense` also `temperature [1]`,
    `race [K]` float32. Outputs: `token [1]` int64; for `dense` also `q [1, V]` float32, the
    distribution really sampled from.

    Args:
        variant: `greedy` (a one-hot draft) or `dense`.
        vocabulary: V, the target's.
        draft_vocabulary: Vd, the drafting model's.
    """
    V, Vd = vocabulary, draft_vocabulary
    inputs: Signature = {"logits": (_F32, (1, "R", Vd)), "row": (_I64, (1,))}
    outputs: Signature = {"token": (_I64, (1,))}
    if variant == "dense":
        inputs |= _sampling_inputs(V)
        outputs["q"] = (_F32, (1, V))

    def body(op: Ops, given: Values) -> Values:
        logits = _chosen_row(op, given)  # [1, Vd]
        if Vd > V:
            logits = op.Slice(logits, [0], [V], [1])
        logits = _pad(op, logits, V, width=min(V, Vd))  # [1, V64]
        if variant == "greedy":
            return {"token": _first_maximum(op, logits, V)}
        q = _softmax(op, logits, given)  # [1, V64]
        return {"token": _draw(op, q, given, V), "q": op.Slice(q, [0], [V], [1])}

    return _model(f"propose_{variant}", inputs, outputs, body)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the rows of a round are: the drafts and, last, the row that has none."""

    index: ir.Value  # [M] 0 .. G
    draft: ir.Value  # [M] ids, anything in a row without a draft
    drafted: ir.Value  # [M] bool, index < n_draft


def _rows(op: Ops, given: Values) -> _Rows:
    draft = op.Concat(given["draft_tokens"], [0], axis=0)
    index = _iota(op, draft)
    return _Rows(index, draft, op.Less(index, given["n_draft"]))


def _judge_greedy(
    op: Ops, given: Values, rows: _Rows, logits: ir.Value, V: int
) -> tuple[ir.Value, ir.Value]:
    best = _first_maximum(op, logits, V)  # [M]
    accepted = op.And(rows.drafted, op.Equal(rows.draft, best))  # [M]
    n_accepted = _first(op, op.Not(accepted))  # [1]
    return n_accepted, op.Gather(best, n_accepted)


def _judge_sampled(
    op: Ops, given: Values, rows: _Rows, logits: ir.Value, V: int
) -> tuple[ir.Value, ir.Value]:
    p = _softmax(op, logits, given)  # [M, V64]
    draft = op.Min(op.Max(rows.draft, 0), V - 1)  # [M], safe to gather with
    judged = op.And(rows.drafted, op.Equal(draft, rows.draft))  # p of an unknown id is 0

    bar = op.Concat(given["uniform"], [1.0], axis=0)  # [M], u q(d)
    if "q" in given:
        q_draft = _at(op, given["q"], op.Slice(draft, [0], [-1], [0]))  # [G]
        bar = op.Mul(bar, op.Concat(q_draft, [1.0], axis=0))
    accepted = op.And(judged, op.Less(bar, _at(op, p, draft)))  # [M]
    n_accepted = _first(op, op.Not(accepted))  # [1]

    p_row = op.Gather(p, n_accepted)  # [1, V64]
    refused = op.Gather(judged, n_accepted)  # [1], false in row n_draft: nothing to take off there
    if "q" in given:
        last_draft = op.Sub(op.Shape(given["draft_tokens"]), 1)
        q_row = op.Gather(given["q"], op.Min(n_accepted, last_draft))  # [1, V]
        q_row = _pad(op, op.Where(refused, q_row, 0.0), V, fill=0.0)  # [1, V64]
        residual = op.Relu(op.Sub(p_row, q_row))
    else:  # q is 1 at the draft, so max(p - q, 0) is p without it
        at = op.Unsqueeze(op.Gather(draft, n_accepted), [0])  # [1, 1]
        left = op.Where(refused, 0.0, op.GatherElements(p_row, at, axis=1))
        residual = op.ScatterElements(p_row, at, left, axis=1)
    has_mass = op.Greater(op.ReduceMax(residual), 0.0)  # [1, 1], false for NaN
    return n_accepted, _draw(op, op.Where(has_mass, residual, p_row), given, V)


def _commit(
    op: Ops,
    given: Values,
    rows: _Rows,
    logits: ir.Value,
    n_accepted: ir.Value,
    drawn: ir.Value,
) -> Values:
    tokens = op.Where(op.Less(rows.index, n_accepted), rows.draft, 0)
    tokens = op.Where(op.Equal(rows.index, n_accepted), drawn, tokens)  # [M]
    emitted = op.LessOrEqual(rows.index, n_accepted)  # [M]
    committed = op.Concat(given["last_id"], tokens, axis=0)  # [M + 1]
    next_kv_len = op.Add(op.Add(given["kv_len"], n_accepted), 1)  # [1]
    draft_pass = _iota(op, given["draft_tokens"])  # [G]
    rows_before = op.Add(draft_pass, op.Min(draft_pass, 1))  # 0, 2, 3, 4: pass 0 has two rows
    return {
        "tokens": tokens,
        "n_accepted": n_accepted,
        "logprob": op.Where(emitted, _logprob(op, logits, tokens), 0.0),
        "next_kv_len": next_kv_len,
        "next_ids": op.Gather(committed, op.Add(n_accepted, [0, 1])),
        "next_draft_kv_len": op.Add(op.Sub(next_kv_len, 1), rows_before),
    }


def _draw(op: Ops, weights: ir.Value, given: Values, V: int) -> ir.Value:
    """Draw an index in proportion to `weights [1, V64]`, with the exponentials `race [K]`."""
    B = _padded(V) // BLOCK
    blocks = op.Reshape(weights, [B, BLOCK])
    first_heat = op.Slice(given["race"], [0], [B], [0])
    second_heat = op.Slice(given["race"], [B], [B + BLOCK], [0])
    block = _race(op, op.ReduceSum(blocks, [1], keepdims=0), first_heat)  # [1]
    inside = op.Squeeze(op.Gather(blocks, block), [0])  # [64]
    token = op.Add(op.Mul(block, BLOCK), _race(op, inside, second_heat))
    return op.Min(token, V - 1)  # NaN in the noise may point anywhere


def _race(op: Ops, weights: ir.Value, exponentials: ir.Value) -> ir.Value:
    """The index that finishes first, [1]: index i with probability weights[i] / their sum."""
    positive = op.Greater(weights, 0.0)  # false for NaN
    weights = op.Where(positive, weights, 0.0)
    # Scaled so that the largest weight is 1. Its time is finite, so an index without weight never
    # wins, however small the weights are.
    weights = op.Div(weights, op.ReduceMax(weights))
    time = op.Where(positive, op.Div(exponentials, weights), math.inf)
    return _first(op, op.Equal(time, op.ReduceMin(time)))


def _softmax(op: Ops, logits: ir.Value, given: Values) -> ir.Value:
    return op.Softmax(op.Div(logits, given["temperature"]), axis=-1)


def _logprob(op: Ops, logits: ir.Value, tokens: ir.Value) -> ir.Value:
    """Log-softmax of the raw rows at `tokens`, NaN for a row that holds NaN or +inf."""
    logprob = _at(op, op.LogSoftmax(logits, axis=-1), tokens)
    # A softmax kernel may clamp NaN away; a sum cannot. It is -inf where a token is banned.
    total = op.ReduceSum(logits, [1], keepdims=0)
    return op.Where(op.Less(total, math.inf), logprob, math.nan)


def _first_maximum(op: Ops, x: ir.Value, V: int) -> ir.Value:
    """First index of each row's maximum, [rows]. By blocks: 5 times faster than over whole rows."""
    block_best = op.ReduceMax(op.Reshape(x, [0, -1, BLOCK]), [2], keepdims=0)  # [rows, B]
    block = _first_of_maxima(op, block_best)  # [rows]
    flat = op.Add(op.Mul(_iota(op, x), _padded(V) // BLOCK), block)
    inside = op.Gather(op.Reshape(x, [-1, BLOCK]), flat)  # [rows, 64]
    token = op.Add(op.Mul(block, BLOCK), _first_of_maxima(op, inside))
    return op.Min(token, V - 1)  # a row of NaN may point anywhere


def _first_of_maxima(op: Ops, x: ir.Value) -> ir.Value:
    return _first(op, op.Equal(x, op.ReduceMax(x, [1])), axis=1, keepdims=0)


def _first(op: Ops, mask: ir.Value, *, axis: int = 0, keepdims: int = 1) -> ir.Value:
    """First true index along `axis`; the last index where none is."""
    index = _iota(op, mask, axis)
    last = op.Sub(op.Shape(mask, start=axis, end=axis + 1), 1)
    return op.ReduceMin(op.Where(mask, index, last), [axis], keepdims=keepdims)


def _at(op: Ops, x: ir.Value, ids: ir.Value) -> ir.Value:
    """x[i, ids[i]] for every i."""
    width = op.Shape(x, start=1, end=2)
    return op.Gather(op.Reshape(x, [-1]), op.Add(op.Mul(_iota(op, ids), width), ids))


def _iota(op: Ops, x: ir.Value, axis: int = 0) -> ir.Value:
    return op.Range(0, op.Squeeze(op.Shape(x, start=axis, end=axis + 1)), 1)


def _chosen_row(op: Ops, given: Values) -> ir.Value:
    return op.Gather(op.Squeeze(given["logits"], [0]), given["row"])  # [1, V]


def _pad(
    op: Ops, x: ir.Value, V: int, *, width: int | None = None, fill: float = -math.inf
) -> ir.Value:
    """Widen rows of `width` (V unless given) to V64, V rounded up to whole blocks."""
    missing = _padded(V) - (V if width is None else width)
    return op.Pad(x, [0, 0, 0, missing], fill) if missing else x


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // BLOCK) * BLOCK


def _sampling_inputs(vocabulary: int) -> Signature:
    # The runtime's noise.race_size computes the same K; it must not import this module.
    K = _padded(vocabulary) // BLOCK + BLOCK
    return {"temperature": (_F32, (1,)), "race": (_F32, (K,))}


def _model(
    name: str,
    inputs: Signature,
    outputs: Signature,
    body: Callable[[Ops, Values], Values],
) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    builder = GraphBuilder(graph)
    given = {key: builder.input(key, dtype, shape) for key, (dtype, shape) in inputs.items()}
    made = body(builder.op, given)
    for key, (dtype, shape) in outputs.items():
        made[key].dtype, made[key].shape = dtype, ir.Shape(shape)
        builder.add_output(made[key], key)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="spec-export")

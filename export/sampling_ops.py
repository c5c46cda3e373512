"""What the sampling graphs are built from: rows of whole blocks, first indices, the race.

Knows no rule and no parameter. Three habits hold in all of them:

- A row has the same bits whatever the number of rows beside it: sums over a row are sums of
  integers, or folds of halves, never a `ReduceSum` of floats, whose order depends on the shape.
- Ties go to the first index on every engine: no graph that decides uses ArgMax or the order of
  TopK, which TensorRT leaves open. A drawn id is inside the vocabulary whatever the inputs hold.
- Tokens of a row are selected by multiplying with a cast comparison: onnxruntime's `Where` is 40
  times slower than `Mul` (2026-11-29, EPYC, [5, 49152]: 0.85 against 0.02 ms). Where a row may be
  garbage, the whole row is selected, with `Gather`: 0 times NaN is no selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

import onnx_ir as ir
from onnxscript import GraphBuilder

from spec_export.engines.graphs import BLOCK, padded_vocabulary, race_blocks

OPSET = 24
IR_VERSION = 11
# Below this an exponential is taken for this: 0 times anything must not win. No keyed one is
# (they are 2^-53 or more).
SHORTEST_TIME = 2.0**-60
# Some softmax kernels leave up to e^-87 where the exponential of -inf is 0. Such a token has none.
NO_WEIGHT = 2.0**-120

F32, I32, I64, U8 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8
Values: TypeAlias = dict[str, ir.Value]
Signature: TypeAlias = dict[str, tuple[ir.DataType, tuple[int | str, ...]]]


class Ops(Protocol):
    """`onnxscript.OpBuilder` with a type: `op.Add(x, 1)` appends a node and returns its value."""

    Split: Callable[..., tuple[ir.Value, ir.Value]]  # with `_outputs=2`, as the next
    TopK: Callable[..., tuple[ir.Value, ir.Value]]

    def __getattr__(self, op_type: str, /) -> Callable[..., ir.Value]: ...


def make_model(
    name: str,
    inputs: Signature,
    outputs: Signature,
    body: Callable[[Ops, Values], Values],
) -> ir.Model:
    """A model whose outputs are what `body` returns for its inputs, by name."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    builder = GraphBuilder(graph)
    given = {key: builder.input(key, dtype, shape) for key, (dtype, shape) in inputs.items()}
    made = body(builder.op, given)
    for key, (dtype, shape) in outputs.items():
        made[key].dtype, made[key].shape = dtype, ir.Shape(shape)
        builder.add_output(made[key], key)
    for node in graph:  # what every reader works out for itself, three quarters of the file
        node.metadata_props.clear()
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="spec-export")


# --- rows -----------------------------------------------------------------------------------------


def rows_of(
    op: Ops, logits: ir.Value, V: int, width: int | None = None, fill: float = -math.inf
) -> ir.Value:
    """`[1, R, width]` as rows `[R, V64]`: what is beyond V is cut, what is missing is `fill`.

    V64 is V rounded up to whole blocks: some CPU kernels change bits by row without it.
    """
    width = V if width is None else width
    x = op.Squeeze(logits, [0])
    if width > V:
        x = op.Slice(x, [0], [V], [1])
    missing = padded_vocabulary(V) - min(width, V)
    return op.Pad(x, [0, 0, 0, missing], fill) if missing else x


def at(op: Ops, x: ir.Value, ids: ir.Value) -> ir.Value:
    """x[i, ids[i]] for every i; ids must lie inside the row."""
    width = op.Shape(x, start=1, end=2)
    return op.Gather(op.Reshape(x, [-1]), op.Add(op.Mul(iota(op, ids), width), ids))


def iota(op: Ops, x: ir.Value, axis: int = 0) -> ir.Value:
    """0, 1, .. to the length of an axis of x."""
    return op.Range(0, op.Squeeze(op.Shape(x, start=axis, end=axis + 1)), 1)


def column(op: Ops, x: ir.Value) -> ir.Value:
    """`[n]` as `[n, 1]`."""
    return op.Unsqueeze(x, [1])


def inside(op: Ops, ids: ir.Value, V: int) -> ir.Value:
    """Ids that are safe to gather with: those outside the vocabulary become its ends."""
    return op.Min(op.Max(ids, 0), V - 1)


def number(op: Ops, mask: ir.Value) -> ir.Value:
    """A mask as 1.0 and 0.0."""
    return op.Cast(mask, to=F32)


# --- first indices --------------------------------------------------------------------------------


def first(op: Ops, mask: ir.Value, *, axis: int = 0, keepdims: int = 1) -> ir.Value:
    """First true index along `axis`; the last index where none is. Axes are below 2^24 long."""
    length = op.Shape(mask, start=axis, end=axis + 1)  # [1]
    countdown = op.Cast(op.Range(op.Squeeze(length), 0, -1), to=F32)  # n, n - 1, .. 1
    best = op.ReduceMax(op.Mul(number(op, mask), countdown), [axis], keepdims=keepdims)
    return op.Min(op.Sub(length, op.Cast(best, to=I64)), op.Sub(length, 1))


def first_of_maxima(op: Ops, x: ir.Value) -> ir.Value:
    """First index of each row's maximum, `[rows]`."""
    return first(op, op.Equal(x, op.ReduceMax(x, [1])), axis=1, keepdims=0)


def first_maximum(op: Ops, x: ir.Value, V: int) -> ir.Value:
    """`first_of_maxima` of rows `[rows, V64]`. By blocks: 5 times faster than over whole rows."""
    block_best = op.ReduceMax(op.Reshape(x, [0, -1, BLOCK]), [2], keepdims=0)  # [rows, V64/64]
    block = first_of_maxima(op, block_best)  # [rows]
    flat = op.Add(op.Mul(iota(op, x), padded_vocabulary(V) // BLOCK), block)
    in_block = op.Gather(op.Reshape(x, [-1, BLOCK]), flat)  # [rows, 64]
    token = op.Add(op.Mul(block, BLOCK), first_of_maxima(op, in_block))
    return op.Min(token, V - 1)  # a row of NaN may point anywhere


# --- the race -------------------------------------------------------------------------------------


def draw(op: Ops, weights: ir.Value, exponentials: ir.Value, V: int) -> ir.Value:
    """Draw one index per row in proportion to its weights.

    An exponential race in two heats: over B blocks, block b being the tokens b, b + B, b + 2B ..,
    and then inside the block that won. A product of two exact races is exact, and takes `B + V64/B`
    exponentials instead of V. Neighbouring ids, which tend to be probable together, are in
    different blocks: two races on the same exponentials then end alike nearly as often as races
    over single tokens. `weights [rows, V64]` need no scale; a 0 among them is never drawn, and a
    row of NaN draws anything. `exponentials` are `[rows, K]`.
    """
    B, places = race_blocks(V), padded_vocabulary(V) // race_blocks(V)
    sums = weights
    for _ in range(places.bit_length() - 1):  # folded, so that every row has the same bits
        left, right = op.Split(sums, axis=1, num_outputs=2, _outputs=2)
        sums = op.Add(left, right)  # [rows, B] in the end
    block = _race(op, sums, op.Slice(exponentials, [0], [B], [1]))  # [rows]
    if places == 1:
        return op.Min(block, V - 1)
    start = op.Add(op.Mul(iota(op, weights), padded_vocabulary(V)), block)  # [rows]
    ids = op.Add(column(op, start), [place * B for place in range(places)])  # [rows, places]
    in_block = op.Gather(op.Reshape(weights, [-1]), ids)  # [rows, places]
    place = _race(op, in_block, op.Slice(exponentials, [B], [B + places], [1]))  # [rows]
    return op.Min(op.Add(block, op.Mul(place, B)), V - 1)  # NaN may point anywhere


def _race(op: Ops, weights: ir.Value, exponentials: ir.Value) -> ir.Value:
    """The index that finishes first in each row: i with probability weights[i] / their sum.

    Scaled so that the largest weight is 1. Its speed is above 0, so an index without weight never
    wins, however small the weights are.
    """
    share = op.Div(weights, op.ReduceMax(weights, [1]))
    return first_of_maxima(op, op.Div(share, op.Max(exponentials, SHORTEST_TIME)))

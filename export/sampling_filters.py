"""Top-k, top-p, min-p and typical-p: which tokens of a distribution may be drawn.

The first three keep the tokens with `p >= t` and scale them to one. With p the float32 softmax and
`w(x) = floor(2^50 p(x))`, whose sums are exact in any order:

    t = max(t_k, t_p, t_m), taken for 0 where it is 2^-63 or less
    t_k   the k-th largest p                                   0 where top-k is off
    t_p   the largest p whose tokens `p' >= p` together have   0 where top-p is off or none reaches
          w >= max(1, ceil(top_p m)); m is the w that top-k    it; top_p in units of 2^-24
          keeps, or 2^50
    t_m   min_p times the largest p

so tokens that tie at the threshold are all kept, and the outcome depends on neither their order nor
the shape of the row. `typical` then does with closeness `exp(-|-log p - H|)`, H the entropy of what
is kept, as top-p does with p.

The threshold is found in four ways that agree in every bit:

- `top` lists the 256 largest p. Where the cut is not among them, `overflow` is 1.
- `nucleus` first narrows top-p down to where about a hundred tokens are left, and lists those.
- `any` bisects over all positive floats, 29 steps for each of top-k and top-p. Always exact.
- `typical` is `any`, and bisects over closeness as well.

`top` and `nucleus` are for CPUs, where listing is cheap; `any` lists nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from spec_export.engines.graphs import LISTED, Filters, padded_vocabulary
from spec_export.export.sampling_ops import (
    F32,
    I64,
    Ops,
    Signature,
    Values,
    make_model,
    number,
)

UNIT, SHARE = 50, 24  # bits of a mass and of top-p
WHOLE = 1 << UNIT
ENTROPY_UNIT = 2.0**-40
SMALLEST = 2.0**-63
_NO_ENTROPY = 2.0**-126  # below it a float32 may be flushed to 0

Reaches = Callable[[ir.Value], ir.Value]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A threshold on p for each row, all `[R, 1]`."""

    threshold: ir.Value  # float32
    mass: ir.Value  # int64, of what is kept
    is_outside: ir.Value | None = None  # bool: it may be wrong, it lies beyond the list


def filter_graph(filters: Filters, vocabulary: int) -> ir.Model:
    """Make a graph that leaves of each distribution what the filters keep.

    Inputs: `p [R, V64]`; `top_p [1]` (1: off) and `min_p [1]` (0: off) float32; but for `nucleus`
    `top_k [1]` int64 (0: off); for `typical` `typical_p [1]` float32 (1: off). Outputs: `kept
    [R, V64]`; of `top` and `nucleus` `overflow [R]` int64, which is 1 where a threshold was not
    found: then what is kept of that row is not to be used.

    Args:
        filters: how the threshold is found; `top` where top-k is off or below 256.
        vocabulary: V.
    """
    rows = ("R", padded_vocabulary(vocabulary))
    inputs: Signature = {"p": (F32, rows), "top_p": (F32, (1,)), "min_p": (F32, (1,))}
    inputs |= {"top_k": (I64, (1,))} if filters != "nucleus" else {}
    inputs |= {"typical_p": (F32, (1,))} if filters == "typical" else {}
    outputs: Signature = {"kept": (F32, rows)}
    outputs |= {"overflow": (I64, ("R",))} if filters in ("top", "nucleus") else {}
    find = {"top": _cut_of_top, "nucleus": _cut_of_nucleus}.get(filters, _cut_by_bisection)

    def body(op: Ops, given: Values) -> Values:
        p = given["p"]
        cut = find(op, p, given, vocabulary)
        kept = op.Mul(p, number(op, op.GreaterOrEqual(p, cut.threshold)))
        made = {"kept": op.Div(kept, _as_float(op, cut.mass))}
        if filters == "typical":
            made["kept"] = _typical(op, made["kept"], given)
        if cut.is_outside is not None:
            made["overflow"] = op.Cast(op.Squeeze(cut.is_outside, [1]), to=I64)  # [R]
        return made

    return make_model(f"filter_{filters}", inputs, outputs, body)


def _cut_of_top(op: Ops, p: ir.Value, given: Values, V: int) -> _Cut:
    values, smallest = _list(op, p, V)  # [R, L], [R, 1]
    mass = op.CumSum(_units(op, values), 1)  # [R, L] int64
    k, is_k = given["top_k"], op.Greater(given["top_k"], 0)
    t_k = op.Gather(values, op.Max(op.Sub(k, 1), 0), axis=1)  # [R, 1]
    t_k = op.Mul(t_k, number(op, op.And(is_k, op.Greater(t_k, SMALLEST))))
    mass_k = op.Where(is_k, _mass_above(op, values, mass, t_k), WHOLE)  # [R, 1]
    t_p = _first_to_reach(op, values, mass, _share(op, mass_k, given["top_p"]))
    best = op.Slice(values, [0], [1], [1])
    t = _largest_cut(op, best, given, t_k, t_p)
    is_outside = op.Or(
        op.GreaterOrEqual(smallest, t), op.And(is_k, op.GreaterOrEqual(smallest, t_k))
    )
    return _Cut(t, _mass_above(op, values, mass, t), is_outside)


def _cut_of_nucleus(op: Ops, p: ir.Value, given: Values, V: int) -> _Cut:
    needed, best = _share(op, WHOLE, given["top_p"]), op.ReduceMax(p, [1])  # [1], [R, 1]
    # Rough sums will do: what comes of them is checked. 8 bits leave a 256th of an octave.
    about = op.Mul(op.Cast(needed, to=F32), 1.0 / WHOLE)
    low, step = _largest(op, lambda t: op.GreaterOrEqual(_sum_above(op, p, t), about), 5, 8)
    high = op.Max(op.Add(low, step), op.Mul(best, given["min_p"]))  # [R, 1]

    is_above = op.GreaterOrEqual(p, high)
    above = _exact_sum(op, op.Mul(_units32(op, p), number(op, is_above)))  # [R, 1] int64
    values, smallest = _list(op, op.Mul(p, number(op, op.Not(is_above))), V)
    mass = op.Add(op.CumSum(_units(op, values), 1), above)  # [R, L]
    t_p = _first_to_reach(op, values, mass, needed)
    t = _largest_cut(op, best, given, t_p)
    is_outside = op.Or(op.GreaterOrEqual(smallest, t), op.GreaterOrEqual(above, needed))
    return _Cut(t, op.Max(_mass_above(op, values, mass, t), above), is_outside)


def _cut_by_bisection(op: Ops, p: ir.Value, given: Values, V: int) -> _Cut:
    units = _units32(op, p)

    def mass_above(t: ir.Value) -> ir.Value:
        return _exact_sum(op, op.Mul(units, number(op, op.GreaterOrEqual(p, t))))

    k, is_k = op.Cast(given["top_k"], to=F32), op.Greater(given["top_k"], 0)
    t_k, _ = _largest(op, lambda t: op.GreaterOrEqual(_count(op, p, t), op.Max(k, 1.0)), 6, 23)
    t_k = op.Mul(t_k, number(op, op.And(is_k, op.Greater(t_k, SMALLEST))))
    mass_k = op.Where(is_k, mass_above(t_k), WHOLE)  # [R, 1]
    needed = _share(op, mass_k, given["top_p"])
    t_p, _ = _largest(op, lambda t: op.GreaterOrEqual(mass_above(t), needed), 6, 23)
    t = _largest_cut(op, op.ReduceMax(p, [1]), given, t_k, t_p)
    return _Cut(t, mass_above(t))


def _typical(op: Ops, p: ir.Value, given: Values) -> ir.Value:
    """Keep the tokens whose surprise is closest to the entropy. Source: arXiv 2202.00666."""
    surprise = op.Neg(op.Log(op.Max(p, _NO_ENTROPY)))  # [R, V64]
    terms = op.Floor(op.Mul(op.Mul(p, surprise), 1.0 / ENTROPY_UNIT))
    entropy = op.Mul(op.Cast(_exact_sum(op, terms), to=F32), ENTROPY_UNIT)  # [R, 1]
    distance = op.Abs(op.Sub(surprise, entropy))
    close = op.Mul(op.Exp(op.Neg(distance)), number(op, op.Greater(p, 0.0)))
    units = _units32(op, p)

    def mass_above(t: ir.Value) -> ir.Value:
        return _exact_sum(op, op.Mul(units, number(op, op.GreaterOrEqual(close, t))))

    needed = _share(op, _exact_sum(op, units), given["typical_p"])
    t, _ = _largest(op, lambda t: op.GreaterOrEqual(mass_above(t), needed), 6, 23)
    t = op.Mul(t, number(op, op.And(op.Less(given["typical_p"], 1.0), op.Greater(t, SMALLEST))))
    kept = op.Mul(p, number(op, op.GreaterOrEqual(close, t)))
    return op.Div(kept, _as_float(op, mass_above(t)))


# --- thresholds -----------------------------------------------------------------------------------


def _largest(op: Ops, reaches: Reaches, octaves: int, bits: int) -> tuple[ir.Value, ir.Value]:
    """The largest float t in [2^(1 - 2^octaves), 2) that reaches, and the step to the next.

    The smallest one where none does. `reaches` takes t `[R, 1]` and returns bool `[R, 1]`, true
    for all t below some bound. `octaves` halvings find the power of two and `bits` the rest, in
    steps of `2^-bits` of it: at 23 no float lies between two, so that the largest t for which
    enough tokens have `p >= t` is the p of one of them.
    """
    # By arithmetic, every step of it exact: with `Where` the compile time of TensorRT doubles with
    # each of them (2026-11-29, tensorrt_rtx 1.7.1: 18 s for 20, and 0.3 s so).
    above = op.Constant(value_floats=[2.0])  # does not reach
    for exponent in range(octaves - 1, -1, -1):
        factor = 2.0 ** -(1 << exponent)
        stays = number(op, reaches(op.Mul(above, factor)))
        above = op.Mul(above, op.Add(op.Mul(stays, 1.0 - factor), factor))
    t, step = op.Mul(above, 0.5), op.Mul(above, 0.25)
    for _ in range(bits):
        t = op.Add(t, op.Mul(number(op, reaches(op.Add(t, step))), step))
        step = op.Mul(step, 0.5)
    return t, op.Mul(step, 2.0)


def _largest_cut(op: Ops, best: ir.Value, given: Values, *cuts: ir.Value) -> ir.Value:
    """The largest of the cuts, of which the last is top-p's, and of min-p's, `[R, 1]`."""
    by_top_p = op.Mul(cuts[-1], number(op, op.Less(given["top_p"], 1.0)))
    t = op.Max(*cuts[:-1], by_top_p, op.Mul(best, given["min_p"]))
    return op.Mul(t, number(op, op.Greater(t, SMALLEST)))


def _share(op: Ops, mass: ir.Value | int, share: ir.Value) -> ir.Value:
    """max(1, ceil(share * mass)), share in units of 2^-24, without a product above 2^63."""
    part = op.Cast(op.Mul(share, float(1 << SHARE)), to=I64)  # [1]
    high = op.Div(mass, 1 << SHARE) if isinstance(mass, ir.Value) else mass >> SHARE
    rest = op.Mod(mass, 1 << SHARE) if isinstance(mass, ir.Value) else mass % (1 << SHARE)
    up = op.Div(op.Add(op.Mul(part, rest), (1 << SHARE) - 1), 1 << SHARE)
    return op.Max(op.Add(op.Mul(part, high), up), 1)


def _list(op: Ops, p: ir.Value, V: int) -> tuple[ir.Value, ir.Value]:
    """The largest p of each row in order, `[R, L]`, and a bound of all the others, `[R, 1]`."""
    width = padded_vocabulary(V)
    values, _ = op.TopK(p, [min(LISTED, width)], axis=1, _outputs=2)
    if width <= LISTED:
        return values, op.Constant(value_floats=[-1.0])
    return values, op.Slice(values, [LISTED - 1], [LISTED], [1])


def _first_to_reach(op: Ops, values: ir.Value, mass: ir.Value, needed: ir.Value) -> ir.Value:
    """The largest listed value whose mass, with all before it, is enough; 0 where none is."""
    return op.ReduceMax(op.Mul(values, number(op, op.GreaterOrEqual(mass, needed))), [1])


def _mass_above(op: Ops, values: ir.Value, mass: ir.Value, t: ir.Value) -> ir.Value:
    """Mass of the listed values from t on, of which `mass` holds the running sums."""
    return op.ReduceMax(op.Mul(mass, op.Cast(op.GreaterOrEqual(values, t), to=I64)), [1])


# --- sums -----------------------------------------------------------------------------------------


def _units32(op: Ops, p: ir.Value) -> ir.Value:
    """W as float32, which holds every p in units of 2^-50 rounded down."""
    return op.Floor(op.Mul(p, float(WHOLE)))


def _units(op: Ops, p: ir.Value) -> ir.Value:
    return op.Cast(_units32(op, p), to=I64)


def _exact_sum(op: Ops, x: ir.Value) -> ir.Value:
    """Sum of whole numbers along the rows, `[R, 1]` int64."""
    return op.ReduceSum(op.Cast(x, to=I64), [1])


def _as_float(op: Ops, mass: ir.Value) -> ir.Value:
    return op.Mul(op.Cast(mass, to=F32), 1.0 / WHOLE)


def _sum_above(op: Ops, p: ir.Value, t: ir.Value) -> ir.Value:
    return op.ReduceSum(op.Mul(p, number(op, op.GreaterOrEqual(p, t))), [1])


def _count(op: Ops, p: ir.Value, t: ir.Value) -> ir.Value:
    return op.ReduceSum(number(op, op.GreaterOrEqual(p, t)), [1])

"""ONNX operators as torch calls: attributes first, then the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Attributes = dict[str, Any]
TYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.BOOL: torch.bool,
}


def _fold(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(attributes: Attributes, *values: Tensor) -> Tensor:
        result = values[0]
        for value in values[1:]:
            result = operation(result, value)
        return result

    return run


def _plain(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda attributes, *values: operation(*values)


def _ints(value: Tensor | None) -> list[int]:
    return [] if value is None else [int(number) for number in value.reshape(-1).tolist()]


def _divide(attributes: Attributes, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


def _reduce(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(attributes: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
        dims = _ints(axes) or list(range(x.dim()))
        for dim in sorted((dim % x.dim() for dim in dims), reverse=True):
            x = operation(x, dim)
        return x if attributes.get("keepdims", 1) == 0 else _kept(x, dims)

    return run


def _kept(x: Tensor, dims: list[int]) -> Tensor:
    rank = x.dim() + len(dims)
    for dim in sorted(dim % rank for dim in dims):
        x = x.unsqueeze(dim)
    return x


def _gather(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % x.dim()
    flat = indices.reshape(-1)
    flat = torch.where(flat < 0, flat + x.shape[axis], flat)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, flat).reshape(shape)


def _reshape(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    wanted = _ints(shape)
    if not attributes.get("allowzero", 0):
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return x.reshape(wanted)


def _slice(
    attributes: Attributes,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first, last = _ints(starts), _ints(ends)
    dims = _ints(axes) or list(range(len(first)))
    strides = _ints(steps) or [1] * len(first)
    for start, stop, dim, step in zip(first, last, dims, strides, strict=True):
        assert step > 0, "backwards"
        index = [slice(None)] * x.dim()
        index[dim] = slice(start, stop, step)
        x = x[tuple(index)]
    return x


def _squeeze(attributes: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = _ints(axes) or [i for i, n in enumerate(x.shape) if n == 1]
    for dim in sorted((dim % x.dim() for dim in dims), reverse=True):
        x = x.squeeze(dim)
    return x


def _unsqueeze(attributes: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    return _kept(x, _ints(axes))


def _expand(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(_ints(shape))))


def _pad(
    attributes: Attributes,
    x: Tensor,
    pads: Tensor,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    dims, sides = _ints(axes) or list(range(x.dim())), _ints(pads)
    both = [0] * (2 * x.dim())
    for i, dim in enumerate(dims):
        at = 2 * (x.dim() - 1 - dim % x.dim())
        both[at], both[at + 1] = sides[i], sides[i + len(dims)]
    if x.dtype == torch.bool:
        return (
            F.pad(x.to(torch.uint8), both, value=int(value.item()) if value is not None else 0) > 0
        )
    return F.pad(x, both, value=value.item() if value is not None else 0)


def _range(attributes: Attributes, start: Tensor, stop: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), stop.item(), step.item(), dtype=start.dtype)


def _top_k(attributes: Attributes, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    dim, largest = attributes.get("axis", -1), bool(attributes.get("largest", 1))
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    count = _ints(k)[0]
    return values.narrow(dim, 0, count), indices.narrow(dim, 0, count)


def _scatter_elements(
    attributes: Attributes, x: Tensor, indices: Tensor, updates: Tensor
) -> Tensor:
    axis, kind = attributes.get("axis", 0), attributes.get("reduction", b"none")
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    if kind == b"none":
        return x.scatter(axis, indices, updates)
    return x.scatter_add(axis, indices, updates)


def _scatter_nd(attributes: Attributes, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    places = tuple(
        torch.where(part < 0, part + x.shape[i], part) for i, part in enumerate(indices.unbind(-1))
    )
    accumulate = attributes.get("reduction", b"none") == b"add"
    return x.index_put(places, updates, accumulate=accumulate)


def shape_of(attributes: Attributes, x: Tensor) -> Tensor:
    """The shape of a tensor, or a part of it, as numbers."""
    return torch.tensor(list(x.shape)[attributes.get("start", 0) : attributes.get("end")])


def _clip(
    attributes: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _rms_norm(attributes: Attributes, x: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    mean = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean + attributes.get("epsilon", 1e-5))).to(x.dtype) * scale


def _rotate(attributes: Attributes, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert not attributes.get("interleaved", 0) and not attributes.get("rotary_embedding_dim", 0)
    heads = attributes.get("num_heads", 0)
    rows = x.reshape(*x.shape[:-1], heads, -1) if x.dim() == 3 else x.transpose(1, 2)
    first, second = rows.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.reshape(x.shape) if x.dim() == 3 else turned.transpose(1, 2)


def _attend(attributes: Attributes, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    assert q.dim() == 4 and not attributes.get("softcap", 0) and not attributes.get("is_causal", 0)
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (k, v))
    scale = attributes.get("scale", q.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _write_cache(attributes: Attributes, past: Tensor, update: Tensor, at: Tensor) -> Tensor:
    """In place: past and present are one memory."""
    axis = attributes.get("axis", -2) % past.dim()
    rows = at + torch.arange(update.shape[axis], device=past.device)
    return past.index_copy_(axis, rows, update)


OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": _plain(torch.abs),
    "Add": _plain(torch.add),
    "And": _plain(torch.logical_and),
    "Attention": _attend,
    "Cast": lambda a, x: x.to(TYPES[a["to"]]),
    "Clip": _clip,
    "Concat": lambda a, *xs: torch.cat(xs, a["axis"]),
    "Constant": lambda a: torch.as_tensor(next(iter(a.values()))),
    "Cos": _plain(torch.cos),
    "CumSum": lambda a, x, axis: torch.cumsum(x, _ints(axis)[0]),
    "Div": _divide,
    "Equal": _plain(torch.eq),
    "Exp": _plain(torch.exp),
    "Expand": _expand,
    "Floor": _plain(torch.floor),
    "Gather": _gather,
    "Greater": _plain(torch.gt),
    "GreaterOrEqual": _plain(torch.ge),
    "Less": _plain(torch.lt),
    "LessOrEqual": _plain(torch.le),
    "Log": _plain(torch.log),
    "LogSoftmax": lambda a, x: torch.log_softmax(x, a.get("axis", -1)),
    "MatMul": _plain(torch.matmul),
    "Max": _fold(torch.maximum),
    "Min": _fold(torch.minimum),
    "Mod": _plain(torch.remainder),
    "Mul": _plain(torch.mul),
    "Neg": _plain(torch.neg),
    "Not": _plain(torch.logical_not),
    "Or": _plain(torch.logical_or),
    "Pad": _pad,
    "RMSNormalization": _rms_norm,
    "Range": _range,
    "ReduceMax": _reduce(lambda x, dim: torch.amax(x, dim)),
    "ReduceMin": _reduce(lambda x, dim: torch.amin(x, dim)),
    "ReduceProd": _reduce(lambda x, dim: torch.prod(x, dim)),
    "ReduceSum": _reduce(lambda x, dim: torch.sum(x, dim, dtype=x.dtype)),
    "Relu": _plain(torch.relu),
    "Reshape": _reshape,
    "RotaryEmbedding": _rotate,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": shape_of,
    "Sigmoid": _plain(torch.sigmoid),
    "Sin": _plain(torch.sin),
    "Slice": _slice,
    "Softmax": lambda a, x: torch.softmax(x, a.get("axis", -1)),
    "Squeeze": _squeeze,
    "Sub": _plain(torch.sub),
    "TensorScatter": _write_cache,
    "TopK": _top_k,
    "Transpose": lambda a, x: x.permute(a["perm"]),
    "Unsqueeze": _unsqueeze,
    "Where": _plain(torch.where),
}
# Inputs that say a shape or a count: numbers, whatever device the rest is on.
NUMBERS = {
    "CumSum": (1,),
    "Expand": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "ReduceMax": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Squeeze": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}

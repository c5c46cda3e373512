"""Attention over a static cache: what is put into a model's own code before it is traced.

Two custom operators, which become ONNX `TensorScatter` and `Attention`; a transformers cache whose
`update` is the first, an attention function that is the second, and the masks of a pass. Knows no
model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from onnxscript import FLOAT
from onnxscript.onnx_opset import opset24 as op
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from spec_export.engines.errors import UnsupportedModel

ATTENTION = "spec_export"  # the name transformers knows the attention function by


# --- the two operators -------------------------------------------------------------------------


@torch.library.custom_op("spec_export::cache_write", mutates_args=())
def _cache_write(cache: torch.Tensor, rows: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    start = int(kv_len)
    written = cache.clone()
    written[:, :, start : start + rows.shape[2]] = rows
    return written


@_cache_write.register_fake
def _(cache: torch.Tensor, rows: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("spec_export::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


@_attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _cache_write_onnx(cache: FLOAT, rows: FLOAT, kv_len: Any) -> Any:
    return op.TensorScatter(cache, rows, kv_len, axis=-2, mode="linear")


def _attend_onnx(
    query: FLOAT, key: FLOAT, value: FLOAT, mask: Any, scale: float, softcap: float
) -> Any:
    result, _, _, _ = op.Attention(query, key, value, mask, scale=scale, softcap=softcap)
    return result


TRANSLATIONS: dict[Any, Any] = {
    torch.ops.spec_export.cache_write.default: _cache_write_onnx,
    torch.ops.spec_export.attend.default: _attend_onnx,
}


# --- what is put into the model ----------------------------------------------------------------


class StaticCaches(Cache):
    """A transformers cache over static buffers: `update` writes rows at `kv_len`."""

    def __init__(self, buffers: list[torch.Tensor], kv_len: torch.Tensor) -> None:
        self.layers = []
        self.buffers, self.kv_len = buffers, kv_len
        self.present: dict[int, torch.Tensor] = {}

    def update(  # type: ignore[override]
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of a pass; returns the whole caches of the layer."""
        for offset, rows in enumerate((key, value)):
            index = 2 * layer_idx + offset
            self.present[index] = _cache_write(self.buffers[index], rows, self.kv_len)
        return self.present[2 * layer_idx], self.present[2 * layer_idx + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows that hold tokens: positions are given, so nothing is counted."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of a mask, and where they start."""
        return self.buffers[0].shape[2], 0

    @property
    def is_compileable(self) -> bool:
        """Shapes stay, so the model may be traced."""
        return True


class PassMasks:
    """Boolean masks of one pass by window size, `[1, 1, T, C]`; None is full attention."""

    def __init__(
        self, kv_len: torch.Tensor, depth: torch.Tensor, tree_mask: torch.Tensor, capacity: int
    ):
        column = torch.arange(capacity, device=depth.device)
        row = (column - kv_len).clamp(min=0, max=depth.shape[0] - 1)
        in_pass = (column >= kv_len) & (column < kv_len + depth.shape[0])
        own_path = torch.index_select(tree_mask, 1, row)  # [T, C]
        self._allowed = (column < kv_len) | (in_pass & own_path)
        position = torch.where(in_pass, kv_len + torch.index_select(depth, 0, row), column)
        self._distance = (kv_len + depth)[:, None] - position
        self._by_window: dict[int | None, torch.Tensor] = {}
        self.asked: list[int | None] = []

    def for_layer(self, window: int | None) -> torch.Tensor:
        """The mask of the next layer, which is remembered in `asked`."""
        self.asked.append(window)
        return self[window]

    def __getitem__(self, window: int | None) -> torch.Tensor:
        if window not in self._by_window:
            near = self._allowed if window is None else self._allowed & (self._distance < window)
            self._by_window[window] = near[None, None]
        return self._by_window[window]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function. `[1, H, T, D]` in, `[1, T, H, D]` out."""
    ignored = {"position_ids", "use_cache", "is_causal", "output_attentions", "kwargs"}
    unknown = sorted(k for k, v in options.items() if v is not None and k not in ignored)
    if unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which the "
            "exported graph does not have"
        )
    if key.shape[-1] != value.shape[-1]:
        raise UnsupportedModel(
            f"{type(module).__name__}: key and value heads differ in size "
            f"({key.shape[-1]} and {value.shape[-1]}); multi-head latent attention is not supported"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    mask = _ACTIVE[-1].for_layer(sliding_window)
    result = _attend(query, key, value, mask, float(scale), float(softcap or 0.0))
    return result.transpose(1, 2), None


_ACTIVE: list[PassMasks] = []


@contextlib.contextmanager
def attending(masks: PassMasks) -> Iterator[None]:
    """Within it, attention takes its masks from here."""
    _ACTIVE.append(masks)
    try:
        yield
    finally:
        _ACTIVE.pop()


def _pass_mask_through(*_: Any, attention_mask: Any = None, **__: Any) -> Any:
    return attention_mask


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _pass_mask_through)

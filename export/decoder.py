"""Trace a decoder-only transformers model to a static-cache graph.

The model's own code runs unchanged. Attention and cache are put into it from outside
(`static_attention`), and a hook gathers the rows that need logits in front of the head.

Knows nothing of weights: the parameters it traces are uninitialised memory that is never touched,
and become initializers that carry their parameter name. Values are attached by `weights`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from transformers import PretrainedConfig, PreTrainedModel

from spec_export.engines.errors import ExportError, UnsupportedModel
from spec_export.export.skeleton import (
    build_skeleton,
    cache_argument,
    embedding_rows,
    max_position,
    output_head,
)
from spec_export.export.static_attention import (
    ATTENTION,
    TRANSLATIONS,
    PassMasks,
    StaticCaches,
    attending,
)

OPSET = 24
_TRACE_ROWS = 5
_TRACE_CAPACITY = 64


class StaticDecoder(torch.nn.Module):
    """`(input_ids, kv_len, depth, tree_mask, logit_rows, caches) -> (logits, *present)`."""

    def __init__(self, model: PreTrainedModel, max_position: int) -> None:
        super().__init__()
        self.model, self.max_position = model, max_position
        self._last_id = embedding_rows(model) - 1
        self._cache_argument = cache_argument(model)
        self._rows: torch.Tensor | None = None
        head = output_head(model)
        head.register_forward_pre_hook(self._gather_rows)

    def _gather_rows(
        self, _: torch.nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor]:
        assert self._rows is not None
        return (torch.index_select(args[0], 1, self._rows),)

    def forward(
        self,
        input_ids: torch.Tensor,  # [1, T]
        kv_len: torch.Tensor,  # [1]
        depth: torch.Tensor,  # [T]
        tree_mask: torch.Tensor,  # [T, T]
        logit_rows: torch.Tensor,  # [R]
        caches: list[torch.Tensor],  # 2 * layers of [1, Hkv, C, D]
    ) -> tuple[torch.Tensor, ...]:
        """Logits `[1, R, V]` float32, then every cache with the rows of this pass written."""
        masks = PassMasks(kv_len, depth, tree_mask, caches[0].shape[2])
        cache = StaticCaches(caches, kv_len)
        self._rows = logit_rows
        position_ids = (kv_len + depth).clamp(max=self.max_position - 1)[None]
        with attending(masks):
            output = self.model(
                # A draft may be fed ids of a larger target vocabulary; it has no row for them.
                input_ids=input_ids.clamp(0, self._last_id),
                attention_mask=masks[None],
                position_ids=position_ids,
                use_cache=True,
                **{self._cache_argument: cache},
            )
        logits = output.logits.to(torch.float32)
        return (logits, *(cache.present[i] for i in range(len(caches))))


@dataclass(frozen=True)
class LayerCache:
    """Key/value heads of one layer, their size, and its sliding window if it has one."""

    heads: int
    size: int
    window: int | None


@dataclass(frozen=True)
class TracedDecoder:
    """A traced graph and what its caches look like.

    Attributes:
        model: graph without weights; initializers carry parameter names and no data.
        skeleton: the module that was traced; its parameters are untouched memory.
        layers: what each layer caches.
    """

    model: ir.Model
    skeleton: PreTrainedModel
    layers: list[LayerCache]


def trace_decoder(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> TracedDecoder:
    """Trace `config`'s causal language model to ONNX with symbolic `T`, `R` and `C`.

    Raises:
        UnsupportedModel: the architecture does something the graphs have no place for.
        ExportError: the tracer failed; the cause is attached.
    """
    skeleton = build_skeleton(config, dtype, ATTENTION, trust_remote_code)
    wrapper = StaticDecoder(skeleton, max_position(config))
    layers = probe_layers(wrapper, dtype)
    try:
        with _quiet():
            program = torch.export.export(
                wrapper,
                _example(layers, dtype, _TRACE_ROWS, _TRACE_CAPACITY),
                dynamic_shapes=_dynamic_shapes(2 * len(layers)),
                strict=False,
            )
            traced = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=TRANSLATIONS,
                optimize=False,
                verbose=False,
            )
    except UnsupportedModel:
        raise
    except Exception as error:
        raise ExportError(
            f"{config.model_type} could not be traced: {_first_line(error)}"
        ) from error
    assert traced is not None
    return TracedDecoder(traced.model, skeleton, layers)


def _example(
    layers: list[LayerCache], dtype: torch.dtype, rows: int, capacity: int
) -> tuple[Any, ...]:
    caches = [layer for layer in layers for _ in ("key", "value")]
    return (
        torch.zeros(1, rows, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        torch.arange(rows),
        torch.ones(rows, rows, dtype=torch.bool).tril(),
        torch.arange(rows - 2, rows),
        [torch.zeros(1, c.heads, capacity, c.size, dtype=dtype) for c in caches],
    )


def _dynamic_shapes(caches: int) -> tuple[Any, ...]:
    rows = torch.export.Dim("T", min=2)
    wanted = torch.export.Dim("R", min=1)
    capacity = torch.export.Dim("C", min=8)
    return ({1: rows}, None, {0: rows}, {0: rows, 1: rows}, {0: wanted}, [{2: capacity}] * caches)


class _Probe(StaticCaches):
    """Records the head count and size of every cache while the model runs on fake tensors."""

    def update(  # type: ignore[override]
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for offset, rows in enumerate((key, value)):
            self.present[2 * layer_idx + offset] = rows
        return key, value


def probe_layers(wrapper: StaticDecoder, dtype: torch.dtype) -> list[LayerCache]:
    """Run the model once on fake tensors to see what every layer caches."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        ids, kv_len, depth, tree_mask, rows, _ = _example([], dtype, 2, 2)
        probe = _Probe([torch.empty(1, 1, 2, 1)], kv_len)
        wrapper._rows = rows
        masks = PassMasks(kv_len, depth, tree_mask, 2)
        with attending(masks):
            wrapper.model(
                input_ids=ids,
                attention_mask=masks[None],
                position_ids=depth[None],
                use_cache=True,
                **{wrapper._cache_argument: probe},
            )
    layers, ordered = len(masks.asked), sorted(probe.present)
    if ordered != list(range(2 * layers)) or not layers:
        raise UnsupportedModel(
            f"{wrapper.model.config.model_type}: some layers keep no key/value cache "
            "(recurrent or shared state is not supported)"
        )
    keys = [probe.present[2 * layer] for layer in range(layers)]
    windows = masks.asked
    return [LayerCache(k.shape[1], k.shape[3], w) for k, w in zip(keys, windows, strict=True)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import logging

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

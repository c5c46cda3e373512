"""Trace a decoder-only transformers model to a static-cache graph.

The model's own code runs unchanged. Three things are put into it from outside: an attention
function and a cache whose writes are custom operators (they become ONNX `Attention` and
`TensorScatter`), and a hook that gathers the rows that need logits in front of the head.

Knows nothing of weights: the parameters it traces are uninitialised memory that is never touched,
and become initializers that carry their parameter name. Values are attached by `weights`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir
import torch
from onnxscript import FLOAT
from onnxscript.onnx_opset import opset24 as op
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.initialization import no_init_weights
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from spec_export.engines.errors import ExportError, UnsupportedModel

ATTENTION = "spec_export"
OPSET = 24
_TRACE_ROWS = 5
_TRACE_CAPACITY = 64


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


_TRANSLATIONS: dict[Any, Any] = {
    torch.ops.spec_export.cache_write.default: _cache_write_onnx,
    torch.ops.spec_export.attend.default: _attend_onnx,
}


# --- what is put into the model ----------------------------------------------------------------


class _Caches(Cache):
    """A transformers cache over static buffers: `update` writes rows at `kv_len`."""

    def __init__(self, buffers: list[torch.Tensor], kv_len: torch.Tensor) -> None:
        self.layers = []
        self.buffers, self.kv_len = buffers, kv_len
        self.present: dict[int, torch.Tensor] = {}

    def update(  # type: ignore[override]
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for offset, rows in enumerate((key, value)):
            index = 2 * layer_idx + offset
            self.present[index] = _cache_write(self.buffers[index], rows, self.kv_len)
        return self.present[2 * layer_idx], self.present[2 * layer_idx + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.buffers[0].shape[2], 0

    @property
    def is_compileable(self) -> bool:
        return True


class _Masks:
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


_ACTIVE: list[_Masks] = []


def _pass_mask_through(*_: Any, attention_mask: Any = None, **__: Any) -> Any:
    return attention_mask


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _pass_mask_through)


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
        masks = _Masks(kv_len, depth, tree_mask, caches[0].shape[2])
        cache = _Caches(caches, kv_len)
        self._rows = logit_rows
        position_ids = (kv_len + depth).clamp(max=self.max_position - 1)[None]
        _ACTIVE.append(masks)
        try:
            output = self.model(
                # A draft may be fed ids of a larger target vocabulary; it has no row for them.
                input_ids=input_ids.clamp(0, self._last_id),
                attention_mask=masks[None],
                position_ids=position_ids,
                use_cache=True,
                **{self._cache_argument: cache},
            )
        finally:
            _ACTIVE.pop()
        logits = output.logits.to(torch.float32)
        return (logits, *(cache.present[i] for i in range(len(caches))))


# --- tracing -----------------------------------------------------------------------------------


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


def build_skeleton(
    config: PretrainedConfig, dtype: torch.dtype, attention: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Make the model without initialising a single weight (the memory is never touched)."""
    config = copy.deepcopy(config)
    with no_init_weights():
        make: Any = AutoModelForCausalLM.from_config
        model = make(
            config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def embedding_rows(model: PreTrainedModel) -> int:
    """Ids the model has an embedding for."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def output_head(model: PreTrainedModel) -> torch.nn.Module:
    """The module that turns hidden rows into logits."""
    find: Any = model.get_output_embeddings
    head = find()
    if head is None:
        raise UnsupportedModel(f"{type(model).__name__} has no language-model head")
    return cast(torch.nn.Module, head)


def cache_argument(model: PreTrainedModel) -> str:
    """What the installed transformers calls the cache in `forward`."""
    accepted = inspect.signature(model.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def max_position(config: PretrainedConfig) -> int:
    """Positions the model was made for; `UnsupportedModel` when the configuration has none."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 2:
        raise UnsupportedModel(
            f"{config.model_type}: the configuration has no max_position_embeddings, so the "
            "context length is unknown"
        )
    return found


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
                custom_translation_table=_TRANSLATIONS,
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


class _Probe(_Caches):
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
        masks = _Masks(kv_len, depth, tree_mask, 2)
        _ACTIVE.append(masks)
        try:
            wrapper.model(
                input_ids=ids,
                attention_mask=masks[None],
                position_ids=depth[None],
                use_cache=True,
                **{wrapper._cache_argument: probe},
            )
        finally:
            _ACTIVE.pop()
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

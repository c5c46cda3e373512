"""A transformers model without weights, and what its code says of itself."""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from spec_export.engines.errors import UnsupportedModel


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

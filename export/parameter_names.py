"""Find each parameter of a transformers model among the tensors of a checkpoint, by its own rules.

Transformers renames (a missing or extra base-model prefix, old names) and converts (the experts of
a layer into one tensor) while it loads. The rules are taken from the model class and applied here
one parameter at a time, so that nothing is read before everything is known to be there.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from spec_export.engines.errors import CheckpointError, UnsupportedModel
from spec_export.export.weight_source import Shape, check_shapes

_FLOATS = tuple(np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
_NEVER_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")
_Read = Callable[[str], torch.Tensor]


@dataclass
class _Conversion:
    """One application of a transformers converter: several stored tensors into one or several."""

    converter: WeightConverter
    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)  # (pattern, stored name)

    def run(self, read: _Read, config: PretrainedConfig) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            later = cast(Any, functools.partial(read, name))
            converter.add_tensor(self.target, name, pattern, later)
        converted = converter.convert(self.target, config=config)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


@dataclass(frozen=True)
class _Recipes:
    """How every parameter is made: a stored name, or the conversion that yields it."""

    direct: dict[str, str]
    converted: dict[str, _Conversion]
    unused: tuple[str, ...]


class MappedWeights:
    """A `WeightSource` over mapped tensors; those a converter makes are new arrays."""

    def __init__(
        self,
        stored: Mapping[str, np.ndarray],
        recipes: _Recipes,
        shapes: Mapping[str, Shape],
        config: PretrainedConfig,
    ) -> None:
        self.unused = recipes.unused
        self._stored, self._recipes = stored, recipes
        self._shapes, self._config = shapes, config

    def read(self, name: str) -> np.ndarray:
        """See `WeightSource.read`."""
        direct = self._recipes.direct.get(name)
        if direct is not None:
            return self._stored[direct]
        converted = self._recipes.converted[name].run(self._tensor, self._config)[name]
        if converted.dtype == torch.bfloat16:
            return converted.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return converted.numpy()

    def nbytes_largest(self) -> int:
        """See `WeightSource.nbytes_largest`."""
        return max((self._nbytes(name, shape) for name, shape in self._shapes.items()), default=0)

    def _nbytes(self, name: str, shape: Shape) -> int:
        direct = self._recipes.direct.get(name)
        stored = direct or self._recipes.converted[name].sources[0][1]
        return int(np.prod(shape)) * self._stored[stored].dtype.itemsize

    def _tensor(self, name: str) -> torch.Tensor:
        value = np.array(self._stored[name])  # torch refuses read-only memory
        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(value)


def resolve_parameters(
    stored: Mapping[str, np.ndarray],
    config: PretrainedConfig,
    parameter_shapes: Mapping[str, Shape],
    where: str,
    trust_remote_code: bool = False,
) -> MappedWeights:
    """Match stored tensors to parameters by the rules of the model class; reads no weight.

    Args:
        stored: mapped tensors by their names in the checkpoint.
        config: of the model.
        parameter_shapes: shape of every parameter that will be read.
        where: the checkpoint, for messages.
        trust_remote_code: whether the class of the model may come from the checkpoint.

    Raises:
        CheckpointError: a parameter is missing or has another shape.
        UnsupportedModel: a parameter is not stored as floating point.
    """
    model = _on_meta(config, trust_remote_code)
    recipes = _recipes(stored, model)
    _follow_ties(recipes, model)
    check_shapes(parameter_shapes, _shapes(recipes, stored, config), where)
    _check_dtypes(recipes, stored, parameter_shapes, where)
    return MappedWeights(stored, recipes, parameter_shapes, config)


def _on_meta(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """The model without a byte of weights: it knows its prefix, its ties and its conversions."""
    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM).from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code
        )
    return cast(PreTrainedModel, model)


def _recipes(stored: Mapping[str, np.ndarray], model: PreTrainedModel) -> _Recipes:
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    expected = model.state_dict()
    direct: dict[str, str] = {}
    converted: dict[str, _Conversion] = {}
    unused = []
    for name in sorted(stored, key=dot_natural_key):  # experts join in this order
        target, pattern = _renamed(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected:
            unused.append(name)
        elif pattern is None:
            direct[target] = name
        else:
            conversion = converted.setdefault(target, _Conversion(by_pattern[pattern], target))
            conversion.sources.append((pattern, name))
    return _Recipes(direct, converted, _without_ignored(unused, model))


def _renamed(
    name: str,
    renamings: list[WeightRenaming],
    converters: list[WeightConverter],
    prefix: str,
    expected: dict[str, Any],
) -> tuple[str, str | None]:
    target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
    if target not in expected and name in expected:  # renamed away from what it already was
        return rename_source_key(name, [], [], prefix, expected)
    return target, pattern


def _without_ignored(names: Iterable[str], model: PreTrainedModel) -> tuple[str, ...]:
    """Leave out what the class itself declares no weight: rotary tables, causal masks."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [re.compile(pattern) for pattern in patterns]
    return tuple(
        name
        for name in names
        if not _NEVER_WEIGHTS.search(name) and not any(rule.search(name) for rule in ignored)
    )


def _follow_ties(recipes: _Recipes, model: PreTrainedModel) -> None:
    """Where two parameters are one, the checkpoint may hold it under either name."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    if isinstance(ties, dict):
        for one, other in ties.items():
            found = recipes.direct.get(one) or recipes.direct.get(other)
            if found is not None:
                recipes.direct.setdefault(one, found)
                recipes.direct.setdefault(other, found)


def _shapes(
    recipes: _Recipes, stored: Mapping[str, np.ndarray], config: PretrainedConfig
) -> dict[str, Shape]:
    """The shape every parameter would have; conversions are run on tensors without data."""

    def dataless(name: str) -> torch.Tensor:
        return torch.empty(stored[name].shape, device="meta")

    shapes: dict[str, Shape] = {}
    for conversion in list(recipes.converted.values()):
        try:
            made = conversion.run(dataless, config)
        except Exception as error:
            raise CheckpointError(
                f"the tensors of {conversion.target} do not fit together: {error}"
            ) from error
        for name, value in made.items():
            recipes.converted[name] = conversion
            shapes[name] = tuple(value.shape)
    return shapes | {name: stored[source].shape for name, source in recipes.direct.items()}


def _check_dtypes(
    recipes: _Recipes,
    stored: Mapping[str, np.ndarray],
    parameter_shapes: Mapping[str, Shape],
    where: str,
) -> None:
    for name in parameter_shapes:
        direct = recipes.direct.get(name)
        sources = [direct] if direct else [s for _, s in recipes.converted[name].sources]
        for source in sources:
            if stored[source].dtype not in _FLOATS:
                raise UnsupportedModel(
                    f"{where}: {source} is stored as {stored[source].dtype}; only float32, "
                    "float16, bfloat16 and float64 weights are read. Export the unquantized "
                    "checkpoint"
                )

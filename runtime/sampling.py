"""How tokens are drawn: what a request may ask for, and which sampling graphs serve it.

Which graphs a request needs is chosen once, on the host, from what is on and never from what a
round holds; values are inputs of the graphs. What is off is not in the graphs.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from spec_export.engines.errors import RequestError
from spec_export.engines.graphs import (
    BIAS_SLOTS,
    END_SLOTS,
    LISTED,
    NGRAM_LIMIT,
    TOP_LOGPROBS,
    Filters,
    WeighingKey,
)
from spec_export.engines.manifest import Manifest
from spec_export.runtime.noise import Noise

Rule = Literal["reject", "block", "invariant"]
DraftSampling = Literal["probabilistic", "greedy"]
Choice = Literal["greedy", "edited", "drawn"]

COLDEST = 1e-6  # below it logits divided by the temperature may leave float32
_HIGHEST_SEED = 1 << 63  # of the ones drawn here: short enough to read and to type


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a text are drawn.

    What is given is copied. All of it acts on the target and, so that drafts stay good ones, on the
    draft. At temperature 0 the filters have nothing to do (`typical_p` alone could remove the most
    probable token, and is refused).

    Attributes:
        temperature: 0 takes the most probable token, the first of equals.
        seed: of all randomness, 0 or more; None draws one, which can be read here.
        rule: how drafts are accepted, above temperature 0. `invariant`: on an exact bundle the same
            text for any draft, any gamma and none; `reject`: more drafts stay; `block`: more again,
            where the draft is a model that draws. None: `invariant` with a seed, else `reject`.
        draft: whether a drafting model draws its tokens (`probabilistic`) or takes the best one.
        top_k: keep the k most probable tokens and their equals; 0: all.
        top_p: keep the most probable tokens that together have this share; 1: all.
        min_p: keep tokens with at least this share of the best one's probability; 0: all.
        typical_p: keep the most typical tokens that together have this share; 1: all.
        repetition_penalty: divides the logits of seen tokens, prompt included; 1: off.
        presence_penalty: taken off the logits of tokens in the output.
        frequency_penalty: taken off for each time a token is in the output.
        no_repeat_ngram: no n-gram of this length comes twice, prompt included; 0: off.
        logit_bias: added to logits, by id; -inf forbids.
        allowed_tokens: ids that may come; None: all.
        banned_tokens: ids that may not.
        min_tokens: end tokens may not come before this many others.
        top_logprobs: how many of the most probable tokens are reported for each one.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 0.0
    seed: int | None = None
    rule: Rule | None = None
    draft: DraftSampling = "probabilistic"
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: Collection[int] | None = None
    banned_tokens: Collection[int] = ()
    min_tokens: int = 0
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("allowed_tokens", "banned_tokens"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        _check_values(self)
        given = self.seed is not None
        seed = self.seed if self.seed is not None else secrets.randbelow(_HIGHEST_SEED)
        Noise(seed)
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "rule", self.rule or ("invariant" if given else "reject"))

    def sample(self, index: int) -> Sampling:
        """The same for the `index`-th of several samples of one prompt, with a seed of its own.

        Raises:
            RequestError: `index` is negative.
        """
        _within("sample", index, 0, math.inf, whole=True)
        if index == 0:
            return self
        assert self.seed is not None
        made = np.random.SeedSequence(self.seed, spawn_key=(index,)).generate_state(2, np.uint32)
        return replace(self, seed=(int(made[0]) << 31 | int(made[1]) >> 1))

    @property
    def has_edits(self) -> bool:
        """Whether logits change with the text or by a bias."""
        neutral = (1.0, 0.0, 0.0, 0, 0)
        return bool(self.logit_bias) or neutral != (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.no_repeat_ngram,
            self.min_tokens,
        )

    @property
    def has_mask(self) -> bool:
        """Whether only some tokens may come."""
        return self.allowed_tokens is not None or bool(self.banned_tokens)


@dataclass(frozen=True)
class Plan:
    """The graphs that serve a request; requests with one plan share them.

    Attributes:
        accept: the graph that judges a round, without `accept_`.
        chooses: how the target's own tokens are chosen.
        proposes: how a drafting model's tokens are chosen; None where no model drafts.
        edits: whether logits are edited.
        mask: whether rows have a mask.
        follows: whether masks follow the text, drafts included, as those of a grammar do.
        filters: the filters' graphs in the order they are tried; the last one always serves. Empty
            without filters.
        lists_logprobs: whether the most probable tokens are reported.
    """

    accept: str = "greedy"
    chooses: Choice = "greedy"
    proposes: Choice | None = None
    edits: bool = False
    mask: bool = False
    follows: bool = False
    filters: tuple[Filters, ...] = ()
    lists_logprobs: bool = False

    @property
    def is_positional(self) -> bool:
        """Whether noise belongs to positions of the text."""
        return self.accept == "invariant"

    def weighing(self, chooses: Choice, model: Literal["target", "draft"]) -> WeighingKey | None:
        """The graph between raw logits and a choice, or filters; None where logits will do."""
        if chooses == "greedy":
            return None
        return WeighingKey(model, chooses == "drawn", self.edits, self.mask)


def plan_for(sampling: Sampling, manifest: Manifest, *, is_constrained: bool = False) -> Plan:
    """Choose the graphs for a request.

    Args:
        sampling: what is asked for.
        manifest: of the bundle.
        is_constrained: masks come from a grammar as well.

    Raises:
        RequestError: it does not fit the bundle.
    """
    _check_ids(sampling, manifest)
    edits, mask = sampling.has_edits, sampling.has_mask or is_constrained
    drafts = manifest.method == "model"
    best: Choice = "edited" if edits or mask else "greedy"
    is_drawn = sampling.temperature > 0
    is_dense = is_drawn and drafts and sampling.draft == "probabilistic"
    accept: str = best
    if is_drawn and sampling.rule == "invariant":
        accept = "invariant"
    elif is_drawn:
        accept = "one_hot" if not is_dense else "block" if sampling.rule == "block" else "dense"
    return Plan(
        accept=accept,
        chooses="drawn" if is_drawn else best,
        proposes=("drawn" if is_dense else best) if drafts else None,
        edits=edits,
        mask=mask,
        follows=is_constrained,
        filters=_filters(sampling, manifest) if is_drawn else (),
        lists_logprobs=sampling.top_logprobs > 0,
    )


def served_rule(sampling: Sampling, manifest: Manifest) -> Rule | None:
    """The rule that judges drafts: None at temperature 0, `reject` where `block` cannot be."""
    if sampling.temperature == 0:
        return None
    is_refused = sampling.rule == "block" and plan_for(sampling, manifest).accept != "block"
    return "reject" if is_refused else sampling.rule


def remarks(sampling: Sampling, manifest: Manifest, exactness: str) -> tuple[str, ...]:
    """What of a request is served in another way than asked for, in words."""
    found = []
    if sampling.temperature > 0 and manifest.method != "none":
        if served_rule(sampling, manifest) != sampling.rule:
            found.append("rule block needs a draft that draws its tokens: rule reject is used")
        if sampling.rule == "invariant" and exactness not in ("width_invariant", "row_invariant"):
            found.append(
                f"rule invariant on an engine whose exactness is {exactness}: the text may depend "
                "on drafts and gamma"
            )
    return tuple(found)


def _filters(sampling: Sampling, manifest: Manifest) -> tuple[Filters, ...]:
    top_k = sampling.top_k if sampling.top_k < manifest.models["target"].vocabulary else 0
    wanted: tuple[Filters, ...] = ()
    if sampling.typical_p < 1:
        wanted = ("typical",)
    elif top_k >= LISTED:  # the list holds one more than it is to find
        wanted = ("any",)
    elif top_k:
        wanted = ("top", "any")
    elif sampling.top_p < 1:
        wanted = ("top", "nucleus", "any")
    elif sampling.min_p > 0:
        wanted = ("top", "any")
    # TensorRT's bundles hold the filters that serve anything, not the quick ones before them.
    return tuple(f for f in wanted if f"filter_{f}.1" in manifest.sampling or f == wanted[-1])


def _biases(given: Any) -> dict[int, float]:
    try:
        return {operator.index(token): float(bias) for token, bias in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(f"logit_bias={given!r:.99}: it has a number for each id") from error


def _token_ids(name: str, given: Any) -> frozenset[int] | None:
    if given is None and name == "allowed_tokens":
        return None
    try:
        return frozenset(operator.index(token) for token in given)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}={given!r:.99}: it is a collection of ids") from error


def _check_values(s: Sampling) -> None:
    """Refuse what no bundle can serve."""
    _within("temperature", s.temperature, 0, 1e4)
    if 0 < s.temperature < COLDEST:
        raise RequestError(f"temperature={s.temperature}: it is 0, or {COLDEST:g} to 10000")
    _within("top_k", s.top_k, 0, 1 << 31, whole=True)
    _within("top_p", s.top_p, 0, 1)
    _within("min_p", s.min_p, 0, 1)
    _within("typical_p", s.typical_p, 0, 1)
    _within("repetition_penalty", s.repetition_penalty, 0.01, 100)
    _within("presence_penalty", s.presence_penalty, -100, 100)
    _within("frequency_penalty", s.frequency_penalty, -100, 100)
    _within("no_repeat_ngram", s.no_repeat_ngram, 0, NGRAM_LIMIT, whole=True)
    _within("min_tokens", s.min_tokens, 0, 1 << 31, whole=True)
    _within("top_logprobs", s.top_logprobs, 0, TOP_LOGPROBS, whole=True)
    _one_of("rule", s.rule, (None, "reject", "block", "invariant"))
    _one_of("draft", s.draft, ("probabilistic", "greedy"))
    if s.temperature == 0 and s.typical_p < 1:
        raise RequestError(
            f"typical_p={s.typical_p} at temperature 0, where the most probable token is taken; "
            "leave it out, or give a temperature"
        )
    if len(s.logit_bias) > BIAS_SLOTS:
        raise RequestError(
            f"logit_bias has {len(s.logit_bias)} tokens; {BIAS_SLOTS} at most. banned_tokens and "
            "allowed_tokens take any number"
        )
    for token, bias in s.logit_bias.items():
        if math.isnan(bias) or bias > 100 or -math.inf < bias < -100:
            raise RequestError(f"logit_bias={bias} for token {token}: it is -100 to 100, or -inf")


def _check_ids(s: Sampling, manifest: Manifest) -> None:
    """Refuse ids that the target does not have, and ends that no graph can hold."""
    vocabulary, ends = manifest.models["target"].vocabulary, manifest.text.end_ids
    named = {
        "logit_bias": s.logit_bias,
        "allowed_tokens": s.allowed_tokens or (),
        "banned_tokens": s.banned_tokens,
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocabulary:
                raise RequestError(
                    f"{name} has {token}; the target's ids are 0 to {vocabulary - 1}"
                )
    if s.min_tokens and len(ends) > END_SLOTS:
        raise RequestError(
            f"min_tokens={s.min_tokens}, but this model has {len(ends)} end tokens and {END_SLOTS} "
            "can be held back; ban them, or leave it out"
        )
    if s.allowed_tokens is not None and not set(s.allowed_tokens) - set(s.banned_tokens):
        raise RequestError("no token is left: every one of allowed_tokens is banned")


def _within(name: str, value: float, low: float, high: float, *, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise RequestError(f"{name}={value!r}: it is {'a whole number, ' * whole}{low} to {high:g}")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        words = ", ".join(str(word) for word in allowed if word is not None)
        raise RequestError(f"{name}={value!r}: it is one of {words}")

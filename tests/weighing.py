"""Edits and filters as they are defined, in plain loops and sorts: what the graphs must compute.

Filters take the float32 distribution and count its mass in whole units of 2^-50, as the graphs
state; nothing else is taken from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]


@dataclass(frozen=True)
class Edits:
    """Values of a request, off unless given."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    ngram: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    end_ids: Sequence[int] = ()
    end_from: int = 0


def edited(
    logits: NDArray, prompt: Sequence[int], output: Sequence[int], edits: Edits
) -> NDArray[np.float64]:
    """One row after `prompt` and `output`."""
    row = logits.astype(np.float64)
    for token, value in edits.bias.items():
        row[token] += value
    text = [*prompt, *output]
    for token in set(text):
        row[token] = (
            row[token] / edits.repetition if row[token] > 0 else row[token] * edits.repetition
        )
    for token in set(output):
        row[token] -= edits.presence + edits.frequency * output.count(token)
    for token in repeated(text, edits.ngram):
        row[token] = -np.inf
    if len(text) < edits.end_from:
        row[list(edits.end_ids)] = -np.inf
    return row


def repeated(text: Sequence[int], n: int) -> set[int]:
    """Tokens that would complete an n-gram of the text once more."""
    if n == 0 or len(text) < n:
        return set()
    last = tuple(text[len(text) - n + 1 :])
    return {text[i + n - 1] for i in range(len(text) - n + 1) if tuple(text[i : i + n - 1]) == last}


@dataclass(frozen=True)
class Filters:
    """Values of a request, off unless given."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


def filtered(p: Row, filters: Filters) -> Row:
    """One float32 distribution with what is kept, scaled to one."""
    p = scaled(p, p >= max(thresholds(p, filters)))
    typical_p = int(np.float32(filters.typical_p) * 2**24)
    if typical_p == 2**24:
        return p
    close = closeness(p)
    t = noticed(cut(close, p, -(-typical_p * int(units(p).sum()) // 2**24)))
    return scaled(p, close >= t)


def thresholds(p: Row, filters: Filters) -> tuple[np.float32, np.float32, np.float32]:
    """Of top-k, top-p and min-p; 0 keeps everything."""
    t_k = t_p = np.float32(0)
    whole, top_p = 2**50, int(np.float32(filters.top_p) * 2**24)
    if filters.top_k:
        t_k = noticed(np.sort(p)[-min(filters.top_k, len(p))])
        whole = int(units(p)[p >= t_k].sum())
    if top_p < 2**24:
        t_p = noticed(cut(p, p, -(-top_p * whole // 2**24)))
    return t_k, t_p, noticed(np.float32(filters.min_p) * p.max())


def cut(score: Row, p: Row, needed: int) -> np.float32:
    """The largest score whose tokens, with all of a larger one, have enough mass; 0: none has."""
    order = np.argsort(-score, kind="stable")
    score, mass = score[order], np.cumsum(units(p)[order])
    last_of_its_value = np.append(score[1:] != score[:-1], True)
    enough = score[last_of_its_value & (mass >= max(1, needed))]
    return enough[0] if len(enough) else np.float32(0)


def noticed(threshold: np.float32) -> np.float32:
    return threshold if threshold > 2**-63 else np.float32(0)


def closeness(p: Row) -> Row:
    """How near each token's surprise is to the entropy, 1 at most."""
    surprise = -np.log(np.maximum(p, np.float32(2**-126)))
    entropy = np.float32(np.floor(p * surprise * np.float32(2**40)).astype(np.int64).sum())
    distance = np.abs(surprise - entropy * np.float32(2**-40))
    return np.where(p > 0, np.exp(-distance), 0).astype(np.float32)


def units(p: Row) -> NDArray[np.int64]:
    return np.floor(p * np.float32(2**50)).astype(np.int64)


def scaled(p: Row, keep: NDArray[np.bool_]) -> Row:
    mass = np.float32(units(p)[keep].sum()) * np.float32(2**-50)
    return np.where(keep, p / mass, np.float32(0)).astype(np.float32)

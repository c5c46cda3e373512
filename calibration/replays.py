"""How many target passes texts take with a number of drafts a round, without decoding them so.

Of a drafting model it is known at each token with what chance a draft there is accepted; the chance
that a round begins at a token follows from those before it. Look-up is run along the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_export.runtime.ngram import NgramIndex

_FOR_ALPHA = 4  # drafts a round; how many hardly changes what share is accepted


@dataclass(frozen=True)
class Counted:
    """Passes of texts with some number of drafts a round.

    Attributes:
        tokens: after the first of each text.
        passes: by the drafts they verify; counts are expectations.
    """

    tokens: float
    passes: Mapping[int, float]


@dataclass(frozen=True)
class Passes:
    """Counts passes for any gamma.

    Attributes:
        alpha: share of reached drafts that are accepted; None where none was reached.
        count: by gamma.
    """

    alpha: float | None
    count: Callable[[int], Counted]


def passes_along(betas: Sequence[np.ndarray]) -> Passes:
    """Passes with a drafting model.

    Args:
        betas: of each text, the chance that a draft of each token would be accepted.
    """
    every = np.concatenate(betas) if betas else np.empty(0)

    def count(gamma: int) -> Counted:
        if gamma == 0:
            return Counted(len(every), {0: float(len(every))})
        return Counted(len(every), {gamma: sum(_rounds(beta, gamma) for beta in betas)})

    return Passes(float(every.mean()) if len(every) else None, count)


def _rounds(beta: np.ndarray, gamma: int) -> float:
    """Expected rounds of a text: the sum over tokens of the chance that one begins there."""
    begins = np.zeros(len(beta) + gamma + 1)
    begins[0] = 1.0
    for at in range(len(beta)):
        reached = begins[at]
        for place in range(gamma):
            chance = beta[at + place] if at + place < len(beta) else 1.0
            begins[at + place + 1] += reached * (1 - chance)
            reached *= chance
        begins[at + gamma + 1] += reached
    return float(begins[: len(beta)].sum())


def passes_of_lookup(texts: Sequence[tuple[Sequence[int], int]]) -> Passes:
    """Passes with look-up.

    Args:
        texts: ids of each, and how many of them are the prompt.
    """
    found: dict[int, tuple[Counted, int, int]] = {}

    def walked(gamma: int) -> tuple[Counted, int, int]:
        if gamma not in found:
            found[gamma] = _walk(texts, gamma)
        return found[gamma]

    _, accepted, tested = walked(_FOR_ALPHA)
    return Passes(accepted / tested if tested else None, lambda gamma: walked(gamma)[0])


def _walk(texts: Sequence[tuple[Sequence[int], int]], gamma: int) -> tuple[Counted, int, int]:
    """Rounds along texts; with them drafts that were accepted, and that were tested."""
    passes: Counter[int] = Counter()
    tokens = accepted = tested = 0
    for text, prompt in texts:
        index = NgramIndex()
        for token in text[: prompt + 1]:
            index.append(token)
        at = prompt + 1
        while at < len(text):
            drafts = index.continuation(gamma) if gamma else []
            kept = 0
            while kept < len(drafts) and at + kept < len(text) and drafts[kept] == text[at + kept]:
                kept += 1
            is_cut = at + kept >= len(text)
            accepted += kept
            tested += kept + (kept < len(drafts) and not is_cut)
            passes[len(drafts)] += 1
            for token in text[at : at + kept + 1]:
                index.append(token)
            tokens += min(kept + 1, len(text) - at)
            at += kept + 1
    return Counted(tokens, dict(passes)), accepted, tested

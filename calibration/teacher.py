"""Beta: how alike the two models' distributions are along a text, whatever rounds did.

Both models read the text that was decoded, and at each token beta = sum of min(p, q) is what a
draft drawn there would have been accepted with (arXiv 2211.17192, Corollary 3.6; section 4.2 takes
alpha so). It shares nothing with the rounds but the engines, and cross-checks them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_export.calibration.acceptance import overlap
from spec_export.engines.passes import PassRunner
from spec_export.runtime import OpenedBundle


class Teacher:
    """Runs both models of a bundle over given texts, with caches of its own.

    Args:
        opened: a bundle with a drafting model.
        temperature: of both distributions; 0 puts all on the most probable token.
    """

    def __init__(self, opened: OpenedBundle, temperature: float) -> None:
        assert opened.draft is not None
        models = opened.manifest.models
        self._target = PassRunner(opened.device, opened.target, models["target"])
        self._draft = PassRunner(opened.device, opened.draft, models["draft"])
        self._vocabulary, self._temperature = models["target"].vocabulary, temperature

    def beta(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """Beta at each token of a text.

        Args:
            tokens: ids, prompt included.
            start: the first token that counts, 1 at least.

        Returns:
            `[len(tokens) - start]` float64, or fewer where the draft has fewer positions.
        """
        assert start >= 1
        ids = np.asarray(tokens[: self._draft.spec.max_position], np.int64)
        p = logits_along(self._target, "verify", ids, start)
        q = in_vocabulary(logits_along(self._draft, "step", ids, start), self._vocabulary)
        return overlap(distributions(p, self._temperature), distributions(q, self._temperature))


def logits_along(runner: PassRunner, role: str, ids: np.ndarray, start: int) -> np.ndarray:
    """Logits that foretell tokens `start` and on of a text, by passes of a role.

    Args:
        runner: of the model; its caches are overwritten.
        role: with logits for every row.
        ids: of the text.
        start: 1 at least.

    Returns:
        `[len(ids) - start, V]` float32.
    """
    runner.prefill(ids[: start - 1])
    width = int(runner.spec.role(role).rows)
    found = [np.empty((0, runner.spec.vocabulary), np.float32)]
    for at in range(start - 1, len(ids) - 1, width):
        part = ids[at : min(at + width, len(ids) - 1)]
        found.append(runner.run(role, part, at, np.arange(width))[: len(part)])
    return np.concatenate(found)


def in_vocabulary(logits: np.ndarray, vocabulary: int) -> np.ndarray:
    """A draft's padding is never proposed, and what it does not know has no chance."""
    missing = max(0, vocabulary - logits.shape[1])
    padded = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
    return padded[:, :vocabulary]


def distributions(logits: np.ndarray, temperature: float) -> np.ndarray:
    """`[rows, V]` float64; at temperature 0 all is on the most probable token."""
    if temperature == 0:
        best = np.zeros(logits.shape)
        best[np.arange(len(logits)), logits.argmax(axis=1)] = 1
        return best
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))

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
        p = self._rows(self._target, "verify", ids, start)
        q = self._rows(self._draft, "step", ids, start)
        return overlap(self._distributions(p), self._distributions(q))

    def _rows(self, runner: PassRunner, role: str, ids: np.ndarray, start: int) -> np.ndarray:
        """Logits that foretell tokens `start` and on, in the target's vocabulary."""
        runner.prefill(ids[: start - 1])
        width = int(runner.spec.role(role).rows)
        found = [np.empty((0, runner.spec.vocabulary), np.float32)]
        for at in range(start - 1, len(ids) - 1, width):
            part = ids[at : min(at + width, len(ids) - 1)]
            found.append(runner.run(role, part, at, np.arange(width))[: len(part)])
        return self._in_vocabulary(np.concatenate(found))

    def _in_vocabulary(self, logits: np.ndarray) -> np.ndarray:
        """A draft's padding is never proposed, and what it does not know has no chance."""
        missing = max(0, self._vocabulary - logits.shape[1])
        padded = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return padded[:, : self._vocabulary]

    def _distributions(self, logits: np.ndarray) -> np.ndarray:
        if self._temperature == 0:
            best = np.zeros(logits.shape)
            best[np.arange(len(logits)), logits.argmax(axis=1)] = 1
            return best
        scaled = logits.astype(np.float64) / self._temperature
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

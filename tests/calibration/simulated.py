"""Evidence of a made-up device: known acceptance, known times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spec_export.calibration import evidence
from spec_export.calibration.evidence import TextEvidence, TimedRound
from spec_export.calibration.forecast import Widths


@dataclass(frozen=True)
class MadeUp:
    """A device and a pair; times in milliseconds.

    Attributes:
        alpha: of every draft that is reached.
        target: of a pass, by rows.
        step: of a draft's pass.
        host: of what else a round does.
        plain_host: of what else a plain step does.
        found: share of passes for which there are drafts, as with look-up.
        gammas: that verify passes were built for.
    """

    alpha: float
    target: dict[int, float]
    step: float = 0.0
    host: float = 0.0
    plain_host: float = 0.0
    found: float = 1.0
    gammas: tuple[int, ...] = (1, 2, 4)

    @property
    def widths(self) -> Widths:
        return Widths(self.gammas, plain_rows=2)

    def text(self, seed: int, tokens: int = 150, noise: float = 0.0) -> TextEvidence:
        """A text of so many tokens; times vary by `noise` of their size."""
        generator, gamma = np.random.default_rng(seed), self.gammas[-1]

        def jitter(ms: float) -> float:
            return float(ms * (1 + noise * generator.standard_normal()))

        def begun(wanted: int) -> TimedRound:
            n = wanted if generator.random() < self.found else 0
            accepted = int(np.cumprod(generator.random(n) < self.alpha).sum())
            rows = self.widths.rows(n) if n else 2
            rest = self.host if n else self.plain_host
            ms = n * self.step + self.target[rows] + rest
            return TimedRound(n, accepted, accepted + 1, jitter(ms))

        shorter = [begun(1 + i % (gamma - 1)) for i in range(tokens // 3)] if gamma > 1 else []
        parts = {evidence.target_pass(m): ms for m, ms in self.target.items()}
        parts |= {evidence.CATCH_UP: self.step, evidence.STEP: self.step} if self.step else {}
        return TextEvidence(
            category=("prose", "code")[seed % 2],
            rounds=tuple(begun(gamma) for _ in range(tokens)),
            shorter=tuple(shorter),
            plain_ms=tuple(jitter(self.target[1] + self.plain_host) for _ in range(30)),
            parts_ms={name: tuple(jitter(ms) for _ in range(4)) for name, ms in parts.items()},
        )

    def texts(self, count: int = 20, **changes: float) -> list[TextEvidence]:
        return [self.text(seed, **changes) for seed in range(count)]  # type: ignore[arg-type]

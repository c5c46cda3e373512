"""Drafts per round while a text is made: what pays, by what has been accepted so far.

Costs come from a measurement of the bundle on its device, acceptance from the rounds of the text.
A choice depends on finished rounds alone and never on what a round is about to draw, so the law of
the text is untouched; where texts do not depend on drafts at all, neither does the text.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 96  # rounds after which evidence counts for 1/e
_BELIEF = 16  # tested drafts that the measured acceptance counts for at the start
_GAIN = 1.03  # what another choice has to promise, lest noise moves it to and fro
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 512  # steps without drafts before they are tried again
_TRIAL = 6  # rounds with drafts in such a trial


@dataclass(frozen=True)
class GammaCosts:
    """What rounds cost on a device, and what to expect at first.

    Attributes:
        plain_ms: a token without drafts.
        round_ms: a round with 1, 2, .. drafts, all that belongs to it included.
        alpha: acceptance of a draft that was reached, as it was measured.
    """

    plain_ms: float
    round_ms: tuple[float, ...]
    alpha: float

    def speed(self, n: int, alpha: float) -> float:
        """Tokens per millisecond with `n` drafts a round.

        Source: arXiv 2211.17192, Equation 1, over a measured cost in place of `gamma c + 1`.
        """
        if n == 0:
            return 1 / self.plain_ms
        tokens = float(sum(alpha**i for i in range(n + 1)))
        return tokens / self.round_ms[n - 1]


class GammaChooser:
    """Chooses how many drafts the next round should have.

    Args:
        costs: of rounds; it has one for each number of drafts up to `most`.
        most: drafts at most.
    """

    def __init__(self, costs: GammaCosts, most: int) -> None:
        assert 1 <= most <= len(costs.round_ms)
        self._costs, self._most = costs, most
        self._accepted, self._tested = costs.alpha * _BELIEF, float(_BELIEF)
        self._pause, self._idle, self._trial = _SHORTEST_PAUSE, 0, 0
        self._n = self._best(0)

    @property
    def n(self) -> int:
        """Drafts to ask for; 0: none pay."""
        return self._n

    @property
    def alpha(self) -> float:
        """Acceptance as it is estimated now."""
        return self._accepted / self._tested

    def count(self, n_draft: int, n_accepted: int, *, is_cut: bool) -> None:
        """Take in a finished round.

        Args:
            n_draft: drafts it had.
            n_accepted: of them, accepted.
            is_cut: a stop hid what became of the rest.
        """
        if n_draft and not is_cut:
            self._learn(n_accepted, n_accepted + (n_accepted < n_draft))
            self._n = self._after_round()
        elif self._n == 0:
            self._n = self._after_step()

    def _learn(self, accepted: int, tested: int) -> None:
        kept = 1 - 1 / _MEMORY
        self._accepted = self._accepted * kept + accepted
        self._tested = self._tested * kept + tested

    def _after_round(self) -> int:
        if self._trial:
            self._trial -= 1
            if self._trial:
                return self._n
            found = self._best(0)
            self._pause = _SHORTEST_PAUSE if found else min(2 * self._pause, _LONGEST_PAUSE)
            return found
        return self._best(self._n)

    def _after_step(self) -> int:
        """Try drafts again after a while: the text may have become easier."""
        self._idle += 1
        if self._idle < self._pause:
            return 0
        self._idle, self._trial = 0, _TRIAL
        self._accepted, self._tested = self._accepted / 4, self._tested / 4  # that was another text
        return max(range(1, self._most + 1), key=lambda n: self._costs.speed(n, self.alpha))

    def _best(self, now: int) -> int:
        """The fastest, or the present choice where nothing is clearly faster."""
        speeds = [self._costs.speed(n, self.alpha) for n in range(self._most + 1)]
        found = max(range(self._most + 1), key=speeds.__getitem__)
        return found if speeds[found] > speeds[now] * _GAIN else now

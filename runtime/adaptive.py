"""Drafts per round while a text is made: what pays, by what has been accepted so far.

Costs come from a measurement of the bundle on its device, acceptance from the rounds of the text.
A choice depends on finished rounds alone and never on what a round is about to draw, so the law of
the text is untouched; where texts do not depend on drafts at all, neither does the text.

Where rounds stop drafting early, how many drafts one has goes with how good they are. So it is
estimated apart how long rounds get, which they cost, and how often another draft is made *and*
accepted after one that was.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 96  # rounds after which evidence counts for 1/e
_BELIEF = 16  # tested drafts that the measured acceptance counts for at the start
_GAIN = 1.03  # what another choice has to promise, lest noise moves it to and fro
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 512  # passes that teach nothing before others are tried
_TRIAL = 6  # rounds with drafts in such a trial


@dataclass(frozen=True)
class EarlyExit:
    """What to expect of rounds that stop drafting early, as it was measured.

    Attributes:
        confidence: below which it pays to stop; 0: it does not.
        goes_on: chance that another draft is made after one.
        later: chance that another is made and accepted after one that was accepted.
    """

    confidence: float
    goes_on: float
    later: float


@dataclass(frozen=True)
class GammaCosts:
    """What rounds cost on a device, and what to expect at first.

    Attributes:
        plain_ms: a token without drafts.
        round_ms: a round with 1, 2, .. drafts, all that belongs to it included.
        alpha: acceptance of a draft that was reached, as it was measured.
        early: of rounds that stop drafting early; None where it was not measured.
    """

    plain_ms: float
    round_ms: tuple[float, ...]
    alpha: float
    early: EarlyExit | None = None

    @property
    def draft_confidence(self) -> float:
        """Below which it pays to stop drafting; 0: it does not."""
        return 0.0 if self.early is None else self.early.confidence

    def speed(
        self, n: int, alpha: float, later: float | None = None, goes_on: float = 1.0
    ) -> float:
        """Tokens per millisecond with up to `n` drafts a round.

        Args:
            n: drafts asked for.
            alpha: acceptance of the first draft.
            later: chance that another is made and accepted after one that was; None: alpha.
            goes_on: chance that another is made after one.

        Source: arXiv 2211.17192, Equation 1, over a measured cost in place of `gamma c + 1`; where
        rounds stop early, over the mean cost of their lengths.
        """
        if n == 0:
            return 1 / self.plain_ms
        later = alpha if later is None else later
        tokens, spent, kept, reached = 1.0, 0.0, alpha, 1.0
        for i in range(1, n + 1):
            tokens, kept = tokens + kept, kept * later
            spent += self.round_ms[i - 1] * (reached if i == n else reached * (1 - goes_on))
            reached *= goes_on
        return tokens / spent


class _Share:
    """A share that is estimated while a text is made; older evidence fades."""

    def __init__(self, believed: float) -> None:
        self._hits, self._trials = believed * _BELIEF, float(_BELIEF)

    @property
    def value(self) -> float:
        return self._hits / self._trials

    def learn(self, hits: int, trials: int) -> None:
        kept = 1 - 1 / _MEMORY
        self._hits, self._trials = self._hits * kept + hits, self._trials * kept + trials

    def doubt(self) -> None:
        """What was seen was of another text."""
        self._hits, self._trials = self._hits / 4, self._trials / 4


class GammaChooser:
    """Chooses how many drafts the next round should have.

    Args:
        costs: of rounds; it has one for each number of drafts up to `most`.
        most: drafts at most.
        draft_confidence: below which rounds stop drafting; 0: none does.
    """

    def __init__(self, costs: GammaCosts, most: int, draft_confidence: float = 0.0) -> None:
        assert 1 <= most <= len(costs.round_ms)
        self._costs, self._most = costs, most
        self._first = self._later = _Share(costs.alpha)
        self._goes_on: _Share | None = None
        if draft_confidence:
            known = costs.early if costs.draft_confidence == draft_confidence else None
            self._later = _Share(costs.alpha if known is None else known.later)
            self._goes_on = _Share(1.0 if known is None else known.goes_on)
        self._pause, self._idle, self._trial = _SHORTEST_PAUSE, 0, 0
        self._before_trial = 0
        self._n = self._best(0)

    @property
    def n(self) -> int:
        """Drafts to ask for; 0: none pay."""
        return self._n

    @property
    def alpha(self) -> float:
        """Acceptance as it is estimated now; of first drafts, where rounds stop early."""
        return self._first.value

    @property
    def goes_on(self) -> float:
        """Chance that another draft is made after one; 1 where rounds do not stop early."""
        return 1.0 if self._goes_on is None else self._goes_on.value

    def count(self, n_draft: int, n_accepted: int, *, is_cut: bool, is_early: bool = False) -> None:
        """Take in a finished round.

        Args:
            n_draft: drafts it had.
            n_accepted: of them, accepted.
            is_cut: a stop hid what became of the rest.
            is_early: it stopped drafting before another, which is no rejection.
        """
        if n_draft and not is_cut:
            self._learn(n_draft, n_accepted, is_early)
            self._n = self._after_round()
        elif self._n == 0:
            self._n = self._wait()

    def _learn(self, n_draft: int, n_accepted: int, is_early: bool) -> None:
        is_whole = n_accepted == n_draft
        if self._goes_on is None:
            self._first.learn(n_accepted, n_accepted + (not is_whole))
            return
        self._first.learn(min(n_accepted, 1), 1)
        if n_accepted:  # after the last one accepted there was another or not, unless it was asked
            self._later.learn(n_accepted - 1, n_accepted - (is_whole and not is_early))
        self._goes_on.learn(n_draft - 1, n_draft - 1 + is_early)

    def _after_round(self) -> int:
        if self._trial:
            self._trial -= 1
            if self._trial:
                return self._n
            found, longer = self._best(self._before_trial), min(2 * self._pause, _LONGEST_PAUSE)
            self._pause = _SHORTEST_PAUSE if found > self._before_trial else longer
            return found
        found = self._best(self._n)
        teaches = self._goes_on is None or found > 1 or self._most == 1
        return found if teaches or found != self._n else self._wait()

    def _wait(self) -> int:
        """Try more drafts again after a while: the text may have become easier.

        No drafts teach nothing of drafts; one a round, where rounds stop early, nothing of others.
        """
        self._idle += 1
        if self._idle < self._pause:
            return self._n
        self._idle, self._trial, self._before_trial = 0, _TRIAL, self._n
        shares = {self._later, self._goes_on or self._later}
        for share in shares if self._n else shares | {self._first}:
            share.doubt()
        return max(range(self._n + 1, self._most + 1), key=self._speed)

    def _best(self, now: int) -> int:
        """The fastest, or the present choice where nothing is clearly faster."""
        speeds = [self._speed(n) for n in range(self._most + 1)]
        found = max(range(self._most + 1), key=speeds.__getitem__)
        return found if speeds[found] > speeds[now] * _GAIN else now

    def _speed(self, n: int) -> float:
        return self._costs.speed(n, self._first.value, self._later.value, self.goes_on)

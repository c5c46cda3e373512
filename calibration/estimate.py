"""Acceptance (alpha) from recorded rounds, with an interval.

A round tests its drafts one after another and stops at the first it rejects. So what was tested is
the accepted drafts and, where there was one, the rejected draft; drafts behind it were not. Of a
round that a stop cut, the drafts up to the cut were accepted and nothing is known of the rest: it
is censored, not rejected. Under the law of Leviathan et al. (arXiv 2211.17192, section 3.1) the
likelihood is alpha^A (1 - alpha)^R, with A accepted drafts and R rejections, and its maximum
A / (A + R): the estimator of a truncated geometric law. Accepted over proposed is no estimate.

The interval is Wilson's (score inversion; J. Am. Stat. Assoc. 22, 1927) of A + R trials: unlike
A/(A+R) plus or minus two standard errors it stays inside 0 to 1 and keeps its coverage near both.
Drafts of one text are no independent trials, though: an easy text is easy throughout. With several
texts the trials are therefore discounted by how much more the texts differ than binomial trials
would (the design effect of a ratio estimator), and by Student's t for few texts, as Korn and
Graubard (Survey Methodology 24, 1998) do for shares in clustered samples. tests/calibration
simulates the coverage of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from spec_export.calibration.ranges import check_number
from spec_export.engines.errors import RequestError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class RecordedRound:
    """A round as it was decoded.

    Attributes:
        n_draft: drafts verified, 0 for a step without drafts.
        n_accepted: drafts the target accepted.
        kept: tokens that became text: `n_accepted + 1`, or fewer where a stop cut the round.
        is_early: it stopped drafting where the draft was not sure, which rejects nothing.
    """

    n_draft: int
    n_accepted: int
    kept: int
    is_early: bool = False

    def __post_init__(self) -> None:
        fits = 0 <= self.n_accepted <= self.n_draft and 1 <= self.kept <= self.n_accepted + 1
        if not fits:
            raise RequestError(
                f"a round of {self.n_draft} drafts, {self.n_accepted} accepted and {self.kept} "
                "tokens kept cannot be"
            )

    @property
    def accepted(self) -> int:
        """Drafts known to be accepted: those that became text."""
        return min(self.n_accepted, self.kept)

    @property
    def is_rejected(self) -> bool:
        """Whether a draft is known to be refused; behind a cut nothing is known."""
        return self.n_accepted < self.n_draft and self.kept == self.n_accepted + 1


@dataclass(frozen=True)
class Interval:
    """A number and where it lies at a confidence of 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Trials:
    """Drafts that were tested.

    Attributes:
        accepted: drafts accepted.
        rejected: drafts refused.
    """

    accepted: int
    rejected: int

    @property
    def tested(self) -> int:
        """Drafts accepted or refused."""
        return self.accepted + self.rejected

    def __add__(self, other: Trials) -> Trials:
        return Trials(self.accepted + other.accepted, self.rejected + other.rejected)


def trials_of(rounds: Iterable[RecordedRound]) -> Trials:
    """Count what rounds tested."""
    accepted = rejected = 0
    for found in rounds:
        accepted += found.accepted
        rejected += found.is_rejected
    return Trials(accepted, rejected)


def trials_by_position(rounds: Iterable[RecordedRound], gamma: int) -> tuple[Trials, ...]:
    """What was tested at each position: draft i counts where all before it were accepted."""
    accepted, rejected = [0] * gamma, [0] * gamma
    for found in rounds:
        for position in range(found.accepted):
            accepted[position] += 1
        if found.is_rejected:
            rejected[found.n_accepted] += 1
    return tuple(Trials(a, r) for a, r in zip(accepted, rejected, strict=True))


def wilson(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval of a share; `trials` may be an effective number, so not whole."""
    check_number("confidence", confidence, 0.5, 0.9999)
    if trials <= 0 or not 0 <= successes <= trials:
        raise RequestError(f"{successes:g} of {trials:g} trials is no share")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, shrink = successes / trials, z * z / trials
    middle = (share + shrink / 2) / (1 + shrink)
    half = z / (1 + shrink) * math.sqrt(share * (1 - share) / trials + shrink / (4 * trials))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(share, min(low, share), max(high, share))  # rounding aside, it holds the share


def alpha_of(
    texts: Sequence[Sequence[RecordedRound]], confidence: float = CONFIDENCE
) -> Interval | None:
    """Alpha of all texts together, with an interval that lets texts differ.

    Args:
        texts: the rounds of each; with one text only, its drafts are taken to be independent, and
            the interval is too narrow if they are not.
        confidence: how often the interval is to hold.

    Returns:
        The estimate, or None where nothing was tested.
    """
    return share_of([trials_of(text) for text in texts], confidence)


def alpha_by_position(
    texts: Sequence[Sequence[RecordedRound]], gamma: int, confidence: float = CONFIDENCE
) -> tuple[Interval | None, ...]:
    """Alpha of each position given that all before were accepted: the n-alpha of a chain."""
    by_text = [trials_by_position(text, gamma) for text in texts]
    return tuple(share_of([text[i] for text in by_text], confidence) for i in range(gamma))


def alpha_by_category(
    texts: Mapping[str, Sequence[Sequence[RecordedRound]]], confidence: float = CONFIDENCE
) -> dict[str, Interval]:
    """Alpha of each category of texts that tested a draft.

    A category has few texts, often two, which say next to nothing of how much texts differ. All
    categories are taken to be alike in that, and share one design effect.
    """
    tested = {
        name: [trials for trials in map(trials_of, group) if trials.tested]
        for name, group in texts.items()
    }
    groups = {name: group for name, group in tested.items() if group}
    effect = _design_effect(list(groups.values()), confidence)
    return {name: _share(group, effect, confidence) for name, group in groups.items()}


def share_of(clusters: Sequence[Trials], confidence: float = CONFIDENCE) -> Interval | None:
    """Share of accepted drafts over clusters of trials; see the head of this module."""
    used = [cluster for cluster in clusters if cluster.tested]
    if not used:
        return None
    return _share(used, _design_effect([used], confidence), confidence)


def mean_share(texts: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> Interval | None:
    """Mean of shares over texts that differ: a ratio estimator with Student's t over the texts.

    None where there is nothing to average; the whole of 0 to 1 where there is one text only.
    """
    used = [text for text in texts if len(text)]
    count, total = len(used), sum(map(len, used))
    if not used:
        return None
    mean = math.fsum(map(math.fsum, used)) / total
    if count == 1:
        return Interval(mean, 0.0, 1.0)
    residuals = math.fsum((math.fsum(text) - mean * len(text)) ** 2 for text in used)
    error = math.sqrt(count / (count - 1) * residuals) / total
    reach = student_t(confidence, count - 1) * error
    return Interval(mean, max(0.0, mean - reach), min(1.0, mean + reach))


def _share(clusters: Sequence[Trials], effect: float, confidence: float) -> Interval:
    total = sum(clusters, Trials(0, 0))
    share, effective = total.accepted / total.tested, total.tested / effect
    found = wilson(share * effective, effective, confidence)
    return Interval(share, min(share, found.low), max(share, found.high))


def _design_effect(groups: Sequence[Sequence[Trials]], confidence: float) -> float:
    """How many times more variable than binomial trials clusters are in their group; 1 at least.

    The variance of a ratio of sums over k clusters is k/(k-1) sum (a_i - share n_i)^2 / n^2, and of
    binomial trials share (1 - share) / n. Over g groups k - g takes the place of k - 1.
    """
    count, residuals, binomial = sum(map(len, groups)), 0.0, 0.0
    for group in groups:
        total = sum(group, Trials(0, 0))
        share = total.accepted / total.tested
        residuals += math.fsum((c.accepted - share * c.tested) ** 2 for c in group)
        binomial += total.tested * share * (1 - share)
    freedom = count - len(groups)
    if freedom < 1 or not binomial:
        return 1.0
    few = student_t(confidence, freedom) / NormalDist().inv_cdf((1 + confidence) / 2)
    return max(1.0, count / freedom * residuals / binomial * few**2)


def student_t(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t.

    Exact for 1 and 2 degrees of freedom, else four terms of the expansion in 1/freedom (Abramowitz
    and Stegun 26.7.5), within 0.5 % from 3 degrees of freedom on at a confidence of 95 %.
    """
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))

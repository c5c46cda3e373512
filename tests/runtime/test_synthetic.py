"""Drafts with a set acceptance: they have it, the text is the target's, and the choice follows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from spec_export.calibration import theory
from spec_export.calibration.spread import accepted_law, round_spread
from spec_export.engines.errors import RequestError
from spec_export.runtime import OpenedBundle, Request, Sampling, Session, generate
from spec_export.runtime.adaptive import GammaCosts
from spec_export.runtime.synthetic import SyntheticDraft, record_text, synthetic_session
from tests.chi_square import FALSE_ALARM, Fit, fit
from tests.decoding import decode
from tests.deferred_device import deferred

GAMMA, MOST = 4, 8
Z = stats.norm.isf(FALSE_ALARM / 2)  # 4.9 standard deviations
INVARIANT = Sampling(1.0, 3)


@pytest.fixture
def opened(build_tiny: Callable[..., object], open_once: Callable[..., OpenedBundle]):
    """As many tokens as the tiny model has positions: 512."""
    return open_once(build_tiny("ngram", GAMMA, 512))


@dataclass(frozen=True)
class Rounds:
    """Drafts and accepted drafts of every pass of a text, and its tokens."""

    passes: list[tuple[int, int]]
    tokens: list[int]

    @property
    def n_draft(self) -> list[int]:
        return [n for n, _ in self.passes]


def rounds_of(session: Session, prompt: Sequence[int], request: Request) -> Rounds:
    """Decode to the end of the context; no round is cut, since the last ones are shorter."""
    passes: list[tuple[int, int]] = []
    tokens: list[int] = []
    drafted = accepted = 0
    for piece in generate(session, prompt, request):
        found = piece.stats
        if tokens:
            passes.append((found.drafted - drafted, found.accepted - accepted))
        drafted, accepted = found.drafted, found.accepted
        tokens += piece.tokens
    return Rounds(passes, tokens)


def whole_rounds(
    opened: OpenedBundle, alpha: float, texts: int = 8, kind: type[SyntheticDraft] = SyntheticDraft
) -> np.ndarray:
    """`[n]` accepted drafts of every round that had all its drafts.

    Such rounds are drawn independently of one another, and how many there are is a stopping time,
    so that means over them have the law's mean (Wald).
    """
    vocabulary = opened.manifest.models["target"].vocabulary
    session = Session(opened, draft=lambda host: kind(host, vocabulary))
    source = session.draft
    assert isinstance(source, SyntheticDraft)
    prompt, request = opened.text.encode("In the beginning"), Request(ignore_end=True)
    text = record_text(session, prompt, request)
    found: list[int] = []
    for seed in range(texts):
        source.follow(text, alpha, (seed,))
        passes = rounds_of(session, prompt, request).passes
        found += [accepted for n, accepted in passes if n == GAMMA]
    return np.array(found)


def judged(accepted: np.ndarray) -> tuple[int, int]:
    """Drafts accepted, and drafts tested."""
    return int(accepted.sum()), int((accepted + (accepted < GAMMA)).sum())


def is_share(accepted: int, tested: int, alpha: float) -> bool:
    """Whether so many of so many independent drafts is what alpha gives."""
    return abs(accepted - alpha * tested) <= Z * math.sqrt(tested * alpha * (1 - alpha))


def tokens_fit(accepted: np.ndarray, alpha: float) -> bool:
    """Whether tokens a round are Equation 1, by the exact deviation of a round (`spread`)."""
    law = round_spread(accepted_law(alpha, GAMMA))
    assert law.mean == pytest.approx(theory.expected_tokens(alpha, GAMMA))
    return abs(accepted.mean() + 1 - law.mean) <= Z * law.deviation / math.sqrt(len(accepted))


def law_fit(accepted: np.ndarray, alpha: float) -> Fit:
    counts = np.bincount(accepted, minlength=GAMMA + 1)
    return fit(counts, accepted_law(alpha, GAMMA))


# --- acceptance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8])
def test_drafts_are_accepted_as_often_as_was_set(opened, alpha):
    """Share of tested drafts, tokens a round and the whole law of a round; others do not fit."""
    accepted = whole_rounds(opened, alpha)
    assert is_share(*judged(accepted), alpha)
    assert tokens_fit(accepted, alpha)
    assert law_fit(accepted, alpha).ok
    for other in (alpha - 0.07, alpha + 0.07):
        assert not is_share(*judged(accepted), other)
        assert not tokens_fit(accepted, other)
        assert not law_fit(accepted, other).ok


@pytest.mark.parametrize(("alpha", "each"), [(0.0, 0), (1.0, GAMMA)])
def test_drafts_are_never_and_always_right(opened, alpha, each):
    assert set(whole_rounds(opened, alpha, texts=1).tolist()) == {each}


class Bunched(SyntheticDraft):
    """Right nine times in ten over twenty tokens, then one time in ten over as many."""

    def follow(self, text: Sequence[int], alpha: float, seed: Sequence[int]) -> None:
        super().follow(text, 0.9, seed)
        good = self._proposed
        super().follow(text, 0.1, seed)
        bad = self._proposed
        self._proposed = [(good, bad)[i // 20 % 2][i] for i in range(len(text))]


def test_mistakes_that_come_in_bunches_are_seen(opened):
    """Negative control: half of the drafts are right, yet it is no alpha of 0.5."""
    accepted = whole_rounds(opened, 0.5, kind=Bunched)
    assert not tokens_fit(accepted, 0.5)
    assert not law_fit(accepted, 0.5).ok


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), INVARIANT], ids=["greedy", "invariant"])
@pytest.mark.parametrize("draft", ["pair", "ngram"])
def test_the_text_is_that_of_plain_decoding(build_tiny, open_once, draft, sampling):
    """Byte for byte, at every alpha and gamma; a narrower round tests the same drafts."""
    opened = open_once(build_tiny(draft, GAMMA, 512))
    session, source = synthetic_session(opened)
    prompt = opened.text.encode("And the king said unto him")
    request = {"sampling": sampling, "max_tokens": 120, "ignore_end": True}
    plain = decode(opened, prompt, gamma=0, **request)
    text = record_text(Session(opened), prompt, Request(**request))
    assert text == [*prompt, *plain.tokens]
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for gamma in (1, 2, GAMMA):
            source.follow(text, alpha, (7,))
            found = decode(session, prompt, gamma=gamma, **request)
            assert found.tokens == plain.tokens
            assert found.text.encode() == plain.text.encode()
            assert source.departed_at is None
            assert found.stats.rounds > 20


def test_the_text_is_that_of_plain_decoding_on_a_device_that_works_later(opened):
    """Steps without drafts run ahead there, rounds with these drafts do not."""
    later = deferred(opened)
    session, source = synthetic_session(later)
    prompt, request = opened.text.encode("In the beginning"), Request(60, ignore_end=True)
    text = record_text(session, prompt, request)
    assert text == record_text(Session(opened), prompt, request)
    source.follow(text, 0.6, (1,))
    found = decode(session, prompt, max_tokens=60, ignore_end=True)
    assert [*prompt, *found.tokens] == text
    assert 0.3 < found.stats.alpha < 0.9


def test_the_same_seed_is_the_same_rounds(opened):
    session, source = synthetic_session(opened)
    prompt, request = opened.text.encode("In the beginning"), Request(ignore_end=True)
    text = record_text(session, prompt, request)
    found = []
    for seed in ((1, 2), (1, 2), (1, 3)):
        source.follow(text, 0.5, seed)
        found.append(rounds_of(session, prompt, request).passes)
    assert found[0] == found[1] != found[2]


def test_a_text_that_turns_out_otherwise_gets_no_further_drafts(opened):
    """As on an engine whose bits depend on the width of a pass; the text is still the target's."""
    session, source = synthetic_session(opened)
    prompt = opened.text.encode("In the beginning")
    text = record_text(session, prompt, Request(80, ignore_end=True))
    other = list(text)
    other[len(prompt) + 40] = (other[len(prompt) + 40] + 5) % 900
    source.follow(other, 1.0, (1,))
    found = decode(session, prompt, max_tokens=80, ignore_end=True)
    assert [*prompt, *found.tokens] == text
    # A round begins at every fifth token: the one that meets the change begins at 35 or after.
    assert source.departed_at is not None and 36 <= source.departed_at - len(prompt) <= 40
    assert found.stats.plain_steps >= 80 - 41
    source.follow(text, 1.0, (1,))
    again = decode(session, prompt, max_tokens=80, ignore_end=True)
    assert source.departed_at is None and again.stats.plain_steps <= 1


def test_a_text_that_depends_on_its_drafts_cannot_be_known(opened):
    request = Request(20, Sampling(1.0, 3, "reject"))
    with pytest.raises(RequestError, match="temperature 0, or rule invariant"):
        record_text(Session(opened), [5, 6], request)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf])
def test_an_acceptance_that_is_no_probability_is_refused(opened, alpha):
    _, source = synthetic_session(opened)
    with pytest.raises(RequestError, match="expected 0 to 1"):
        source.follow([5, 6], alpha, (1,))


# --- the choice of gamma --------------------------------------------------------------------------

# What rounds cost, in plain steps: rows that cost as much each; a kernel that is slower from three
# rows on; a draft a third as slow as its target.
SHAPES = {
    "linear": theory.Costs(0.0, lambda rows: 1 + 0.15 * (rows - 1)),
    "cliff": theory.Costs(0.0, lambda rows: 1.05 if rows < 3 else 1.9 + 0.02 * rows, 0.05),
    "expensive": theory.Costs(0.35, lambda rows: 1 + 0.03 * (rows - 1)),
}
ALPHAS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
SLACK = 1.03  # what another gamma has to promise before it is taken (`adaptive`)
TESTED = 96  # drafts behind a choice that has settled: at least so many rounds count


def fast_enough(costs: theory.Costs, alpha: float) -> set[int]:
    """Gammas within the slack of the best, at an acceptance as near alpha as can be told.

    Where the best round is slower than plain decoding by more than the slack, 0 alone.
    """
    if max(theory.speedup(alpha, n, costs) for n in range(1, MOST + 1)) * SLACK < 1:
        return {0}
    error = 3 * math.sqrt(alpha * (1 - alpha) / TESTED)
    found: set[int] = set()
    for near in np.linspace(max(0.0, alpha - error), min(1.0, alpha + error), 21):
        speeds = [theory.speedup(float(near), n, costs) for n in range(MOST + 1)]
        found |= {n for n, speed in enumerate(speeds) if speed * SLACK >= max(speeds)}
    return found


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("believed", [0.1, 0.9])
def test_the_auto_choice_ends_where_the_oracle_is(build_tiny, open_once, shape, believed):
    """In the real runtime, whatever was believed: at gamma 0 where S < 1, else at the best gamma.

    "Ends": what most passes of the second half of a text of 500 tokens had. Drafts that were given
    up are tried again now and then, which is a few passes in a hundred.
    """
    opened, costs = open_once(build_tiny("ngram", MOST, 512)), SHAPES[shape]
    session, source = synthetic_session(opened)
    prompt = opened.text.encode("In the beginning")
    text = record_text(session, prompt, Request(ignore_end=True))
    round_ms = tuple(costs.round_cost(n) for n in range(1, MOST + 1))
    request = Request(auto=GammaCosts(1.0, round_ms, believed), ignore_end=True)
    ends = {}
    for alpha in ALPHAS:
        source.follow(text, alpha, (1,))
        found = rounds_of(session, prompt, request)
        assert [*prompt, *found.tokens] == text
        half = found.n_draft[len(found.n_draft) // 2 :]
        ends[alpha], count = Counter(half).most_common(1)[0]
        assert count > 0.7 * len(half), "it has settled"
        assert ends[alpha] in fast_enough(costs, alpha), (alpha, ends[alpha])
    oracle = {alpha: theory.best_gamma(alpha, costs, MOST) for alpha in ALPHAS}
    assert ends[0.05] == oracle[0.05] == 0
    assert ends[0.95] >= 5 and oracle[0.95] >= 6
    assert sum(ends[alpha] == oracle[alpha] for alpha in ALPHAS) >= 3


def test_a_choice_that_did_not_learn_would_be_seen():
    """Negative control: what is best at the acceptance believed is too slow in half the cases.

    And every constant gamma in a third of them at least.
    """
    cases = [(costs, alpha) for costs in SHAPES.values() for alpha in ALPHAS]
    for believed in (0.1, 0.9):
        wrong = [
            theory.best_gamma(believed, costs, MOST) not in fast_enough(costs, alpha)
            for costs, alpha in cases
        ]
        assert sum(wrong) >= len(cases) / 2
    for n in range(MOST + 1):
        assert sum(n not in fast_enough(costs, alpha) for costs, alpha in cases) >= len(cases) / 3

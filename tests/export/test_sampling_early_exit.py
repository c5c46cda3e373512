"""A round that drafts no further than the draft is sure emits the target's law, by every rule.

Exactly, as fractions over three rounds, and by chi-square with the graphs and the product's noise.
The lossy variant, which leaves out a draft by the probability of what was drawn, fails both.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from spec_export.runtime.noise import Noise
from tests import algorithm1
from tests.algorithm1 import Tokens
from tests.export.test_sampling_exact import P_CHAIN, Q_CHAIN, chain_law, markov
from tests.export.test_sampling_law import CHANGES, RULES, Changes, Toy
from tests.sampling_run import run

GAMMA = 3
LEAST = Fraction(1, 2)  # of .4, .6 and .7, the largest probabilities of the draft's rows


# --- as fractions -------------------------------------------------------------------------------


def drafts_of(context: Tokens, *, is_lossy: bool) -> list[tuple[Tokens, Fraction]]:
    """Every list of drafts a round may have, and its chance.

    A row with less than `LEAST` for its most probable token gives the last one; lossy: where a
    token was drawn that has less than `LEAST`, it is dropped.
    """
    found: list[tuple[Tokens, Fraction]] = []

    def grow(drafts: Tokens, mass: Fraction) -> None:
        q = Q_CHAIN[(context + drafts)[-1]]
        is_last = len(drafts) + 1 == GAMMA or (not is_lossy and max(q) < LEAST)
        for token, q_token in enumerate(q):
            if is_lossy and drafts and q_token < LEAST:
                found.append((drafts, mass * q_token))
            elif is_last:
                found.append(((*drafts, token), mass * q_token))
            else:
                grow((*drafts, token), mass * q_token)

    grow((), Fraction(1))
    return found


def judged(rule: str, context: Tokens, drafts: Tokens) -> dict[Tokens, Fraction]:
    """The law of what a round with these drafts emits."""
    n = len(drafts)
    p = [P_CHAIN[(context + drafts[:i])[-1]] for i in range(n + 1)]
    q = [Q_CHAIN[(context + drafts[:i])[-1]] for i in range(n)]
    if rule == "block":
        chances = algorithm1.block_lengths(p, q, drafts)
        weights = algorithm1._prefix_weights(p, q, drafts)
    else:
        kept = [min(Fraction(1), p[i][d] / q[i][d]) for i, d in enumerate(drafts)] + [Fraction(0)]
        chances, weights, reached = [], [Fraction(1)] * (n + 1), Fraction(1)
        for share in kept:
            chances.append(reached * (1 - share))
            reached *= share
    law: dict[Tokens, Fraction] = {}
    for i, chance in enumerate(chances):
        left = list(p[i])
        if i < n:
            left = [max(weights[i] * a - b, Fraction(0)) for a, b in zip(p[i], q[i], strict=True)]
        for token, share in enumerate(left):
            if chance * share:
                law[(*drafts[:i], token)] = chance * share / sum(left)
    return law


def three_rounds(rule: str, *, is_lossy: bool) -> dict[Tokens, Fraction]:
    """The law of the first three tokens after token 0, over three rounds."""
    law = {(0,): Fraction(1)}
    for _ in range(3):
        grown: dict[Tokens, Fraction] = {}
        for context, mass in law.items():
            for drafts, chance in drafts_of(context, is_lossy=is_lossy):
                for tokens, m in judged(rule, context, drafts).items():
                    text = (context + tokens)[:4]
                    grown[text] = grown.get(text, Fraction(0)) + mass * chance * m
        law = grown
    return {text[1:]: mass for text, mass in law.items()}


@pytest.mark.parametrize("rule", ["dense", "block"])
def test_three_rounds_that_stop_early_emit_the_targets_law_exactly(rule: str) -> None:
    lengths = {len(drafts) for last in range(3) for drafts, _ in drafts_of((last,), is_lossy=False)}
    assert lengths == {1, 2, 3}
    assert three_rounds(rule, is_lossy=False) == chain_law(3)


@pytest.mark.parametrize("rule", ["dense", "block"])
def test_stopping_by_the_token_that_was_drawn_emits_another_law(rule: str) -> None:
    """Negative control, in the same enumeration."""
    found, wanted = three_rounds(rule, is_lossy=True), chain_law(3)
    assert sum(found.values()) == 1
    assert max(abs(found[text] - wanted[text]) for text in wanted) >= Fraction(1, 100)


def test_a_round_that_never_stops_early_is_the_papers() -> None:
    """The enumeration itself, against the other one there is."""
    target, draft = markov(P_CHAIN), markov(Q_CHAIN)
    for rule, law in (("dense", algorithm1.round_law), ("block", algorithm1.block_round_law)):
        found: dict[Tokens, Fraction] = {}
        for drafts, mass in algorithm1._drafts_of(draft, (1,), GAMMA):
            for tokens, m in judged(rule, (1,), drafts).items():
                found[tokens] = found.get(tokens, Fraction(0)) + mass * m
        assert found == law(target, draft, (1,), GAMMA)


# --- by the graphs ------------------------------------------------------------------------------


class StopsEarly(Toy):
    """Goes by the graph that says how sure the draft is of the row it is about to draw from."""

    gamma = GAMMA
    schedule = (3, 2, 3, 3)

    def __init__(self, rule: str, draft: str = "drawn", changes: Changes | None = None) -> None:
        super().__init__(rule, draft, changes)
        rows = (run("confidence", self.V, {"logits": row[None, None]}) for row in self.log_q)
        self.sure = [float(found["confidence"][0]) for found in rows]
        self.stopped = 0

    def is_unsure(self, text: list[int]) -> bool:
        stops = self.sure[text[-1]] < LEAST
        self.stopped += stops
        return stops


class StopsByTheDraw(Toy):
    """Lossy: drops a draft, but the first, that was drawn with a small probability."""

    gamma = GAMMA
    schedule = (3, 2, 3, 3)
    samples = 6_000

    def round(self, noise, start: int, text: list[int], n_draft: int) -> None:
        self.began = len(text)
        super().round(noise, start, text, n_draft)

    def is_cut(self, text: list[int], draft: int) -> bool:
        return len(text) > self.began and np.exp(self.log_q[text[-1]][draft]) < LEAST


def test_the_graph_gives_the_rows_largest_probabilities() -> None:
    assert StopsEarly("dense").sure == pytest.approx([0.4, 0.6, 0.7])


@pytest.mark.parametrize(("rule", "draft"), RULES)
def test_the_emitted_law_is_the_targets(rule: str, draft: str) -> None:
    toy = StopsEarly(rule, draft)
    result = toy.fit(5_000)
    assert result.ok, result
    assert toy.stopped > 1_000


@pytest.mark.parametrize("change", ["all three", "penalties", "grammar", "everything"])
@pytest.mark.parametrize(("rule", "draft"), RULES)
def test_the_emitted_law_is_that_of_the_changed_target(rule: str, draft: str, change: str) -> None:
    """What is looked at is the raw row, whatever the request makes of it."""
    toy = StopsEarly(rule, draft, CHANGES[change])
    result = toy.fit(700)
    assert result.ok, result
    assert toy.stopped > 50


@pytest.mark.parametrize("rule", ["dense", "block"])
def test_stopping_by_the_token_that_was_drawn_fails_the_same_test(rule: str) -> None:
    """Negative control: it must be seen."""
    toy = StopsByTheDraw(rule)
    result = toy.fit(toy.samples)
    assert not result.ok, result


def test_under_invariant_the_threshold_is_not_seen() -> None:
    """The same seed gives the same text whether rounds stop early or not."""

    class Plain(Toy):
        schedule = (0, 0, 0, 0)

    toys = [Plain("invariant"), *(StopsEarly("invariant", draft) for draft in ("drawn", "greedy"))]
    for seed in range(40):
        assert len({toy.sequence(Noise(seed), 10 * seed) for toy in toys}) == 1
    assert toys[1].stopped > 10

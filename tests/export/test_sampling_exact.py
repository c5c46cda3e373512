"""What a rule accepts and emits, as fractions: the tables of the papers. p = target, q = draft."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from spec_export.runtime.noise import Noise, Stream
from tests import algorithm1
from tests.chi_square import fit
from tests.sampling_run import (
    BELOW_ONE,
    Bound,
)

TWO = ([Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)])
THREE = (
    [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)],
    [Fraction(4, 10), Fraction(2, 10), Fraction(4, 10)],
)
ACCEPTED = [  # expected accepted drafts for gamma 1 to 4
    ("dense", TWO, [Fraction(2, 3), Fraction(10, 9), Fraction(38, 27), Fraction(130, 81)]),
    ("dense", THREE, [Fraction(4, 5), Fraction(36, 25), Fraction(244, 125), Fraction(1476, 625)]),
    ("block", TWO, [Fraction(2, 3), Fraction(11, 9), Fraction(5, 3), Fraction(166, 81)]),
    (
        "block",
        THREE,
        [Fraction(4, 5), Fraction(37, 25), Fraction(1043, 500), Fraction(13163, 5000)],
    ),
]


class Lengths:
    """P(n_accepted) for drafts drawn from q, as fractions, from the graph's verdicts."""

    def __init__(self, rule: str, p: list[Fraction], q: list[Fraction], gamma: int) -> None:
        self.rule, self.p, self.q, self.gamma = rule, p, q, gamma
        self._accept = Bound(f"accept_{rule}", len(p), G=gamma, M=gamma + 1)
        x = self._accept.x
        x["p"][:, : len(p)] = np.array(p, float)
        if "q" in x:
            x["q"][:, : len(q)] = np.array(q, float)
        x["race"][:] = 1
        x["n_draft"][:] = gamma

    def verdict(self, drafts: tuple[int, ...], uniforms: tuple[float, ...]) -> int:
        self._accept.x["draft_tokens"][:] = drafts
        self._accept.x["uniform"][:] = uniforms
        self._accept()
        return int(self._accept.y["n_accepted"][0])

    def of_tokens(self) -> Counter:
        """On a grid: every threshold of these pairs is a multiple of 1/10 (p itself, one-hot) or
        of 1/2 (p/q, dense; above 1 it always accepts), so its midpoints weigh each verdict exactly.
        """
        steps = 2 if self.rule == "dense" else 10
        grid = [(k + 0.5) / steps for k in range(steps)]
        law: Counter = Counter()
        for drafts in itertools.product(range(len(self.p)), repeat=self.gamma):
            mass = math.prod([self.q[d] for d in drafts]) / steps**self.gamma
            for uniforms in itertools.product(grid, repeat=self.gamma):
                law[self.verdict(drafts, uniforms)] += mass
        return law

    def of_blocks(self) -> Counter:
        """From the exact thresholds, each held against the graph a hair below and above it."""
        law: Counter = Counter()
        for drafts in itertools.product(range(len(self.p)), repeat=self.gamma):
            rows = [self.p] * (self.gamma + 1), [self.q] * self.gamma
            h = algorithm1.block_thresholds(*rows, drafts)
            for i, below in itertools.product(range(1, self.gamma + 1), (True, False)):
                u = [float(h[j]) * 0.99 if j < i else 0.9999999 for j in range(1, self.gamma + 1)]
                u[i - 1] = float(h[i]) + (-1e-5 if below else 1e-5)
                u = [min(x, float(BELOW_ONE)) for x in u]
                kept = [j for j in range(1, self.gamma + 1) if u[j - 1] < h[j]]
                assert self.verdict(drafts, tuple(u)) == max(kept, default=0)
            chances = algorithm1.block_lengths(*rows, drafts)
            for n, chance in enumerate(chances):
                law[n] += chance * math.prod([self.q[d] for d in drafts])
        return law

    def law(self) -> Counter:
        return self.of_blocks() if self.rule == "block" else self.of_tokens()


@pytest.mark.parametrize(("rule", "pair", "expected"), ACCEPTED, ids=["2", "3", "2b", "3b"])
def test_expected_accepted_drafts_of_the_graph_as_fractions(rule, pair, expected) -> None:
    """vllm-ascend 7807: block verification keeps more; lossless only with its own residual."""
    for gamma, fraction in enumerate(expected, start=1):
        law = Lengths(rule, *pair, gamma).law()
        assert sum(law.values()) == 1
        assert sum(n * mass for n, mass in law.items()) == fraction


def test_accepted_length_law_of_the_graph() -> None:
    """Each row of this pair accepts 4/5: .2, .16, .128, .1024 and .4096."""
    law = Lengths("dense", *THREE, 4).law()
    assert law == {n: Fraction(4, 5) ** n * Fraction(1, 5) for n in range(4)} | {
        4: Fraction(4, 5) ** 4
    }


def test_a_drawn_draft_is_accepted_with_p_over_q() -> None:
    """vllm 40149: accepted with p(d) instead of min(1, p/q), 17/50 of the drafts pass, not 4/5."""
    assert Lengths("dense", *THREE, 1).law()[1] == Fraction(4, 5)
    assert Lengths("one_hot", *THREE, 1).law()[1] == Fraction(17, 50)


def markov(rows: list[list[Fraction]]) -> algorithm1.Model:
    return lambda context: rows[context[-1]]


P_CHAIN = [THREE[0], [Fraction(1, 10), Fraction(1, 10), Fraction(8, 10)], [Fraction(1, 3)] * 3]
Q_CHAIN = [
    THREE[1],
    [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)],
    [Fraction(7, 10), Fraction(1, 10), Fraction(2, 10)],
]


def chain_law(length: int) -> dict[tuple[int, ...], Fraction]:
    """The target's own law of the first tokens after token 0."""
    law = {(0,): Fraction(1)}
    for _ in range(length):
        law = {(*s, x): m * p for s, m in law.items() for x, p in enumerate(P_CHAIN[s[-1]])}
    return {s[1:]: m for s, m in law.items()}


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize(
    "round_law", [algorithm1.round_law, algorithm1.block_round_law], ids=["token", "block"]
)
def test_three_rounds_of_a_rule_emit_the_targets_law_exactly(round_law, gamma: int) -> None:
    target, draft = markov(P_CHAIN), markov(Q_CHAIN)
    law = {(0,): Fraction(1)}
    for _ in range(3):
        grown: dict[tuple[int, ...], Fraction] = {}
        for context, mass in law.items():
            for tokens, m in round_law(target, draft, context, gamma).items():
                grown[context + tokens] = grown.get(context + tokens, Fraction(0)) + mass * m
        law = grown
    first_three = dict.fromkeys(chain_law(3), Fraction(0))
    for sequence, mass in law.items():  # three rounds emit at least three tokens
        first_three[sequence[1:4]] += mass
    assert first_three == chain_law(3)


@pytest.mark.parametrize("rule", ["one_hot", "dense", "block"])
def test_the_token_after_a_refusal_at_every_index(rule: str) -> None:
    """openvino.genai 4190: a late refusal dropped a token. All before it stay."""
    p, q, gamma = np.array(THREE[0], float), np.array(THREE[1], float), 4
    judge, noise = Bound(f"accept_{rule}", 3, G=gamma, M=gamma + 1), Noise(28)
    judge.x["logits"][:] = np.log(p)
    judge.x["p"][:, :3] = p
    judge.x["n_draft"][:] = gamma
    if rule != "one_hot":
        judge.x["q"][:, :3] = q
    for n in range(gamma + 1):
        drafts = [0, 1, 0, 1] if rule != "block" else [2, 2, 2, 2]  # p/q of token 2 is 1/2
        if n < gamma:
            drafts[n] = 2
        uniforms = (
            [0.0 if i < n else 0.9999 for i in range(gamma)] if rule == "block" else [0.0] * 4
        )
        if rule != "block" and n < gamma:
            uniforms[n] = 0.9
        judge.x["draft_tokens"][:], judge.x["uniform"][:] = drafts, uniforms
        left = {"one_hot": p * [1, 1, 0], "dense": np.maximum(p - q, 0)}.get(
            rule, np.maximum(0.5**n * p - q, 0)
        )
        left = p if n == gamma or not left.any() else left
        counts = np.zeros(3)
        for start in range(3_000):
            noise.exponential(judge.x["race"], start, n, stream=Stream.RESIDUAL)
            judge()
            tokens = judge.y["tokens"].tolist()
            if rule == "block" and n and not np.maximum(0.5**n * p - q, 0).any() and n < gamma:
                assert judge.y["n_accepted"][0] == 0  # h = 0: this prefix is never the longest
                continue
            assert judge.y["n_accepted"][0] == n
            assert tokens[:n] == drafts[:n]
            assert not any(tokens[n + 1 :])
            counts[tokens[n]] += 1
        if counts.any():
            result = fit(counts, left / left.sum())
            assert result.ok, (n, result)

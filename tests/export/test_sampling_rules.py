"""The rules of acceptance, number by number: against the papers' algorithms, and at their edges.

Their law over several rounds is in test_sampling_law. p = target, q = draft.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from spec_export.engines.graphs import padded_vocabulary, race_blocks
from spec_export.runtime.noise import Noise, Stream, race_size
from tests import algorithm1, coupling
from tests.chi_square import fit
from tests.sampling_run import (
    BELOW_ONE,
    GARBAGE_IDS,
    RULES,
    Arrays,
    Bound,
    accept,
    distribution,
    ids,
    model,
    padded,
    refer,
    round_feeds,
    run,
    sample,
)

RATIO_RULES = ("dense", "block")
SAMPLED = ("one_hot", "dense", "block", "invariant")


# --- the graphs are the algorithms ----------------------------------------------------------------


def steer(feeds: Arrays, rule: str, n_draft: int, n_accepted: int) -> None:
    """Set ids and uniforms so that the round accepts exactly `n_accepted` of `n_draft` drafts."""
    rows, V = feeds["logits"][0].astype(float), feeds["logits"].shape[2]
    p, q = feeds["p"].astype(float)[:, :V], feeds["q"].astype(float)[:, :V]
    own = [accept("invariant", V, feeds | _without_drafts(feeds, i)) for i in range(n_draft)]
    for i in range(n_draft):
        best, worst = int(np.argmax(rows[i])), int(np.argmin(rows[i]))
        if rule == "invariant":
            best = int(own[i]["tokens"][0])
            worst = (best + 1) % V
        if rule in RATIO_RULES:  # a refusal needs q > p
            best, worst = int(np.argmax(p[i])), int(np.argmax(q[i] - p[i]))
        d = feeds["draft_tokens"][i] = best if i != n_accepted else worst
        if rule in ("one_hot", "dense"):
            bar = min(1.0, p[i, d] / (q[i, d] if rule == "dense" else 1.0))
            feeds["uniform"][i] = bar / 2 if i != n_accepted else (1 + bar) / 2
    if rule == "block":
        h = algorithm1.block_thresholds(p, q, feeds["draft_tokens"][:n_draft].tolist())
        for i in range(1, n_draft + 1):
            feeds["uniform"][i - 1] = h[i] / 2 if i <= n_accepted else (1 + h[i]) / 2
    feeds["n_draft"][0] = n_draft


def _without_drafts(feeds: Arrays, row: int) -> Arrays:
    """The round that begins at `row` and has no drafts."""
    G = len(feeds["draft_tokens"])
    return {name: np.roll(feeds[name], -row, axis=0) for name in ("p", "race")} | {
        "logits": np.roll(feeds["logits"], -row, axis=1),
        "draft_tokens": np.zeros(G, np.int64),
        "n_draft": ids(0),
    }


def spoil_unused(feeds: Arrays, n_draft: int) -> None:
    """Fill everything beyond the drafts with what must not matter."""
    gamma = len(feeds["draft_tokens"])
    feeds["q"][n_draft:] = np.nan
    feeds["uniform"][n_draft:] = np.nan
    feeds["draft_tokens"][n_draft:] = np.resize(np.array(GARBAGE_IDS), gamma)[n_draft:]
    for name in ("p", "scores"):
        feeds[name][n_draft + 1 :] = np.nan
    feeds["logits"][0, n_draft + 1 :] = np.nan


def stated(feeds: Arrays, rule: str) -> algorithm1.Verdict:
    n, V = int(feeds["n_draft"][0]), feeds["logits"].shape[2]
    p = feeds["p"][: n + 1, :V].astype(float)
    drafts = [int(d) for d in feeds["draft_tokens"][:n]]
    races = feeds["race"].astype(float)
    if rule == "greedy":
        return algorithm1.judge_greedy(feeds["logits"][0, : n + 1].astype(float), drafts)
    if rule == "invariant":
        return algorithm1.judge_own([algorithm1.race(p[i], races[i]) for i in range(n + 1)], drafts)
    uniforms = [float(u) for u in feeds["uniform"][:n]]
    q = feeds["q"][:n, :V].astype(float) if rule in RATIO_RULES else np.eye(V)[drafts]
    judge = algorithm1.judge_block if rule == "block" else algorithm1.judge
    return judge(p, q, drafts, uniforms, races[0])


def check_outputs(made: Arrays, feeds: Arrays, expected: algorithm1.Verdict) -> None:
    n, M = expected.n_accepted, feeds["logits"].shape[1]
    assert made["n_accepted"].tolist() == [n]
    assert made["tokens"].tolist() == expected.tokens + [0] * (M - n - 1)
    raw = np.log(algorithm1.softmax(feeds["logits"][0, : n + 1].astype(float)))
    logprob = [raw[i, t] for i, t in enumerate(expected.tokens)] + [0.0] * (M - n - 1)
    np.testing.assert_allclose(made["logprob"], logprob, atol=1e-5)
    committed = [int(feeds["last_id"][0]), *expected.tokens]
    kv_len = int(feeds["kv_len"][0]) + n + 1
    assert made["next_kv_len"].tolist() == [kv_len]
    assert made["next_ids"].tolist() == committed[-2:]
    passes = [kv_len - 1, *range(kv_len + 1, kv_len + M - 1)]  # rows done: 0, 2, 3, ...
    assert made["next_draft_kv_len"].tolist() == passes


def every_outcome() -> Iterator[tuple[int, int, int]]:
    for gamma in (1, 2, 3, 4):
        for n_draft in range(gamma + 1):
            for n_accepted in range(n_draft + 1):
                yield gamma, n_draft, n_accepted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("V", [5, 130])
def test_accept_is_the_algorithm_for_every_outcome(rule: str, V: int) -> None:
    rng = np.random.default_rng(7)
    for gamma, n_draft, n_accepted in every_outcome():
        feeds = round_feeds(rng, gamma, V)
        steer(feeds, rule, n_draft, n_accepted)
        spoil_unused(feeds, n_draft)
        expected = stated(feeds, rule)
        assert expected.n_accepted == n_accepted
        check_outputs(accept(rule, V, feeds), feeds, expected)
        if V == 5:
            race = feeds["race"] if rule == "invariant" else feeds["race"][:1]
            said = refer(f"accept_{rule}", V, feeds | {"race": race})
            check_outputs(said, feeds, expected)


@pytest.mark.parametrize("rule", SAMPLED)
def test_the_same_noise_gives_the_same_tokens_everywhere(rule: str) -> None:
    """onnxruntime, ONNX's reference and numpy, on rounds drawn at random."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        V, gamma = int(rng.choice([5, 70, 1031])), int(rng.integers(1, 5))
        feeds = round_feeds(rng, gamma, V, temperature=float(rng.choice([0.3, 1, 3])))
        feeds["n_draft"][0] = rng.integers(gamma + 1)
        made, expected = accept(rule, V, feeds), stated(feeds, rule)
        check_outputs(made, feeds, expected)
        race = feeds["race"] if rule == "invariant" else feeds["race"][:1]
        said = refer(f"accept_{rule}", V, feeds | {"race": race})
        assert made["tokens"].tolist() == said["tokens"].tolist()


def test_the_choosing_graphs_agree_with_the_reference() -> None:
    rng = np.random.default_rng(8)
    for V, Vd in ((70, 66), (300, 300)):
        feeds = round_feeds(rng, 3, V)
        one = {name: feeds[name][:1] for name in ("p", "scores", "race")}
        one["logits"] = np.ascontiguousarray(feeds["logits"][:, :1])
        for name in ("greedy", "edited", "drawn"):
            made, said = run(f"sample_{name}", V, one), refer(f"sample_{name}", V, one)
            assert made["tokens"].tolist() == said["tokens"].tolist()
            np.testing.assert_allclose(made["logprob"], said["logprob"], atol=1e-6)
            given = one | {"logits": np.ascontiguousarray(one["logits"][..., :Vd])}
            token = run(f"propose_{name}", V, given, Vd)["token"]
            assert token.tolist() == refer(f"propose_{name}", V, given, Vd)["token"].tolist()


@pytest.mark.parametrize(
    ("drafts", "choices", "emitted"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 5, 3, 4], [1, 5]),
        ([], [5], [5]),
        ([1], [2, 3], [2]),
        ([4, 5, 6], [4, 8, 6, 9], [4, 8]),
    ],
)
def test_greedy_acceptance_table(drafts: list[int], choices: list[int], emitted: list[int]) -> None:
    gamma, V = 3, 10
    feeds = round_feeds(np.random.default_rng(0), gamma, V)
    feeds["n_draft"][0] = len(drafts)
    spoil_unused(feeds, len(drafts))
    feeds["draft_tokens"][: len(drafts)] = drafts
    for i, choice in enumerate(choices):
        feeds["logits"][0, i] = np.eye(V)[choice]
    feeds["scores"] = padded(feeds["logits"][0], -np.inf)
    for rule in ("greedy", "edited"):
        made = accept(rule, V, feeds)
        assert made["tokens"][: int(made["n_accepted"][0]) + 1].tolist() == emitted


def test_ties_go_to_the_first_index_everywhere() -> None:
    """Report 15: a tie broken last in one place and first in another changes greedy output."""
    V = 200
    for first, second in [(3, 190), (64, 65), (0, 199), (63, 64)]:
        logits = np.zeros((1, 2, V), np.float32)
        logits[0, :, [first, second]] = 7
        feeds = round_feeds(np.random.default_rng(0), 1, V) | {"logits": logits}
        feeds["scores"] = padded(logits[0], -np.inf)
        for rule in ("greedy", "edited"):
            feeds["draft_tokens"][0] = second
            assert accept(rule, V, feeds)["tokens"].tolist() == [first, 0]
            feeds["draft_tokens"][0] = first
            assert accept(rule, V, feeds)["tokens"].tolist() == [first, first]
            assert sample(rule, V, feeds)["tokens"].tolist() == [first]
            one = {"logits": logits[:, :1], "scores": feeds["scores"][:1]}
            assert run(f"propose_{rule}", V, one)["token"].tolist() == [first]


def test_a_greedy_draft_never_proposes_an_id_the_target_does_not_have() -> None:
    """Report 22; where the draft draws, its distribution has no weight there."""
    logits = np.zeros((1, 1, 128), np.float32)
    logits[..., 100:] = 50
    logits[..., 7] = 1
    assert run("propose_greedy", 100, {"logits": logits}, 128)["token"].tolist() == [7]
    nothing = np.full((1, 1, 66), -np.inf, np.float32)
    assert 0 <= run("propose_greedy", 100, {"logits": nothing}, 66)["token"][0] < 100


def test_an_id_outside_the_vocabulary_is_refused_and_costs_no_token_its_mass() -> None:
    """A look-up draft may hold an id the target does not have (added tokens): p of it is 0."""
    for stray in (64, 65, -1, 2**31):
        feeds = round_feeds(np.random.default_rng(0), 1, 64)
        feeds["draft_tokens"][0], feeds["uniform"][0] = stray, 0
        feeds["logits"][0, 0] = -np.inf
        feeds["logits"][0, 0, [0, 63]] = [-80, 0]  # clamping the id must not remove token 63
        feeds["p"] = distribution(feeds["logits"])
        for rule in RULES:
            made = accept(rule, 64, feeds)
            assert made["n_accepted"].tolist() == [0]
            assert made["tokens"][0] == 63


# --- exact laws -----------------------------------------------------------------------------------

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
    """Report 23: block verification keeps more, and only with its own residual is it lossless."""
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
    """Report 24: accepted with p(d) instead of min(1, p/q), 17/50 of the drafts pass, not 4/5."""
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
    """Report 28: a late refusal dropped a token. All before it stay, and it draws from the rest."""
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


# --- properties -----------------------------------------------------------------------------------

VOCABULARIES = st.sampled_from([3, 63, 64, 65, 1031, 50257])
EDGES = st.sampled_from([0.0, 1e-30, 0.5, float(BELOW_ONE)])


@st.composite
def rounds(draw: st.DrawFn) -> Arrays:
    """A round over awkward distributions: banned tokens, wide logits, extreme temperatures."""
    V, gamma = draw(VOCABULARIES), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    feeds = round_feeds(rng, gamma, V)
    feeds["logits"] *= draw(st.sampled_from([0.0, 1.0, 30.0]))
    banned = rng.random((gamma + 1, V)) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    banned[:, rng.integers(V)] = False  # at 1.0 one token is left: a one-token support
    feeds["logits"][0][banned] = -np.inf
    feeds["p"] = distribution(feeds["logits"], draw(st.sampled_from([1e-6, 0.3, 1.0, 100.0])))
    feeds["uniform"][:] = draw(st.lists(EDGES, min_size=gamma, max_size=gamma))
    feeds["n_draft"][0] = draw(st.integers(0, gamma))
    if draw(st.booleans()):  # drafts the target bans
        feeds["draft_tokens"][:] = rng.integers(V, size=gamma)
    if draw(st.booleans()):  # a race that is decided at its ends
        feeds["race"][:] = rng.choice([0, 1e-30, 1, 37], size=feeds["race"].shape)
    return feeds


@settings(max_examples=200, deadline=None)
@given(rounds(), st.sampled_from(RULES))
def test_a_token_of_probability_zero_is_never_emitted(feeds: Arrays, rule: str) -> None:
    V = feeds["logits"].shape[2]
    made = accept(rule, V, feeds)
    n = int(made["n_accepted"][0])
    assert 0 <= n <= feeds["n_draft"][0]
    for i, token in enumerate(made["tokens"][: n + 1]):
        assert 0 <= token < V
        assert feeds["logits"][0, i, token] > -np.inf
        assert rule == "greedy" or feeds["p"][i, token] > 0
    assert np.isfinite(made["logprob"]).all()
    assert made["tokens"][:n].tolist() == feeds["draft_tokens"][:n].tolist()


@settings(max_examples=60, deadline=None)
@given(rounds(), st.sampled_from(RULES))
def test_sample_emits_what_accept_without_drafts_does(feeds: Arrays, rule: str) -> None:
    """Under `invariant` that makes speculation invisible: the same race gives the same token."""
    V, last = feeds["logits"].shape[2], len(feeds["draft_tokens"])
    one = sample("greedy" if rule == "greedy" else "drawn", V, feeds, last)
    feeds["logits"][0, 0], feeds["p"][0] = feeds["logits"][0, last], feeds["p"][last]
    made = accept(rule, V, feeds | {"n_draft": ids(0)})
    assert one["tokens"][0] == made["tokens"][0]
    assert one["logprob"].tobytes() == made["logprob"][:1].tobytes()


@settings(max_examples=60, deadline=None)
@given(rounds(), st.sampled_from([*RATIO_RULES, "invariant"]))
def test_the_draft_that_is_the_target_is_always_accepted(feeds: Arrays, rule: str) -> None:
    """p = q bit for bit: no uniform below 1 refuses, and a residual without mass is never drawn."""
    V, n = feeds["logits"].shape[2], int(feeds["n_draft"][0])
    for i in range(n):
        race = feeds["race"][i : i + 1]
        made = run("propose_drawn", V, {"p": feeds["p"][i : i + 1], "race": race})
        feeds["q"][i], feeds["draft_tokens"][i] = feeds["p"][i], made["token"][0]
        assert feeds["q"][i, made["token"][0]] > 0
    assert accept(rule, V, feeds)["n_accepted"].tolist() == [n]


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_disjoint_supports_refuse_every_draft(feeds: Arrays) -> None:
    V = feeds["logits"].shape[2]
    odd = np.arange(V) % 2 == 1
    feeds["logits"] = np.where(odd, -np.inf, np.nan_to_num(feeds["logits"], neginf=0))
    feeds["p"] = distribution(feeds["logits"])
    feeds["q"][:, :V] = np.where(odd, feeds["q"][:, :V], 0).astype(np.float32)
    feeds["draft_tokens"][:] = 1
    for rule in SAMPLED:
        made = accept(rule, V, feeds)
        assert made["n_accepted"].tolist() == [0]
        assert made["tokens"][0] % 2 == 0


def test_blocks_keep_at_least_as_much_on_average() -> None:
    """What arXiv 2403.10444 proves, on random pairs and exactly: no pair keeps less."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, q = ([Fraction(int(w)) for w in rng.integers(1, 9, size=3)] for _ in range(2))
        p, q = ([w / sum(row) for w in row] for row in (p, q))
        token, block = algorithm1.round_law, algorithm1.block_round_law
        assert mean_accepted(token, p, q) <= mean_accepted(block, p, q)


def mean_accepted(round_law, p: list[Fraction], q: list[Fraction]) -> Fraction:
    law = round_law(lambda _: p, lambda _: q, (), 3)
    return sum((len(tokens) - 1) * mass for tokens, mass in law.items())


def test_temperature_near_zero_is_greedy_and_a_high_one_flattens() -> None:
    V = 1031
    feeds = round_feeds(np.random.default_rng(3), 2, V)
    greedy = sample("greedy", V, feeds)["tokens"][0]
    noise, drawn = Noise(0), set()
    cold, hot = distribution(feeds["logits"], 1e-6), distribution(feeds["logits"], 100)
    for start in range(50):
        noise.exponential(feeds["race"][:1], start, 0)
        assert sample("drawn", V, feeds | {"p": cold})["tokens"][0] == greedy
        drawn.add(int(sample("drawn", V, feeds | {"p": hot})["tokens"][0]))
    assert len(drawn) > 40


def test_a_logprob_far_below_what_float32_exponentials_reach() -> None:
    """A hot temperature draws tokens whose raw probability underflows: still a finite logprob."""
    logits = np.array([[[0, -200, -300]]], np.float32)
    race = np.ones((1, race_size(3)), np.float32)
    race[0, 1] = 1e-6  # token 1 wins
    feeds = {"logits": logits, "race": race, "p": distribution(logits, 100)}
    made = sample("drawn", 3, feeds)
    assert made["tokens"].tolist() == [1]
    np.testing.assert_allclose(made["logprob"], [-200], atol=1e-4)


@pytest.mark.parametrize("V", [5, 1031])
def test_the_most_probable_tokens_are_listed(V: int) -> None:
    """Report 12: of the raw row, each as teacher forcing gives it."""
    logits = np.random.default_rng(V).normal(size=(1, 3, V)).astype(np.float32) * 4
    made = run("top_logprobs", V, {"logits": logits})
    raw = np.log(algorithm1.softmax(logits[0].astype(float)))
    n = min(V, 20)
    assert (made["ids"][:, :n] == np.argsort(-raw, axis=1)[:, :n]).all()
    np.testing.assert_allclose(made["values"][:, :n], -np.sort(-raw, axis=1)[:, :n], atol=1e-4)
    assert np.isneginf(made["values"][:, n:]).all()


# --- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("V", [5, 65, 1031])
def test_a_target_row_that_is_not_finite_shows_in_its_logprob(
    V: int, rule: str, bad: float
) -> None:
    for broken, row in itertools.product([0, V // 2, V - 1], range(3)):
        feeds = round_feeds(np.random.default_rng(broken), 2, V)
        steer(feeds, rule, 2, 2)
        clean = accept(rule, V, feeds)
        feeds["logits"][0, row, broken] = bad
        feeds["logits"][0, row, 1] = -np.inf  # a banned token must not hide it
        feeds["p"] = distribution(feeds["logits"], 0.8)
        made = accept(rule, V, feeds)
        n = int(made["n_accepted"][0])
        assert all(0 <= t < V for t in made["tokens"])
        if (
            rule == "block" and n < row
        ):  # the longest prefix looks ahead: another token came instead
            assert np.isfinite(made["logprob"][: n + 1]).all()
            continue
        assert row <= n, "the row before it was accepted"
        assert not np.isfinite(made["logprob"][row])
        assert np.array_equal(made["logprob"][:row], clean["logprob"][:row])


def test_rows_of_nothing_but_nan_or_banned_tokens_stay_inside_the_vocabulary() -> None:
    for V, value in itertools.product([3, 65, 1031], [np.nan, np.inf, -np.inf]):
        feeds = round_feeds(np.random.default_rng(0), 1, V)
        feeds["logits"][...] = value
        feeds["p"], feeds["scores"] = distribution(feeds["logits"]), padded(feeds["logits"][0])
        for rule in (*RULES, "edited"):
            made = accept(rule, V, feeds)
            assert all(0 <= t < V for t in made["tokens"])
            assert not np.isfinite(made["logprob"][0])
        for variant in ("greedy", "edited", "drawn"):
            made = sample(variant, V, feeds)
            assert 0 <= made["tokens"][0] < V
            assert not np.isfinite(made["logprob"][0])


def test_noise_of_nan_stays_inside_the_vocabulary() -> None:
    for V in (3, 65, 1031):
        feeds = round_feeds(np.random.default_rng(0), 1, V)
        feeds["race"][:] = feeds["uniform"][:] = np.nan
        for rule in SAMPLED:
            assert 0 <= accept(rule, V, feeds)["tokens"][0] < V
        assert 0 <= sample("drawn", V, feeds)["tokens"][0] < V


def test_a_logprob_is_nan_even_where_a_softmax_kernel_hides_it() -> None:
    """Some vector kernels clamp their argument, and a clamp by minimum and maximum drops NaN."""

    class LogSoftmax(OpRun):
        def _run(self, x: NDArray, axis: int | None = None) -> tuple[NDArray]:
            x = np.nan_to_num(x, nan=-88.0, posinf=88.0, neginf=-88.0)
            return (np.log(algorithm1.softmax(x)).astype(np.float32),)

    evaluator = ReferenceEvaluator(model("accept_greedy", 5), new_ops=[LogSoftmax])
    place = evaluator.output_names.index("logprob")
    for bad in (np.nan, np.inf):
        feeds = round_feeds(np.random.default_rng(0), 1, 5)
        feeds["logits"][0, 0, [1, 3]] = -np.inf, bad
        with np.errstate(all="ignore"):
            made = evaluator.run(None, {k: feeds[k] for k in evaluator.input_names})
        assert np.isnan(made[place][0])


def test_what_is_left_may_be_as_small_as_floats_go() -> None:
    """Rounding can leave a residual of 1e-38: its token is drawn, not one without any mass."""
    feeds = round_feeds(np.random.default_rng(0), 1, 130)
    feeds["p"][...] = 0
    feeds["p"][0, [0, 70]] = [1, 1.6e-38]
    feeds["q"][...] = 0
    feeds["q"][0, 0] = 1 + 2.0**-22  # a softmax may sum to this
    feeds["draft_tokens"][:], feeds["uniform"][:] = 0, BELOW_ONE
    feeds["race"][:] = 30  # divided by 1e-38 it is infinite in float32
    for rule in RATIO_RULES:
        made = accept(rule, 130, feeds)
        assert made["n_accepted"].tolist() == [0]
        assert made["tokens"].tolist() == [70, 0]


def test_a_residue_of_a_softmax_kernel_counts_as_nothing() -> None:
    """Some leave e^-87 where the exponential of -inf is 0: a draft there is refused at u = 0."""
    feeds = round_feeds(np.random.default_rng(0), 1, 5)
    feeds["p"][0, :5] = [1.0 - 1e-7, 1.6e-38, 1e-8, 1e-8, 1e-8]
    feeds["uniform"][:], feeds["draft_tokens"][:] = 0, 1
    feeds["q"][0, :5] = [0, 1e-30, 0, 0, 1]
    for rule in ("one_hot", "dense"):
        assert accept(rule, 5, feeds)["n_accepted"].tolist() == [0]


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_of_nan_leaves_the_law_alone(rule: str) -> None:
    """A drafting model that breaks down is refused in every row, and the row draws from p."""
    p, noise, counts = np.array(THREE[0], float), Noise(5), np.zeros(3)
    judge = Bound(f"accept_{rule}", 3, G=2, M=3)
    judge.x["logits"][:] = np.log(p)
    judge.x["p"][:, :3] = p
    judge.x["n_draft"][:] = 2
    judge.x["q"][0] = np.nan
    judge.x["q"][1, :3] = THREE[1]
    for start in range(3_000):
        judge.x["draft_tokens"][:] = start % 3, start // 3 % 3
        noise.uniform(judge.x["uniform"], start, 0)
        noise.exponential(judge.x["race"], start, 0)
        judge()
        assert judge.y["n_accepted"][0] == 0
        counts[judge.y["tokens"][0]] += 1
    result = fit(counts, p)
    assert result.ok, result


def test_what_lies_beyond_the_emitted_rows_changes_no_bit() -> None:
    """A later draft, or a shorter round, must not move an earlier row (greedy output would).

    Not so by blocks, which look at all drafts; there `n_draft` is part of the rule.
    """
    V = 1031
    for rule in ("greedy", "one_hot", "dense", "invariant"):
        feeds = round_feeds(np.random.default_rng(1), 4, V)
        steer(feeds, rule, 4, 2)
        full = accept(rule, V, feeds)
        spoil_unused(feeds, 3)
        feeds["n_draft"][0] = 3
        cut = accept(rule, V, feeds)
        for name, value in full.items():
            assert np.array_equal(value, cut[name]), name


# --- the race over a large vocabulary -------------------------------------------------------------


def test_the_race_draws_no_token_of_the_far_tail() -> None:
    """150k tokens at 1e-13 together weigh 1.5e-8: none in 1e5 draws (one in 700 such runs).

    float32 `standard_exponential` returns 0 often enough to draw them, several times in this race;
    the statement of the race in numpy takes the bulk, the graph the first 200.
    """
    V, peak, draws = 151_936, 77_777, 100_000
    weights = np.full(V, 1e-13)
    weights[peak] = 1
    drawer, noise = Bound("propose_drawn", V), Noise(13)
    drawer.x["p"][0, :V] = weights
    race, B = drawer.x["race"], race_size(V) - 16
    blocks, places = weights.reshape(16, B).sum(axis=0), weights.reshape(16, B)[:, peak % B]
    threshold = blocks[peak % B] / 37  # no exponential is longer: a block that is slower loses

    def tail_wins(e: NDArray) -> bool:
        return (e[:B].min() < blocks[0] / threshold and np.argmin(e[:B] / blocks) != peak % B) or (
            e[B:].min() < 37 * places[0] and np.argmin(e[B:] / places) != peak // B
        )

    assert B * 16 == V
    for start in range(draws):
        noise.exponential(race, start, 0, stream=Stream.SAMPLE)
        assert not tail_wins(race[0])
        if start < 200:
            drawer()
            assert drawer.y["token"][0] == peak
    rng = np.random.default_rng(13)
    zeros = (rng.standard_exponential(race.size, np.float32) for _ in range(draws // 4))
    assert any(tail_wins(e) for e in zeros), "the negative control must draw from the tail"


@pytest.mark.parametrize("V", [200, 6000])
def test_the_race_follows_its_weights_over_blocks_and_inside_them(V: int) -> None:
    """Equal weights, the last places of some blocks empty: each token as often as any other."""
    drawer, noise = Bound("propose_drawn", V), Noise(64)
    drawer.x["p"][0, :V] = 1 / V
    counts = np.zeros(V)
    for start in range(30_000):
        noise.exponential(drawer.x["race"], start, 0, stream=Stream.SAMPLE)
        drawer()
        counts[drawer.y["token"][0]] += 1
    result = fit(counts, np.full(V, 1 / V))
    assert result.ok, result
    result = fit(counts.reshape(-1, 40).sum(axis=0), np.full(40, 1 / 40))
    assert result.ok, result


# --- two races on the same numbers ----------------------------------------------------------------


@pytest.mark.parametrize("V", [70, 6000])
def test_races_on_the_same_numbers_agree_as_often_as_theory_says(V: int) -> None:
    """What rule `invariant` accepts: one race of p and one of q, by the graph."""
    rng, draws = np.random.default_rng(V), 4_000
    p, q = algorithm1.softmax(rng.normal(size=(2, V)) * 3)
    drawers, noise = (Bound("propose_drawn", V), Bound("propose_drawn", V)), Noise(1)
    for drawer, weights in zip(drawers, (p, q), strict=True):
        drawer.x["p"][0, :V] = weights
    agreed = 0
    for position in range(draws):
        for drawer in drawers:
            noise.of_position(drawer.x["race"], position)
            drawer()
        agreed += int(drawers[0].y["token"][0] == drawers[1].y["token"][0])
    expected = coupling.agreement_in_two_heats(*padded_pair(p, q), blocks_of(V))
    # Binomial: 5 standard deviations are less than one in a million.
    assert abs(agreed / draws - expected) < 5 * np.sqrt(expected * (1 - expected) / draws)
    assert expected < np.minimum(p, q).sum(), "rule `reject` accepts more"


def test_two_heats_lose_little_against_one() -> None:
    """Rows as of a language model, ids ordered by frequency. Blocks of neighbours lose more."""
    V, rng = 50257, np.random.default_rng(2)
    lost, lost_by_neighbours = [], []
    for _ in range(6):
        logits = -1.2 * np.log(np.arange(1, V + 1)) + rng.normal(size=V) * 1.5
        rows = algorithm1.softmax(np.stack([logits, logits + rng.normal(size=V) * 0.6]))
        flat = float(coupling.agreement(*rows))
        pair = padded_pair(*rows)
        neighbours = np.arange(len(pair[0])).reshape(-1, 64)
        lost.append(1 - coupling.agreement_in_two_heats(*pair, blocks_of(V)) / flat)
        kept = coupling.agreement_in_two_heats(*pair, neighbours)
        lost_by_neighbours.append(1 - kept / flat)
    assert np.mean(lost) < 0.02
    assert np.mean(lost_by_neighbours) > 0.04


def blocks_of(V: int) -> NDArray[np.int64]:
    """`[B, n]` ids of the blocks of the first heat."""
    return np.arange(padded_vocabulary(V)).reshape(-1, race_blocks(V)).T


def padded_pair(p: NDArray, q: NDArray) -> tuple[NDArray, NDArray]:
    """Float64 rows of V64, what is added without noticeable weight."""
    width = padded_vocabulary(len(p)) - len(p)
    return np.pad(p, (0, width), constant_values=1e-300), np.pad(
        q, (0, width), constant_values=1e-300
    )

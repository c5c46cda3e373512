"""What holds for every round, however awkward: laws of the rules over rounds drawn at random."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_export.runtime.noise import Noise, race_size
from tests import algorithm1
from tests.sampling_rounds import RATIO_RULES, SAMPLED, rounds
from tests.sampling_run import (
    RULES,
    Arrays,
    accept,
    distribution,
    ids,
    round_feeds,
    run,
    sample,
)


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
    """vllm 17876: of the raw row, each as teacher forcing gives it."""
    logits = np.random.default_rng(V).normal(size=(1, 3, V)).astype(np.float32) * 4
    made = run("top_logprobs", V, {"logits": logits})
    raw = np.log(algorithm1.softmax(logits[0].astype(float)))
    n = min(V, 20)
    assert (made["ids"][:, :n] == np.argsort(-raw, axis=1)[:, :n]).all()
    np.testing.assert_allclose(made["values"][:, :n], -np.sort(-raw, axis=1)[:, :n], atol=1e-4)
    assert np.isneginf(made["values"][:, n:]).all()

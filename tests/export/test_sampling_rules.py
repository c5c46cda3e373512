"""The rules of acceptance, number by number: against the papers' algorithms, and at their edges.

Their law over several rounds is in test_sampling_law. p = target, q = draft.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests import algorithm1
from tests.sampling_rounds import RATIO_RULES, SAMPLED, spoil_unused, steer
from tests.sampling_run import (
    PLACE,
    RULES,
    Arrays,
    accept,
    distribution,
    padded,
    refer,
    round_feeds,
    run,
    sample,
)


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
        one = {name: feeds[name][:1] for name in ("p", "scores", "race", *PLACE)}
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
    """lattice 280: a tie broken last in one place and first in another changes greedy output."""
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
    """vllm 7252; where the draft draws, its distribution has no weight there."""
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

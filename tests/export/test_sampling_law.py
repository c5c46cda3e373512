"""The law of what is emitted over three rounds and more, by the graphs and the product's noise.

A toy target and draft, Markov chains over a few tokens, decode speculatively: prefill, then rounds
of propose and accept, with every group of changes on both. What comes out is held against the law
of the target after the same changes, by chi-square. Rules that are wrong must fail the same test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from spec_export.engines.graphs import Filters as FilterWay
from spec_export.engines.graphs import WeighingKey
from spec_export.runtime.noise import Noise, Stream
from tests import weighing
from tests.chi_square import Fit, fit
from tests.sampling_run import (
    Bound,
    distribution,
    edit_feeds,
    filter_feeds,
    floats,
    padded,
    run,
)
from tests.weighing import Edits, Filters

THREE = ([0.5, 0.3, 0.2], [0.4, 0.2, 0.4])
P_CHAIN = np.array([THREE[0], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]])
Q_CHAIN = np.array([THREE[1], [0.6, 0.3, 0.1], [0.7, 0.1, 0.2]])

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Changes:
    """What a request changes of a distribution, and the graph that does it.

    Attributes:
        way: of the filters' graphs.
        allowed: tokens that may come after a token, by it; None: no mask.
    """

    temperature: float = 1.0
    way: FilterWay | None = None
    filters: Filters = field(default_factory=Filters)
    edits: Edits | None = None
    allowed: NDArray[np.bool_] | None = None

    @property
    def graph(self) -> str:
        edits, mask = self.edits is not None, self.allowed is not None
        name = WeighingKey("target", True, edits, mask).name
        return f"{name}+{self.way}" if self.way else name

    def law(self, logits: NDArray, text: Tokens) -> NDArray:
        """Of the token after `text`, whose first token is the prompt: as defined."""
        row = logits.astype(np.float64)
        if self.edits is not None:
            row = weighing.edited(row, list(text[:1]), list(text[1:]), self.edits)
        if self.allowed is not None:
            row = np.where(self.allowed[text[-1]], row, -np.inf)
        p = distribution(row[None, None].astype(np.float32), self.temperature)[0]
        return weighing.filtered(p, self.filters)[: len(row)].astype(np.float64)


class Toy:
    """A pair under a rule.

    What is compared is the first `length` tokens, of at least three rounds: 3^5 = 243 cells.

    Args:
        rule: of `accept_*`.
        draft: `drawn`, or `greedy`: the most probable token.
        changes: to both distributions.
    """

    chains = P_CHAIN, Q_CHAIN
    gamma = 2
    length = 5
    samples = 4_000  # that show a wrong rule
    schedule = (2, 1, 2, 0)  # what a round drafts may depend on anything known before it

    def __init__(self, rule: str, draft: str = "drawn", changes: Changes | None = None) -> None:
        self.rule, self.draft, self.changes = rule, draft, changes or Changes()
        self.V, G = len(self.chains[0]), self.gamma
        V = self.V
        self.log_p, self.log_q = (np.log(chain).astype(np.float32) for chain in self.chains)
        self.weighed: dict[tuple[object, ...], NDArray] = {}
        self.accept = Bound(f"accept_{rule}", V, G=G, M=G + 1)
        self.sample, self.propose = Bound("sample_drawn", V), Bound("propose_drawn", V)
        self.drafted = self.accepted = 0

    def p(self, text: Sequence[int], drafts: Sequence[int] = ()) -> NDArray:
        """The target's distribution after both, by the graph."""
        return self._weigh("p", self.log_p, tuple(text), list(drafts))

    def q(self, text: Sequence[int], drafts: Sequence[int] = ()) -> NDArray:
        """The draft's."""
        return self._weigh("q", self.log_q, tuple(text), list(drafts))

    def _weigh(self, model: str, logits: NDArray, text: Tokens, drafts: list[int]) -> NDArray:
        """One row; the graphs give it the same bits among others, which is shown where they are."""
        last = (*text, *drafts)[-1]
        edits, allowed = self.changes.edits, self.changes.allowed
        key = (model, last) if edits is None else (model, text, *drafts)
        if key not in self.weighed:
            feeds = filter_feeds(logits[last][None, None], self.changes.filters)
            feeds["temperature"] = floats(self.changes.temperature)
            if edits is not None:
                held = (drafts + [-1] * self.gamma)[: self.gamma]
                prompt, output = list(text[:1]), list(text[1:])
                feeds |= edit_feeds(self.V, prompt, output, held, edits, len(drafts))
            if allowed is not None:
                bits = padded(allowed[last][None]) > 0
                feeds["allowed"] = np.packbits(bits, axis=1, bitorder="little")
            made = run(self.changes.graph, self.V, feeds)
            assert not made.get("overflow", np.zeros(1))[0], "the list holds everything"
            self.weighed[key] = made["p"][0]
        return self.weighed[key]

    def sequence(self, noise: Noise, start: int) -> Tokens:
        """The first tokens after token 0, of three rounds or more."""
        text = [0, self.plain(noise, start + 1, (0,))]
        rounds = 0
        while len(text) <= self.length or rounds < 3:
            self.round(noise, start + len(text), text, self.schedule[rounds % 4])
            rounds += 1
        return tuple(text[1 : self.length + 1])

    def plain(self, noise: Noise, start: int, text: Tokens) -> int:
        self.sample.x["p"][:] = self.p(text)
        if self.rule == "invariant":
            noise.of_position(self.sample.x["race"], start)
        else:
            noise.exponential(self.sample.x["race"], start, 0, stream=Stream.RESIDUAL)
        self.sample()
        return int(self.sample.y["tokens"][0])

    def round(self, noise: Noise, start: int, text: list[int], n_draft: int) -> None:
        x, y = self.accept.x, self.accept.y
        drafts: list[int] = []
        for i in range(n_draft):
            is_last = i + 1 < n_draft and self.is_unsure([*text, *drafts])
            q = self.q_of_draft(text, drafts)
            token = self.drawn(noise, start, i, q)
            if self.is_cut([*text, *drafts], token):
                break
            if "q" in x:
                x["q"][i] = q
            drafts.append(token)
            if is_last:
                break
        n_draft = len(drafts)
        x["draft_tokens"][:] = (drafts + [-1] * self.gamma)[: self.gamma]
        x["n_draft"][0] = n_draft
        x["p"][:] = np.nan
        for row in range(n_draft + 1):
            x["p"][row] = self.p(text, drafts[:row])
        self.noise_of_accept(noise, start)
        self.accept()
        n_accepted = int(y["n_accepted"][0])
        self.drafted, self.accepted = self.drafted + n_draft, self.accepted + n_accepted
        text += [int(t) for t in y["tokens"][: n_accepted + 1]]

    def q_of_draft(self, text: list[int], drafts: list[int]) -> NDArray:
        return self.q(text, drafts)

    def is_unsure(self, text: list[int]) -> bool:
        """Whether no draft follows the one after `text`, which is about to be drawn."""
        return False

    def is_cut(self, text: list[int], draft: int) -> bool:
        """Never for the value of a draft."""
        return False

    def drawn(self, noise: Noise, start: int, row: int, q: NDArray) -> int:
        if self.draft == "greedy":
            return int(q.argmax())
        self.propose.x["p"][:] = q
        self.noise_of_propose(noise, start, row)
        self.propose()
        return int(self.propose.y["token"][0])

    def noise_of_propose(self, noise: Noise, start: int, row: int) -> None:
        if self.rule == "invariant":
            noise.of_position(self.propose.x["race"], start + row)
        else:
            noise.exponential(self.propose.x["race"], start, row, stream=Stream.PROPOSE)

    def noise_of_accept(self, noise: Noise, start: int) -> None:
        x = self.accept.x
        if self.rule == "invariant":
            for row in range(self.gamma + 1):
                noise.of_position(x["race"][row], start + row)
            return
        noise.uniform(x["uniform"], start, 0, stream=Stream.ACCEPT)
        noise.exponential(x["race"], start, 0, stream=Stream.RESIDUAL)

    def law(self) -> NDArray:
        cells = np.zeros((self.V,) * self.length)

        def grow(text: Tokens, mass: float) -> None:
            if len(text) > self.length:
                cells[text[1:]] = mass
                return
            for token, chance in enumerate(self.changes.law(self.log_p[text[-1]], text)):
                if chance:
                    grow((*text, token), mass * chance)

        grow((0,), 1.0)
        return cells

    def fit(self, samples: int, *, seed: int = 2024) -> Fit:
        noise, counts = Noise(seed), np.zeros((self.V,) * self.length)
        for sample in range(samples):
            counts[self.sequence(noise, 64 * sample)] += 1
        law = self.law()
        return fit(counts, law / law.sum())


RULES = [
    ("one_hot", "greedy"),
    ("one_hot", "drawn"),
    ("dense", "drawn"),
    ("block", "drawn"),
    ("invariant", "drawn"),
    ("invariant", "greedy"),
]
ALLOWED = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]], bool)  # no token twice in a row
MIXED = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1]], bool)
CHANGES = {
    "temperature": Changes(0.6),
    "top-k": Changes(way="top", filters=Filters(2)),
    "top-p": Changes(way="nucleus", filters=Filters(0, 0.75)),
    "min-p": Changes(way="any", filters=Filters(0, 1, 0.3)),
    "all three": Changes(0.8, "any", Filters(2, 0.85, 0.2)),
    "typical": Changes(way="typical", filters=Filters(typical_p=0.25)),
    "penalties": Changes(edits=Edits(1.5, 0.3, 0.4, 0, {1: 0.5})),
    "n-gram": Changes(edits=Edits(ngram=3, end_ids=(2,), end_from=3)),
    "grammar": Changes(allowed=ALLOWED),
    "everything": Changes(
        0.9, "top", Filters(2, 0.9, 0.1), Edits(1.2, 0.2, 0.3), ALLOWED | np.eye(3, dtype=bool)
    ),
}


@pytest.mark.parametrize(("rule", "draft"), RULES)
def test_the_emitted_law_is_the_targets(rule: str, draft: str) -> None:
    result = Toy(rule, draft).fit(5_000)
    assert result.ok, result


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("rule", "draft"), RULES)
def test_the_emitted_law_is_that_of_the_changed_target(rule: str, draft: str, change: str) -> None:
    result = Toy(rule, draft, CHANGES[change]).fit(700)
    assert result.ok, result


def test_the_law_of_a_change_is_not_that_of_another() -> None:
    """So many samples tell the changes apart: each fails the test of its neighbour."""
    for name, other in itertools.pairwise(CHANGES):
        toy = Toy("dense", "drawn", CHANGES[name])
        toy.law = Toy("dense", "drawn", CHANGES[other]).law  # type: ignore[method-assign]
        result = toy.fit(600)
        assert not result.ok, (name, other, result)


# --- wrong rules ----------------------------------------------------------------------------------


class DrawsFromP(Toy):
    """A refused row draws from p, not from what is left of it."""

    def round(self, noise: Noise, start: int, text: list[int], n_draft: int) -> None:
        super().round(noise, start, text, n_draft)
        n = int(self.accept.y["n_accepted"][0])
        if n < n_draft:
            self.sample.x["p"][:] = self.accept.x["p"][n]
            self.sample.x["race"][:] = self.accept.x["race"]
            self.sample()
            text[-1] = int(self.sample.y["tokens"][0])


class DrawsTheTokensResidual(Toy):
    """vllm-ascend 7807: block verification, but what is left is max(p - q, 0)."""

    chains = (
        np.array([[0.31, 0.58, 0.11], [0.63, 0.35, 0.02], [0.51, 0.47, 0.02]]),
        np.array([[0.02, 0.96, 0.02], [0.38, 0.02, 0.60], [0.19, 0.37, 0.44]]),
    )
    schedule, samples = (2, 2, 2, 2), 6_000

    def round(self, noise: Noise, start: int, text: list[int], n_draft: int) -> None:
        super().round(noise, start, text, n_draft)
        x, n = self.accept.x, int(self.accept.y["n_accepted"][0])
        left = np.maximum(x["p"][n] - x["q"][min(n, self.gamma - 1)], 0)
        if n < n_draft and left.any():
            self.sample.x["p"][:] = left
            self.sample.x["race"][:] = x["race"]
            self.sample()
            text[-1] = int(self.sample.y["tokens"][0])


class ReusesUniformInTheRace(Toy):
    """vllm-ascend 16370: the uniform that refused a draft also draws its replacement."""

    def noise_of_accept(self, noise: Noise, start: int) -> None:
        super().noise_of_accept(noise, start)
        self.accept.x["race"][0, 1:3] = -np.log1p(-self.accept.x["uniform"])


class ReusesNumbersInEveryRound(Toy):
    """The key lacks the round. One round alone follows the law."""

    def noise_of_accept(self, noise: Noise, start: int) -> None:
        super().noise_of_accept(noise, start // 64)


class KeysBlocksByPosition(Toy):
    """Every number belongs to a position: a block that ended early has looked at the next ones'."""

    chains = np.array([[1, 2], [1, 2]]) / 3, np.array([[2, 1], [2, 1]]) / 3
    schedule = (2, 2, 2, 2)

    def noise_of_accept(self, noise: Noise, start: int) -> None:
        x = self.accept.x
        for row in range(self.gamma):
            noise.uniform(x["uniform"][row : row + 1], start + row, 0, stream=Stream.ACCEPT)
        noise.exponential(x["race"], start, 0, stream=Stream.RESIDUAL)

    def noise_of_propose(self, noise: Noise, start: int, row: int) -> None:
        noise.exponential(self.propose.x["race"], start + row, 0, stream=Stream.PROPOSE)


class JudgesCertainDraftsWithDenseQ(Toy):
    """The draft is the likeliest token of q, yet judged as if drawn from q."""

    def drawn(self, noise: Noise, start: int, row: int, q: NDArray) -> int:
        return int(q.argmax())


class CutsByTheGrammar(Toy):
    """A draft that the grammar forbids is cut, after it was drawn from a q without the grammar."""

    def q_of_draft(self, text: list[int], drafts: list[int]) -> NDArray:
        return padded(Q_CHAIN[[*text, *drafts][-1]])

    def is_cut(self, text: list[int], draft: int) -> bool:
        assert self.changes.allowed is not None
        return not self.changes.allowed[text[-1]][draft]


class KeepsForbiddenDrafts(CutsByTheGrammar):
    """Right: it stays, and p = 0 refuses it. A draft without the grammar only costs acceptance."""

    def is_cut(self, text: list[int], draft: int) -> bool:
        return False


class KeepsTheDraftsRace(Toy):
    """Under `invariant`: the target draws with numbers of the round in place of the position's."""

    def noise_of_accept(self, noise: Noise, start: int) -> None:
        super().noise_of_accept(noise, start)
        self.accept.x["race"][1:] = self.accept.x["race"][:1]


WRONG: dict[str, Callable[[], Toy]] = {
    "draws from p": lambda: DrawsFromP("dense"),
    "draws from p, one-hot": lambda: DrawsFromP("one_hot", "greedy"),
    "draws from p, block": lambda: DrawsFromP("block"),
    "the token's residual, block": lambda: DrawsTheTokensResidual("block"),
    "uniform in the race": lambda: ReusesUniformInTheRace("dense"),
    "uniform in the race, one-hot": lambda: ReusesUniformInTheRace("one_hot", "greedy"),
    "numbers of round one": lambda: ReusesNumbersInEveryRound("dense"),
    "numbers of round one, one-hot": lambda: ReusesNumbersInEveryRound("one_hot", "greedy"),
    "numbers of round one, block": lambda: ReusesNumbersInEveryRound("block"),
    "block by position": lambda: KeysBlocksByPosition("block"),
    "certain drafts, dense q": lambda: JudgesCertainDraftsWithDenseQ("dense"),
    "certain drafts, block": lambda: JudgesCertainDraftsWithDenseQ("block"),
    "cut by the grammar": lambda: CutsByTheGrammar("dense", "drawn", CHANGES["grammar"]),
    "one race for all rows": lambda: KeepsTheDraftsRace("invariant"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_fails_the_same_test(wrong: str) -> None:
    """The test of the test: each of these faults must be seen."""
    toy = WRONG[wrong]()
    result = toy.fit(toy.samples)
    assert not result.ok, result


@pytest.mark.parametrize("wrong", [DrawsTheTokensResidual, KeysBlocksByPosition])
def test_blocks_done_right_pass_where_those_fail(wrong: type[Toy]) -> None:
    class Right(Toy):
        chains, schedule = wrong.chains, wrong.schedule

    result = Right("block").fit(wrong.samples)
    assert result.ok, result


def test_one_round_does_not_see_numbers_used_again() -> None:
    toy = ReusesNumbersInEveryRound("dense")
    toy.length = 2  # the token after prefill and the first of round one
    assert toy.fit(6_000).ok


def test_a_forbidden_draft_that_stays_is_refused_and_lossless() -> None:
    result = KeepsForbiddenDrafts("dense", "drawn", CHANGES["grammar"]).fit(4_000)
    assert result.ok, result


def test_cutting_by_a_grammar_emits_what_the_oracle_says() -> None:
    """p = (.5, .5, 0) under the grammar, q = (.1, .6, .3) without: token 0 has .35, not .5."""
    p, q, forbidden = np.array([0.5, 0.5, 0.0]), np.array([0.1, 0.6, 0.3]), 2
    emitted = np.zeros(3)
    for d in range(3):
        if d == forbidden:
            emitted += q[d] * p
            continue
        kept = min(1.0, p[d] / q[d])
        left = np.maximum(p - q, 0)
        emitted[d] += q[d] * kept
        emitted += q[d] * (1 - kept) * left / left.sum()
    assert emitted[0] == pytest.approx(0.35)


# --- rule `invariant` -----------------------------------------------------------------------------


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_under_invariant_nothing_of_the_draft_is_seen(change: str | None) -> None:
    """The same seed gives the same text for any draft, any number of drafts, and for none."""
    changes = CHANGES[change] if change else Changes()

    class Plain(Toy):
        schedule = (0, 0, 0, 0)

    class Full(Toy):
        schedule = (2, 2, 2, 2)

    class Hostile(Full):
        def drawn(self, noise: Noise, start: int, row: int, q: NDArray) -> int:
            return int(q[: self.V].argmin())

    decoders = [Plain("invariant", "drawn", changes)]
    decoders += [
        kind("invariant", draft, changes) for kind in (Toy, Full) for draft in ("drawn", "greedy")
    ]
    decoders.append(Hostile("invariant", "drawn", changes))
    for seed in range(40):
        texts = {decoder.sequence(Noise(seed), 10 * seed) for decoder in decoders}
        assert len(texts) == 1
    assert decoders[0].drafted == 0
    assert decoders[3].accepted > 0


def test_under_other_rules_the_draft_is_seen() -> None:
    """Negative control, and why the rule exists: the same seed, another draft, another text."""
    decoders = [Toy("dense", "drawn"), Toy("one_hot", "greedy")]
    texts = [{decoder.sequence(Noise(seed), 1) for decoder in decoders} for seed in range(20)]
    assert any(len(found) == 2 for found in texts)


def test_the_shared_race_makes_the_draft_guess_well() -> None:
    """The draft draws with the target's own numbers: far more agree than by chance."""
    toy = Toy("invariant")
    for sample in range(1_500):
        toy.sequence(Noise(1), 64 * sample)
    chance = (P_CHAIN * Q_CHAIN).sum(axis=1).max()
    assert toy.accepted / toy.drafted > chance + 0.1


def test_noise_that_ignores_its_seed_is_seen() -> None:
    """vllm 6038, 13196 and TensorRT 4497: noise is an input, and keyed by it."""
    toy = Toy("invariant")
    assert len({toy.sequence(Noise(seed), 0) for seed in range(50)}) > 20

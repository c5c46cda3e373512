"""Drawing tokens through the whole runtime: seeds, and the law of what comes out.

The law of every sampling graph over three rounds is shown elsewhere on toys. Here the tiny pair
runs as it is used, noise and caches included, and the joint law of its next three tokens is held
against the target's own, which is computed exactly from its logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from spec_export.engines.passes import PassRunner
from spec_export.runtime import OpenedBundle, Sampling, Session
from spec_export.runtime.sampling import Rule
from tests.chi_square import Fit, fit
from tests.decoding import decode

PROMPT = "And the king said unto the king, And the king"
TEXTS = 1500
FIRST, SECOND, THIRD = 6, 4, 2  # most probable tokens that get cells of their own, by position
Cell = tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """Probabilities of cells; a cell is what a text's first three tokens begin with."""

    cells: dict[Cell, float]

    def cell_of(self, tokens: Sequence[int]) -> Cell:
        """The cell that names most of the tokens; -1 stands for any token without a cell."""
        for known in range(3, -1, -1):
            cell = (*tokens[:known], -1) if known < 3 else tuple(tokens)
            if cell in self.cells:
                return cell
        raise AssertionError(tokens)

    def fit(self, texts: Counter[Cell]) -> Fit:
        counts: Counter[Cell] = Counter()
        for tokens, times in texts.items():
            counts[self.cell_of(tokens)] += times
        return fit([counts[cell] for cell in self.cells], list(self.cells.values()))


def exact_law(opened: OpenedBundle, prompt: list[int]) -> Law:
    """The target's law of the next three tokens at temperature 1, in about 80 cells."""
    runner = PassRunner(opened.device, opened.target, opened.manifest.models["target"])
    runner.prefill(np.array(prompt))

    def next_token(*tokens: int) -> np.ndarray:
        row = len(tokens)
        passed = np.array([prompt[-1], *tokens])
        logits = runner.run("verify", passed, len(prompt) - 1, np.array([row]))[0]
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return np.asarray(weights / weights.sum())

    def top(law: np.ndarray, count: int) -> list[int]:
        return [int(token) for token in np.argsort(-law)[:count]]

    cells: dict[Cell, float] = {}
    first = next_token()
    for a in top(first, FIRST):
        second = next_token(a)
        for b in top(second, SECOND):
            third = next_token(a, b)
            for c in top(third, THIRD):
                cells[a, b, c] = first[a] * second[b] * third[c]
            cells[a, b, -1] = first[a] * second[b] * (1 - third[top(third, THIRD)].sum())
        cells[a, -1] = first[a] * (1 - second[top(second, SECOND)].sum())
    cells[(-1,)] = 1 - first[top(first, FIRST)].sum()
    return Law(cells)


def drawn(
    session: Session,
    prompt: list[int],
    n: int,
    texts: int,
    rule: Rule = "reject",
    judged: Counter[bool] | None = None,
    temperature: float = 1.0,
) -> Counter[Cell]:
    """The next three tokens under seeds 0, 1, ...; the prompt is taken in once.

    Into `judged`: how many rounds with drafts accepted all of them, and how many did not.
    """
    session.begin(Sampling(temperature, rule=rule))
    session.prefill(prompt)
    found: Counter[Cell] = Counter()
    judged = Counter() if judged is None else judged
    for seed in range(texts):
        session.rewind(len(prompt))
        session._rounds.sampling.begin(Sampling(temperature, seed, rule=rule))
        while len(session.history) < len(prompt) + 3:
            result = session.round(n)
            if result.n_draft:
                judged[result.n_accepted == result.n_draft] += 1
        found[tuple(session.history[len(prompt) : len(prompt) + 3])] += 1
    return found


@pytest.mark.parametrize(
    ("draft", "n", "rule"),
    [
        ("pair", 2, "reject"),
        ("pair", 2, "block"),
        ("pair", 2, "invariant"),
        ("ngram", 2, "reject"),
        ("none", 0, "reject"),
    ],
)
def test_the_law_of_the_next_tokens_is_the_targets(draft, n, rule, build_tiny, open_once):
    """Up to three consecutive rounds, with refusals at every place."""
    opened = open_once(build_tiny(draft))
    prompt = opened.text.encode(PROMPT)
    law = exact_law(open_once(build_tiny("pair")), prompt)
    assert len(law.cells) > 50
    judged: Counter[bool] = Counter()
    result = law.fit(drawn(Session(opened), prompt, n, TEXTS, rule, judged))
    assert result.ok, result
    assert draft == "none" or min(judged[True], judged[False]) >= 10, "both ways were to be taken"


def test_another_law_is_told_apart(build_tiny, open_once):
    """Negative control: accepting every draft draws from the drafting model's law, a good one."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(PROMPT)
    session = Session(opened)
    calls = session._rounds_for(Sampling(1.0, rule="reject")).sampling

    def accept_all(*place: int) -> None:
        draw(*place)
        calls._uniform_buffer.host.fill(0)

    draw, calls.draw = calls.draw, accept_all
    result = exact_law(opened, prompt).fit(drawn(session, prompt, 2, 500))
    assert not result.ok, result


def test_another_temperature_is_told_apart(build_tiny, open_once):
    """Negative control: the target's law a little flatter."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(PROMPT)
    texts = drawn(Session(opened), prompt, 0, TEXTS, temperature=1.3)
    result = exact_law(open_once(build_tiny("pair")), prompt).fit(texts)
    assert not result.ok, result


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
def test_a_seed_gives_its_text_and_another_seed_another(draft, build_tiny, open_once):
    """vllm 6038, 13196: the seed was ignored."""
    opened = open_once(build_tiny(draft))
    prompt = opened.text.encode(PROMPT)
    session = Session(opened)

    def text(seed: int, where: Session) -> list[int]:
        sampling = Sampling(1.0, seed)
        return decode(where, prompt, max_tokens=30, ignore_end=True, sampling=sampling).tokens

    first = {seed: text(seed, session) for seed in (0, 1, 2, 2**70)}
    for seed in reversed(first):
        assert text(seed, session) == text(seed, Session(opened)) == first[seed]
    assert len({tuple(tokens) for tokens in first.values()}) == len(first)


def test_temperature_goes_from_the_best_token_to_all_of_them(build_tiny, open_once):
    """A temperature near 0 is the greedy text; a large one draws ids from everywhere."""
    opened = open_once(build_tiny("pair"))
    prompt = opened.text.encode(PROMPT)
    greedy = decode(opened, prompt, max_tokens=30, ignore_end=True).tokens
    cold = decode(opened, prompt, max_tokens=30, ignore_end=True, sampling=Sampling(1e-4, 3))
    assert cold.tokens == greedy
    hot = decode(opened, prompt, max_tokens=80, ignore_end=True, sampling=Sampling(1e4, 3))
    assert len(set(hot.tokens)) > 60  # 80 uniform draws out of 1031 hit 77 different ones

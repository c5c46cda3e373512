"""Passes counted without decoding are those that decoding takes."""

from __future__ import annotations

import numpy as np
import pytest

from spec_export.calibration.estimate import trials_of
from spec_export.calibration.evidence import replay
from spec_export.calibration.measure import Task, decode_rounds
from spec_export.calibration.precision_reading import plain_text
from spec_export.calibration.prompts import Prompt, encode_prompts
from spec_export.calibration.replays import passes_along, passes_of_lookup
from spec_export.calibration.theory import expected_tokens
from spec_export.runtime import Sampling, Session


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_a_constant_chance_gives_the_tokens_of_equation_1(alpha, gamma):
    """arXiv 2211.17192, Equation 1; a text of 20,000 tokens ends inside a round once."""
    counted = passes_along([np.full(20_000, alpha)]).count(gamma)
    tokens_a_pass = counted.tokens / counted.passes[gamma]
    assert tokens_a_pass == pytest.approx(expected_tokens(alpha, gamma), rel=1e-3)


def test_chances_that_differ_give_the_passes_of_simulated_texts():
    """Within four standard errors of 4,000 simulations; a constant chance of their mean is not."""
    rng = np.random.default_rng(5)
    beta = np.where(np.arange(60) % 20 < 10, 0.95, 0.1)
    gamma, simulated = 4, []
    for _ in range(4000):
        at = rounds = 0
        while at < len(beta):
            kept = 0
            while kept < gamma and at + kept < len(beta) and rng.random() < beta[at + kept]:
                kept += 1
            at += kept + 1
            rounds += 1
        simulated.append(rounds)
    error = np.std(simulated) / np.sqrt(len(simulated))
    found = passes_along([beta]).count(gamma).passes[gamma]
    assert abs(found - np.mean(simulated)) < 4 * error
    flat = passes_along([np.full(60, beta.mean())]).count(gamma).passes[gamma]
    assert abs(flat - np.mean(simulated)) > 8 * error


def test_without_drafts_there_is_a_pass_a_token():
    counted = passes_along([np.full(7, 0.5), np.full(5, 0.5)]).count(0)
    assert counted.tokens == 12 and counted.passes == {0: 12.0}


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_look_up_walked_along_a_text_takes_the_passes_that_decoding_takes(
    open_once, tiny_ngram_bundle, gamma
):
    """At temperature 0, where the text is the same; the walk knows the text alone."""
    opened = open_once(tiny_ngram_bundle)
    prompts = [Prompt("all", text) for text in ("In the beginning", "And it came to pass")]
    ids = tuple(map(tuple, encode_prompts(opened, prompts)))
    task = Task(tuple(prompts), ids, 40, Sampling())
    session = Session(opened)
    texts, decoded = [], []
    for prompt in ids:
        text = plain_text(session, prompt, task)
        texts.append((text, len(prompt)))
        decoded.append(replay(decode_rounds(session, prompt, task).rounds, gamma))
    walked = passes_of_lookup(texts).count(gamma)
    passes: dict[int, int] = {}
    for one in decoded:
        for r in one:
            passes[r.n_draft] = passes.get(r.n_draft, 0) + 1
    assert walked.tokens == sum(len(text) - start - 1 for text, start in texts)
    assert walked.passes == pytest.approx(passes, abs=2)  # the last round may reach past the limit
    trials = trials_of([r for one in decoded for r in one])
    assert trials.accepted > 0


def test_drafts_that_no_text_confirms_count_neither_way():
    """A text that ends inside a round says nothing of the drafts behind its end."""
    found = passes_of_lookup([([1, 2, 3, 1, 2, 3], 3)])
    assert found.alpha == 1.0
    assert passes_of_lookup([([1, 2, 3, 4], 3)]).alpha is None

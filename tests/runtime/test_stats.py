"""Counting: literal rounds, and the figures made of them."""

from __future__ import annotations

import pytest

from spec_export.runtime import Stats
from spec_export.runtime.stats import added_up


def counted(*rounds: tuple[int, int, int], gamma: int = 4) -> Stats:
    """Statistics after a first token and rounds of (n_draft, n_accepted, kept)."""
    stats = Stats(gamma)
    stats.emitted = 1
    for n_draft, n_accepted, kept in rounds:
        stats.count_round(n_draft, n_accepted, kept)
    return stats


def test_whole_rounds():
    stats = counted((4, 4, 5), (4, 1, 2), (4, 0, 1), (0, 0, 1))
    assert (stats.emitted, stats.rounds, stats.plain_steps) == (10, 3, 1)
    assert (stats.drafted, stats.accepted, stats.rejections) == (12, 5, 2)
    assert stats.accepted_per_position == [2 / 3, 1 / 3, 1 / 3, 1 / 3]
    assert stats.alpha == 5 / 7
    assert stats.tokens_per_round == 9 / 4


@pytest.mark.parametrize(
    ("n_accepted", "kept", "drafted", "accepted", "rejections"),
    [
        (4, 5, 4, 4, 0),  # no stop, all accepted
        (4, 4, 4, 4, 0),  # stop on the last draft: only the bonus is cut off
        (4, 2, 2, 2, 0),  # stop inside
        (2, 3, 4, 2, 1),  # no stop, or one on the token drawn after the refusal, which is shown
        (2, 2, 2, 2, 0),  # stop on the last accepted draft: the refusal is past the end
        (2, 1, 1, 1, 0),
        (0, 1, 4, 0, 1),
    ],
)
def test_what_a_stop_cut_off_is_counted_nowhere(n_accepted, kept, drafted, accepted, rejections):
    """vllm 56101, sglang 39826: usage and acceptance counted tokens past the end.

    Drafts that were cut off used to count as drafted and not accepted, so that a draft that was
    right every time had an acceptance per position below 1.
    """
    stats = counted((4, n_accepted, kept))
    assert stats.emitted == 1 + kept
    assert (stats.drafted, stats.accepted, stats.rejections) == (drafted, accepted, rejections)
    assert sum(stats.drafted_at) == drafted and sum(stats.accepted_at) == accepted


def test_nothing_tested_has_no_share():
    stats = counted((0, 0, 1))
    assert stats.alpha is None
    assert stats.accepted_per_position == [None] * 4
    assert Stats(2).tokens_per_round is None and Stats(2).tokens_per_s is None


def test_texts_add_up():
    """A text's first token belongs to no pass: three texts have three of them."""
    texts = [counted((4, 4, 5)), counted((4, 1, 2), (4, 0, 1)), counted((0, 0, 1))]
    for text, ttft_ms in zip(texts, (10.0, 20.0, 60.0), strict=True):
        text.ttft_ms, text.decode_ms = ttft_ms, 100.0
    total = added_up(texts)
    assert (total.texts, total.emitted, total.rounds, total.plain_steps) == (3, 12, 3, 1)
    assert (total.drafted, total.accepted, total.rejections) == (12, 5, 2)
    assert total.accepted_per_position == [2 / 3, 1 / 3, 1 / 3, 1 / 3]
    assert total.tokens_per_round == 9 / 4
    assert total.tokens_per_s == pytest.approx(9 / 0.3)
    assert total.ttft_ms == 30
    assert added_up(texts[:1]) == texts[0]

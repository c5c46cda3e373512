"""Prompt lookup against a statement of it that looks through the whole text each time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from spec_export.runtime.ngram import NgramIndex

TOKENS = st.integers(0, 3)
APPEND = st.tuples(st.just("append"), TOKENS)
TRUNCATE = st.tuples(st.just("truncate"), st.integers(0, 30))


def naive_continuation(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """What followed the most recent earlier occurrence of the longest n-gram that has one."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if size and tokens[start : start + size] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return []


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.one_of(APPEND, APPEND, APPEND, TRUNCATE), max_size=60),
    st.integers(0, 9),
    st.sampled_from([(3, 1), (3, 2), (1, 1), (4, 2)]),
)
def test_it_finds_what_a_search_finds(steps, count, sizes):
    index, tokens = NgramIndex(*sizes), []
    for step, value in steps:
        if step == "append":
            index.append(value)
            tokens.append(value)
        else:
            index.truncate(value)
            del tokens[value:]
        assert len(index) == len(tokens)
        assert index.continuation(count) == naive_continuation(tokens, count, *sizes)


@settings(deadline=None)
@given(st.lists(TOKENS, max_size=40), st.lists(TOKENS, max_size=40), st.lists(TOKENS, max_size=40))
def test_taking_back_leaves_no_trace(kept, dropped, added):
    """After a rewind the index is the one that never saw the dropped tokens."""
    rewound, fresh = NgramIndex(), NgramIndex()
    for token in [*kept, *dropped]:
        rewound.append(token)
    rewound.truncate(len(kept))
    for index in (rewound, fresh):
        for token in [*(kept if index is fresh else []), *added]:
            index.append(token)
    assert vars(rewound) == vars(fresh)


def test_a_repetition_is_continued_over_its_own_end():
    index = NgramIndex()
    for token in [7, 8, 9, 7, 8, 9]:
        index.append(token)
    assert index.continuation(8) == [7, 8, 9, 7, 8, 9, 7, 8]

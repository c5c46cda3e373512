"""How sure the draft is of its next token: the definition, on every engine at hand, and no NaN."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sampling_run import Arrays, refer, run


def feeds(row: np.ndarray) -> Arrays:
    return {"logits": row.astype(np.float32)[None, None]}


@pytest.mark.parametrize(("V", "Vd"), [(3, 3), (70, 66), (66, 70), (1031, 1000), (49152, 49216)])
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_it_is_the_largest_probability_of_the_ids_both_have(V, Vd, scale):
    """Float32 against float64: a sum of up to 49,152 terms is off by some 1e-6 of itself."""
    row = np.random.default_rng(V).normal(size=Vd) * scale
    row[V:] = 99.0  # ids that the target does not have are never proposed
    weights = np.exp(row[:V] - row[:V].max())
    for found in (run("confidence", V, feeds(row), Vd), refer("confidence", V, feeds(row), Vd)):
        assert found["confidence"] == pytest.approx([weights.max() / weights.sum()], rel=1e-4)


@given(st.integers(0, 2**32), st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -3e38]))
def test_whatever_the_row_holds_it_is_a_share(seed, odd):
    row = np.random.default_rng(seed).normal(size=70)
    row[seed % 70] = odd
    for found in (run("confidence", 70, feeds(row)), refer("confidence", 70, feeds(row))):
        (share,) = found["confidence"].tolist()
        assert 0 <= share <= 1
        assert (share == 0) == (np.isnan(odd) or odd == np.inf)


def test_a_row_in_which_nothing_may_come_has_none():
    for row in (np.full(70, -np.inf), np.full(70, np.nan)):
        assert run("confidence", 70, feeds(row))["confidence"].tolist() == [0.0]

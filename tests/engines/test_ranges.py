"""How far a fixed scale of activations reaches."""

from __future__ import annotations

import numpy as np
import pytest

from spec_export.engines.ranges import largest_magnitude


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    """Half a million numbers around 0, and one that is far out."""
    found = np.random.default_rng(3).standard_normal((1000, 500)).astype(np.float32)
    found[17, 3] = -400.0
    return found


def test_minmax_holds_everything(values):
    assert largest_magnitude(values, "minmax") == 400.0


def test_a_percentile_leaves_out_what_is_rare(values):
    """A histogram of 2,048 bins over 400 has steps of 0.2."""
    exact = float(np.quantile(np.abs(values), 0.9999))
    assert largest_magnitude(values, "percentile") == pytest.approx(exact, abs=0.4)


def test_entropy_gives_up_the_outlier_for_the_rest(values):
    assert 1.0 < largest_magnitude(values, "entropy") < 100.0


@pytest.mark.parametrize("calibrator", ["minmax", "percentile", "entropy"])
def test_zeros_and_few_numbers_have_a_range_too(calibrator):
    assert largest_magnitude(np.zeros((8, 4), np.float32), calibrator) == 0.0
    few = np.array([[0.5, -2.0]], np.float32)
    assert 0.0 < largest_magnitude(few, calibrator) <= 2.0


def test_the_library_prints_nothing(values, capfd):
    largest_magnitude(values[:10], "percentile")
    assert capfd.readouterr() == ("", "")

"""The conformance kit: it passes a bundle that follows the law and fails one that does not."""

from __future__ import annotations

import pytest

from spec_export.engines.errors import RequestError
from spec_export.runtime import law
from spec_export.runtime.noise import Noise
from spec_export.runtime.sampling_calls import SamplingCalls

TEXTS = 1500


@pytest.mark.parametrize(
    ("draft", "rules"),
    [("pair", ["reject", "block", "invariant"]), ("ngram", ["reject", "invariant"])],
)
def test_every_rule_of_a_bundle_emits_the_law(draft, rules, build_tiny, open_once):
    results = law.check_law(open_once(build_tiny(draft)), texts=TEXTS)
    assert [result.rule for result in results] == rules
    assert all(result.holds for result in results), results
    assert {result.cells for result in results} == {3**law.TOKENS}


def test_a_sampler_that_accepts_every_draft_fails(build_tiny, open_once, monkeypatch):
    """Negative control: a uniform of 0 accepts whatever p gives any weight."""
    draw = SamplingCalls.draw

    def accept_all(self, *place):
        draw(self, *place)
        self._uniform_buffer.host.fill(0)

    monkeypatch.setattr(SamplingCalls, "draw", accept_all)
    opened = open_once(build_tiny("pair"))
    assert not law._check_rule(opened, "reject", TEXTS, law.no_progress).holds


def test_noise_that_does_not_move_with_the_text_fails(build_tiny, open_once, monkeypatch):
    """Negative control: each round alone follows the law, three in a row do not."""
    draw = Noise._draw
    monkeypatch.setattr(Noise, "_draw", lambda self, size, start, *rest: draw(self, size, 0, *rest))
    opened = open_once(build_tiny("pair"))
    assert not law._check_rule(opened, "reject", TEXTS, law.no_progress).holds


def test_the_limit_is_the_chi_square_quantile():
    from scipy.stats import chi2

    for freedom in (80, 242, 1000):
        assert law.chi_square_limit(freedom) == pytest.approx(chi2.isf(1e-6, freedom), rel=1e-2)


def test_a_bundle_without_a_draft_has_no_rule(build_tiny, open_once):
    with pytest.raises(RequestError, match="without a draft"):
        law.check_law(open_once(build_tiny("none")))

"""A profile's costs, where drafts are chosen round by round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_export.calibration.choice import costs_of, gamma_costs
from spec_export.calibration.evidence import Times
from spec_export.calibration.profile import PROFILE_FILE, RoundTimes, write_profile
from spec_export.engines.errors import RequestError, SchemaError
from spec_export.runtime import Request
from spec_export.runtime.opened import make_backend
from tests.calibration.simulated import MadeUp
from tests.calibration.test_profile import profile_of

MADE = MadeUp(0.8, {1: 20.0, 2: 20.5, 3: 21.0, 5: 22.0}, step=1.0, host=0.5, plain_host=0.25)


def test_a_round_costs_its_parts_where_too_few_were_timed():
    times = replace(profile_of(MADE).times, rounds=())
    found = costs_of(times, (1, 2, 4), 0.8, is_fast=False)
    assert found.plain_ms == pytest.approx(20.5 + 0.25)
    expected = [20.5 + 1.5, 21.0 + 2.5, 22.0 + 3.5, 22.0 + 4.5]
    assert found.round_ms == pytest.approx(expected)
    assert costs_of(times, (1, 2, 4), 0.8, is_fast=True).plain_ms == pytest.approx(20.25)


def test_what_was_timed_in_texts_goes_before_the_sum_of_parts():
    def timed(n: int, ms: float, count: int) -> RoundTimes:
        return RoundTimes(n, Times(ms, ms, ms, count))

    rounds = (timed(0, 21.5, 30), timed(1, 19.0, 30), timed(4, 50.0, 3))
    times = replace(profile_of(MADE).times, rounds=rounds)
    found = costs_of(times, (1, 2, 4), 0.8, is_fast=False)
    assert (found.plain_ms, found.round_ms[0]) == (21.5, 19.0)
    assert found.round_ms[3] == pytest.approx(22.0 + 4.5), "three rounds are too few"
    assert costs_of(times, (1, 2, 4), 0.8, is_fast=True).plain_ms == pytest.approx(20.25)


def test_a_pass_that_was_not_timed_is_named():
    with pytest.raises(RequestError, match="no time of a pass of 9 rows"):
        costs_of(profile_of(MADE).times, (1, 8), 0.8, is_fast=False)


@pytest.fixture
def measured(build_tiny, open_once, tmp_path):
    """A tiny bundle opened under a path of its own, where a profile can lie."""
    opened = open_once(build_tiny("pair"))
    return replace(opened, bundle=replace(opened.bundle, path=tmp_path))


def profile_for(opened):
    device = make_backend("onnxruntime", opened.manifest.device.threads).describe()
    return replace(profile_of(MADE), bundle_sha256=opened.bundle.sha256, device=device)


def test_the_profile_of_this_bundle_on_this_device_is_used(measured):
    write_profile(measured.bundle.path / PROFILE_FILE, profile_for(measured))
    found = gamma_costs(measured, Request())
    assert len(found.round_ms) == measured.manifest.gamma
    assert found.alpha == pytest.approx(0.8, abs=0.05)
    assert found.plain_ms > gamma_costs(measured, Request(fast_plain=True)).plain_ms


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bundle_sha256": "00" * 32}, "--gamma auto: the profile is of another bundle"),
        ({"device": profile_of(MADE).device}, "--gamma auto: the profile was measured on"),
    ],
)
def test_another_profile_is_refused(measured, change, message):
    write_profile(measured.bundle.path / PROFILE_FILE, replace(profile_for(measured), **change))
    with pytest.raises(RequestError, match=message):
        gamma_costs(measured, Request())


def test_without_a_profile_or_a_draft_the_way_to_one_is_said(measured, build_tiny, open_once):
    with pytest.raises(RequestError, match="spec-export calibrate"):
        gamma_costs(measured, Request())
    (measured.bundle.path / PROFILE_FILE).write_text("{}")
    with pytest.raises(SchemaError):
        gamma_costs(measured, Request())
    with pytest.raises(RequestError, match="made without a draft"):
        gamma_costs(open_once(build_tiny("none")), Request())

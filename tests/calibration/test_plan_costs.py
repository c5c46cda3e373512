"""A plan out of a profile: its numbers, where they are from, and files that may hold anything."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.calibration import theory
from spec_export.calibration.estimate import Interval
from spec_export.calibration.evidence import Times
from spec_export.calibration.plan_costs import cost_ratio_of, read_costs, where, why_elsewhere
from spec_export.calibration.profile import PassTimes, Profile, write_profile
from spec_export.engines.errors import BundleError
from spec_export.engines.manifest import DeviceSpec, GpuSpec
from spec_export.engines.processor import processor_name
from tests.calibration.conftest import Program
from tests.calibration.simulated import MadeUp
from tests.calibration.test_profile import FAST, altered, profile_of

LOOK_UP = MadeUp(0.6, {1: 20.0, 2: 24.0, 3: 28.0, 5: 36.0})


def read(tmp_path, profile: Profile):
    file = tmp_path / "profile.json"
    write_profile(file, profile)
    return read_costs(file)


def times(ms: float) -> Times:
    return Times(ms, ms, ms, 9)


def test_a_file_of_times_has_neither_acceptance_nor_a_draft(tmp_path):
    file = tmp_path / "v.json"
    file.write_text('{"schema": 1, "rows": [1, 2, 5], "ms": [20, 22, 26]}')
    found = read_costs(file)
    assert (found.alpha, found.cost_ratio, found.device) == (None, None, None)
    assert found.verify_cost(5) == pytest.approx(1.3)
    assert where(found, alpha=False, cost_ratio=False) == () and why_elsewhere(found) is None


def test_a_profile_has_passes_acceptance_and_the_cost_of_a_draft(tmp_path):
    profile = profile_of(FAST)
    found = read(tmp_path, profile)
    assert [found.verify_cost(m) for m in (1, 2, 3, 5)] == pytest.approx([1, 1.025, 1.05, 1.1])
    assert found.verify_cost(4) == pytest.approx(1.075) and not found.verify_cost.is_measured(4)
    assert profile.acceptance.alpha is not None
    assert found.alpha == profile.acceptance.alpha.value
    assert found.cost_ratio == pytest.approx(1 / 20)
    costs = theory.Costs(found.cost_ratio, found.verify_cost)
    assert theory.best_gamma(found.alpha, costs, 4) == 4


def test_the_cost_of_a_draft_is_a_step_and_the_choice_of_its_token(tmp_path):
    profile = profile_of(FAST)
    chosen = replace(profile.times, step=times(3.0), propose=times(1.0), catch_up=times(9.0))
    assert read(tmp_path, replace(profile, times=chosen)).cost_ratio == pytest.approx(4 / 20)
    first_only = replace(chosen, step=None)
    assert cost_ratio_of(first_only) == pytest.approx(10 / 20)


def test_look_up_costs_nothing(tmp_path):
    assert read(tmp_path, profile_of(LOOK_UP)).cost_ratio == 0


def test_where_no_single_row_was_built_a_token_takes_the_narrowest_pass(tmp_path):
    profile = profile_of(FAST)
    target = tuple(PassTimes(rows, times(ms)) for rows, ms in ((2, 22.0), (5, 33.0)))
    found = read(tmp_path, replace(profile, times=replace(profile.times, target=target)))
    assert [found.verify_cost(rows) for rows in (1, 2, 5)] == pytest.approx([1, 1, 1.5])


def test_without_a_tested_draft_there_is_no_acceptance(tmp_path):
    profile = profile_of(FAST)
    none = replace(profile.acceptance, alpha=None)
    assert read(tmp_path, replace(profile, acceptance=none)).alpha is None


def test_it_is_said_where_the_numbers_are_from(tmp_path):
    found = read(tmp_path, profile_of(FAST))
    said = where(found, alpha=True, cost_ratio=False)[0]
    assert said.startswith("times of target passes, alpha: as measured on A processor with onnx")
    assert "2 threads, 2026-11-30" in said
    assert "cost of a draft step" in where(found, alpha=False, cost_ratio=True)[0]


def test_a_profile_of_another_device_is_told_from_one_of_this(tmp_path):
    profile = profile_of(FAST)
    warning = why_elsewhere(read(tmp_path, profile))
    assert warning is not None and "was measured on A processor" in warning
    assert f"this is {processor_name()}" in warning
    here = replace(profile.device, processor=processor_name(), machine=platform.machine())
    assert why_elsewhere(read(tmp_path, replace(profile, device=here))) is None


def test_a_profile_of_another_gpu_is_told_from_one_of_this(tmp_path, program: Program):
    """In the very same host: the processors are the same, and one GPU is not the other."""
    profile = profile_of(FAST)
    gpu = GpuSpec("NVIDIA A", "9.0", "13.0", "12.9")
    here = replace(profile.device, processor=processor_name(), machine=platform.machine(), gpu=gpu)
    costs = read(tmp_path, replace(profile, device=here))
    program("nvidia-smi", "echo 0, NVIDIA B; echo 1, NVIDIA AB")
    warning = why_elsewhere(costs)
    assert warning is not None and "measured on NVIDIA A (compute capability 9.0, " in warning
    assert f"this is NVIDIA B, NVIDIA AB, {processor_name()};" in warning
    program("nvidia-smi", "echo 0, NVIDIA B; echo '1, NVIDIA A (nvgpu)'")
    assert why_elsewhere(costs) is None
    elsewhere = replace(profile, device=replace(here, processor="Another processor"))
    assert why_elsewhere(read(tmp_path, elsewhere)) is not None
    for nothing in ("exit 9", "echo No devices were found"):
        program("nvidia-smi", nothing)
        assert "this is no GPU that nvidia-smi shows, " in (why_elsewhere(costs) or "")
    alone = replace(profile, device=replace(here, gpu=None))
    assert why_elsewhere(read(tmp_path, alone)) is None, "a processor's times are its own"


def test_names_from_a_profile_cannot_steer_a_terminal(tmp_path):
    evil = "\x1b[2Jevil\nname" + "y" * 10_000
    device = DeviceSpec("x", "1", evil, "m", 1, GpuSpec(evil, evil, evil, evil))
    found = read(tmp_path, replace(profile_of(FAST), device=device, created="\x07now"))
    said = (why_elsewhere(found) or "") + where(found, alpha=True, cost_ratio=True)[0]
    assert said.isprintable() and len(said) < 2000


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], 2),
        (["schema"], True),
        (["times"], {}),
        (["times", "target"], []),
        (["times", "target", 0, "ms"], {"median": 0.0, "low": 0.0, "high": 0.0, "count": 1}),
        (["times", "target", 1, "ms"], {"median": 0.0, "low": 0.0, "high": 0.0, "count": 1}),
        (["times", "target", 0, "ms"], {"median": 1e300, "low": 0.0, "high": 1e300, "count": 1}),
        (["times", "target", 0, "rows"], -1),
        (["times", "target", 3, "rows"], 99_999_999_999),
        (["times", "step", "median"], -1.0),
        (["times", "step"], "fast"),
        (["acceptance", "alpha", "value"], 2.0),
        (["acceptance", "alpha", "value"], -0.5),
        (["acceptance", "alpha"], 0.5),
        (["device", "threads"], 1.5),
        (["more"], 1),
    ],
)
def test_a_profile_with_numbers_that_mean_nothing_is_refused(tmp_path, path, value):
    file = tmp_path / "profile.json"
    file.write_text(altered(path, value))
    with pytest.raises(BundleError, match=r"profile\.json") as refused:
        read_costs(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", '"0.8"', "true", "null"])
def test_a_profile_with_what_is_no_number_is_refused(tmp_path, number):
    file = tmp_path / "profile.json"
    file.write_text(altered(["speedup", "value"], 0.123456).replace("0.123456", number))
    with pytest.raises(BundleError, match=r"profile\.json"):
        read_costs(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]",
        b"{}",
        b"\xff\xfe",
        b'{"schema": 1, "forecasts": []}',
        b'{"schema": 1, "rows": [1, 2], "ms": [1, 2], "times": 0}',
        b'{"schema": 1, "rows": [1, 2], "ms": [2, -1]}',
        b"[" * 100_000,
        b'{"bundle_sha256": "' + b"a" * (1 << 20) + b'"}',
    ],
)
def test_a_file_that_is_neither_is_refused(tmp_path, content):
    file = tmp_path / "p.json"
    file.write_bytes(content)
    with pytest.raises(BundleError, match=r"p\.json"):
        read_costs(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, Path("/dev/zero")):
        with pytest.raises(BundleError):
            read_costs(path)


def test_an_interval_of_a_profile_is_no_part_of_a_plan(tmp_path):
    """Its middle is: alpha as measured, whatever the spread."""
    profile = profile_of(FAST)
    wide = replace(profile.acceptance, alpha=Interval(0.4, 0.0, 1.0))
    assert read(tmp_path, replace(profile, acceptance=wide)).alpha == 0.4

"""`profile.json`: strict to read, whole when written, and of one bundle on one device."""

from __future__ import annotations

import dataclasses
import json

import pytest

from spec_export.calibration.calibrate import acceptance_of, advise, times_of
from spec_export.calibration.conditions import Conditions
from spec_export.calibration.device_text import described
from spec_export.calibration.estimate import Interval
from spec_export.calibration.forecast import GammaForecast, break_even_alpha, forecast
from spec_export.calibration.precision_result import (
    DraftPrecision,
    Pairing,
    Precisions,
    Quality,
    TargetPrecision,
)
from spec_export.calibration.profile import (
    Profile,
    Setting,
    read_profile,
    why_unusable,
    write_profile,
)
from spec_export.calibration.profile_report import html, remarks, terminal_lines
from spec_export.engines.errors import BundleError, StorageError
from spec_export.engines.manifest import DeviceSpec, GpuSpec
from tests.calibration.simulated import MadeUp

DEVICE = DeviceSpec("onnxruntime", "1.32.0", "A processor", "x86_64", 2)
BUNDLE = "ab" * 32
STATE = Conditions("performance", 2000.0, 50.0, None)


def profile_of(made: MadeUp, measured: float | None = None) -> Profile:
    texts = made.texts(8)
    forecasts = forecast(texts, made.widths)
    best = max(forecasts, key=lambda found: found.speedup.value)
    value = best.speedup.value if measured is None else measured
    raced = Interval(value, 0.95 * value, 1.05 * value)
    accepted = acceptance_of(texts, made.gammas[-1])
    least = break_even_alpha(texts, made.widths)
    advice = advise(best, raced, accepted.alpha, least)
    return Profile(
        schema=1,
        created="2026-11-30T00:00:00+00:00",
        producer={"spec-export": "0.1.0"},
        bundle_sha256=BUNDLE,
        device=DEVICE,
        before=STATE,
        after=STATE,
        setting=Setting(8, "cd" * 32, 64, 0.0, 0, None, 100),
        acceptance=accepted,
        times=times_of(texts, made.widths),
        forecasts=forecasts,
        gamma=advice.gamma,
        speedup=best.speedup,
        measured_gamma=best.gamma,
        measured=raced,
        break_even_alpha=least,
        reason=advice.reason,
    )


FAST = MadeUp(0.8, {1: 20.0, 2: 20.5, 3: 21.0, 5: 22.0}, step=1.0, host=0.5)
SLOW = MadeUp(0.3, {1: 20.0, 2: 24.0, 3: 28.0, 5: 36.0}, step=9.0)


@pytest.mark.parametrize("made", [FAST, SLOW])
def test_a_profile_comes_back_as_it_was_written(tmp_path, made):
    profile = profile_of(made)
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_a_profile_of_another_bundle_or_device_is_not_used():
    profile = profile_of(FAST)
    assert why_unusable(profile, BUNDLE, DEVICE) is None
    other = why_unusable(profile, "cd" * 32, DEVICE)
    assert other is not None and "of another bundle" in other and "calibrate" in other
    for change in ({"processor": "B"}, {"threads": 4}, {"version": "2"}, {"backend": "tensorrt"}):
        found = why_unusable(profile, BUNDLE, dataclasses.replace(DEVICE, **change))
        assert found is not None and "was measured on A processor" in found


def test_of_two_gpus_in_one_host_it_is_said_which():
    first = dataclasses.replace(DEVICE, gpu=GpuSpec("NVIDIA A", "9.0", "13.0", "12.9"))
    profile = dataclasses.replace(profile_of(FAST), device=first)
    assert why_unusable(profile, BUNDLE, first) is None
    assert remarks(profile)[0].startswith(
        "NVIDIA A (compute capability 9.0, CUDA 12.9, driver for 13.0), A processor with onnx"
    )
    changes = ({"name": "B"}, {"compute_capability": "8.9"}, {"driver": "13.1"}, {"cuda": "13.0"})
    for change in changes:
        second = dataclasses.replace(first, gpu=dataclasses.replace(first.gpu, **change))
        said = why_unusable(profile, BUNDLE, second)
        assert said is not None and described(first) in said and described(second) in said
        assert described(first) != described(second)
    assert described(DEVICE) == "A processor with onnxruntime 1.32.0, 2 threads"


def test_the_report_has_what_is_known_of_the_state():
    said = remarks(profile_of(FAST))[0]
    assert said.endswith("2 threads, 2000 MHz, governor performance, 50 degrees C")
    gpu = dataclasses.replace(STATE, gpu_clock_mhz=1980.0, gpu_power_w=112.5)
    said = remarks(dataclasses.replace(profile_of(FAST), after=gpu))[0]
    assert said.endswith("50 degrees C, GPU at 1980 MHz, 112 W")
    hot = Conditions(None, None, None, None, gpu_temperature_c=41.0)
    said = remarks(dataclasses.replace(profile_of(FAST), after=hot))[0]
    assert said.endswith("2 threads, GPU at 41 degrees C")


EXACT, NEAR = Quality(53.6, 1.0, 0.0, 600), Quality(53.6, 0.97, 0.005, 600)
COMPARED = Precisions(
    targets=(
        TargetPrecision("float32", 538_000_000, EXACT, (1, 2, 5), (14.0, 15.0, 18.0), ()),
        TargetPrecision("int8", 265_000_000, NEAR, (1, 2, 5), (7.0, 9.0, 14.0), (2,)),
    ),
    drafts=(DraftPrecision("float32", 9_000_000, 1.5, 1.0),),
    pairings=(
        Pairing("float32", "float32", 0.5, 2, 1.1, 1.0, True, 1.05),
        Pairing("int8", "float32", None, 0, 1.9, 1.9, True),
    ),
)
LOOKED_UP = dataclasses.replace(
    COMPARED,
    drafts=(),
    pairings=tuple(dataclasses.replace(found, draft=None) for found in COMPARED.pairings),
)


def twice(compared: Precisions) -> Precisions:
    """The same with every target twice."""
    targets, pairings = 2 * compared.targets, 2 * compared.pairings
    return dataclasses.replace(compared, targets=targets, pairings=pairings)


@pytest.mark.parametrize("compared", [COMPARED, LOOKED_UP])
def test_a_profile_with_precisions_comes_back_as_it_was_written(tmp_path, compared):
    profile = dataclasses.replace(profile_of(FAST), memory={"caches": 0}, precisions=compared)
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile


def altered(path: list[str | int], value: object) -> str:
    profile = dataclasses.replace(profile_of(FAST), memory={"caches": 0}, precisions=COMPARED)
    found = json.loads(json.dumps(dataclasses.asdict(profile)))
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], 2),
        (["gamma"], 5),
        (["gamma"], -1),
        (["gamma"], True),
        (["measured_gamma"], 0),
        (["forecasts"], []),
        (["forecasts", 0, "gamma"], 2),
        (["acceptance", "positions"], []),
        (["acceptance", "alpha", "high"], 1.5),
        (["acceptance", "alpha", "low"], 0.99),
        (["speedup", "low"], -1.0),
        (["measured", "value"], 0.0),
        (["times", "plain", "median"], -1.0),
        (["times", "plain", "count"], 0),
        (["times", "target"], []),
        (["times", "target", 0, "rows"], 0),
        (["times", "target", 0, "rows"], 9),
        (["times", "rounds", 0, "n_draft"], -1),
        (["times", "rounds", 3, "n_draft"], 5),
        (["times", "target", 0, "ms", "low"], 1e9),
        (["more"], 1),
        (["device"], None),
        (["break_even_alpha"], 7.5),
        (["break_even_alpha"], -0.1),
        (["memory", "caches"], -1),
        (["precisions"], {"targets": [], "drafts": [], "pairings": []}),
        (["precisions"], dataclasses.asdict(twice(COMPARED))),
        (["precisions", "targets"], []),
        (["precisions", "targets", 1, "name"], "float32"),
        (["precisions", "targets", 1, "name"], "int4"),
        (["precisions", "targets", 0, "weights_bytes"], 0),
        (["precisions", "targets", 0, "quality", "perplexity"], 0.5),
        (["precisions", "targets", 0, "quality", "agreement"], 1.5),
        (["precisions", "targets", 0, "quality", "agreement"], -0.5),
        (["precisions", "targets", 0, "quality", "divergence"], -0.5),
        (["precisions", "targets", 0, "quality", "tokens"], -1),
        (["precisions", "targets", 0, "rows"], [0, 2, 5]),
        (["precisions", "targets", 0, "rows"], [2, 1, 5]),
        (["precisions", "targets", 0, "rows"], [1, 2]),
        (["precisions", "targets", 0, "rows"], []),
        (["precisions", "targets", 0, "rows_ms"], []),
        (["precisions", "targets", 0, "rows_ms", 2], -1.0),
        (["precisions", "targets", 0, "rows_ms", 2], 0.0),
        (["precisions", "targets", 1, "cliffs"], [1]),
        (["precisions", "targets", 1, "cliffs"], [3]),
        (["precisions", "targets", 1, "cliffs"], [5, 2]),
        (["precisions", "drafts"], []),
        (["precisions", "drafts", 0, "name"], "int8"),
        (["precisions", "drafts", 0, "weights_bytes"], -9),
        (["precisions", "drafts", 0, "catch_up_ms"], -1.0),
        (["precisions", "drafts", 0, "step_ms"], -1.0),
        (["precisions", "pairings"], []),
        (["precisions", "pairings", 0, "target"], "int8"),
        (["precisions", "pairings", 0, "target"], "int2"),
        (["precisions", "pairings", 0, "draft"], "int2"),
        (["precisions", "pairings", 0, "draft"], None),
        (["precisions", "pairings", 0, "alpha"], 1.5),
        (["precisions", "pairings", 0, "alpha"], -0.5),
        (["precisions", "pairings", 0, "gamma"], 999),
        (["precisions", "pairings", 0, "gamma"], 5),
        (["precisions", "pairings", 0, "gamma"], -1),
        (["precisions", "pairings", 0, "speedup"], -5.0),
        (["precisions", "pairings", 0, "plain_speedup"], 0.0),
        (["precisions", "pairings", 0, "measured"], -1.0),
    ],
)
def test_a_profile_that_was_altered_is_refused(tmp_path, path, value):
    file = tmp_path / "profile.json"
    file.write_text(altered(path, value))
    with pytest.raises(BundleError, match=r"profile\.json"):
        read_profile(file)


def test_a_profile_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(StorageError, match="could not be written"):
        write_profile(tmp_path / "no" / "profile.json", profile_of(FAST))
    assert not list(tmp_path.iterdir())


def test_the_advice_needs_a_gain_predicted_and_measured():
    def forecast_of(value: float) -> GammaForecast:
        return GammaForecast(3, 2.0, 10.0, Interval(value, value - 0.05, value + 0.05))

    def measured(value: float) -> Interval:
        return Interval(value, value - 0.04, value + 0.04)

    alpha = Interval(0.6, 0.5, 0.7)
    good = advise(forecast_of(1.62), measured(1.58), alpha, 0.31)
    assert good.gamma == 3
    assert good.reason == (
        "gamma 3: 1.62x (1.57-1.67) predicted, 1.58x (1.54-1.62) measured over the fastest plain "
        "decoding; do not speculate below alpha 0.31"
    )
    assert "includes a loss" in advise(forecast_of(1.03), measured(1.2), alpha, 0.31).reason
    for predicted, raced in ((0.9, 1.1), (1.1, 0.9), (0.8, 0.8)):
        bad = advise(forecast_of(predicted), measured(raced), alpha, 0.7)
        assert bad.gamma == 0
        assert bad.reason.startswith("do not speculate")
        assert "alpha is 0.60, it would pay above alpha 0.70" in bad.reason
    assert "disagree" in advise(forecast_of(0.9), measured(1.1), alpha, 0.7).reason
    assert "no alpha would be enough" in advise(forecast_of(0.5), measured(0.5), None, None).reason


def test_the_report_says_when_prediction_and_measurement_differ():
    assert not any("off the measurement" in line for line in remarks(profile_of(FAST)))
    off = profile_of(FAST, measured=1.0 + FAST.alpha)
    assert any("off the measurement" in line for line in remarks(off))


@pytest.mark.parametrize("made", [FAST, SLOW])
def test_the_report_fits_a_terminal_and_is_a_page(made):
    profile = profile_of(made)
    lines = terminal_lines(profile)
    assert lines[0] == profile.reason
    drawn = lines[1 : next(n for n, line in enumerate(lines) if line.startswith("- "))]
    assert max(map(len, drawn)) < 80
    assert sum(line.startswith("->") for line in drawn) == 1
    page = html(profile)
    assert profile.reason[1:] in page
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "<script" not in page

"""`run --gamma auto`: what `calibrate` found decides how many drafts a round has."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest

from spec_export.runtime.opened import make_backend
from tests.calibration.test_profile import altered


def test_run_goes_by_the_profile(cli, tiny_bundle, tmp_path):
    """End to end, in a copy of the bundle: calibrate, then run by what it found."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("In the beginning\nAnd it came to pass\n")
    asked = ("run", bundle, "--prompt", "In the", "--max-tokens", 30, "--json")
    assert "calibrate" in cli(*asked, "--gamma", "auto").refused()
    called = cli("calibrate", bundle, "--prompts", prompts, "--tokens", 16, "--quiet")
    assert called.code == 0, called.err
    chosen, plain = (cli(*asked, "--gamma", gamma) for gamma in ("auto", 0))
    assert (chosen.code, plain.code) == (0, 0), chosen.err
    found = json.loads(chosen.out)
    assert found["token_ids"] == json.loads(plain.out)["token_ids"]
    assert found["gamma_is_auto"] and found["gamma"] == 4
    assert "a whole number, or auto" in cli(*asked, "--gamma", "much").refused()


@pytest.fixture
def calibrated(tiny_bundle, tmp_path, open_once):
    """A bundle with a made-up profile of it here; `change` alters a place of the profile."""
    bundle, opened = shutil.copytree(tiny_bundle, tmp_path / "bundle"), open_once(tiny_bundle)
    device = make_backend("onnxruntime", opened.manifest.device.threads).describe()
    own = {"bundle_sha256": opened.bundle.sha256, "device": asdict(device)}

    def change(path=("gamma",), value=0):
        found = json.loads(altered(["gamma"], 0)) | own
        place = found
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (bundle / "profile.json").write_text(json.dumps(found))
        return "run", bundle, "--gamma", "auto", "--prompt", "In the", "--max-tokens", 12, "--json"

    return change


def test_a_profile_of_this_bundle_and_device_is_used(cli, calibrated):
    """The faults below are of what is altered, not of how the profile was made."""
    called = cli(*calibrated())
    assert called.code == 0, called.err
    assert json.loads(called.out)["gamma_is_auto"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("device", "processor"), "Another processor"),
        (("device", "threads"), 64),
        (("device", "version"), "0.1"),
        (("bundle_sha256",), "ab" * 32),
    ],
)
def test_a_profile_of_another_device_or_bundle_is_named_and_not_used(cli, calibrated, path, value):
    """Warned, not used: the text is made with the drafts that were built."""
    asked = calibrated(path, value)
    called = cli(*asked)
    assert called.code == 0 and called.err.startswith("warning: --gamma auto: the profile")
    assert called.err.count("\n") == 1
    assert "it is not used: run `spec-export calibrate`" in called.err
    assert ("was measured on" in called.err) == (path[0] == "device")
    plain = [part for part in asked if part not in ("--gamma", "auto")]
    assert json.loads(called.out)["text"] == json.loads(cli(*plain).out)["text"]
    assert "it is not used" in " ".join(json.loads(called.out)["remarks"])


def taking(ms: float) -> dict[str, float]:
    return {"median": ms, "low": ms, "high": ms, "count": 20}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("times", "plain"), taking(0.0)),
        (("times", "plain"), taking(-1.0)),
        (("times", "rounds", 0, "ms"), taking(0.0)),
        (("times", "target", 0, "ms"), taking(0.0)),
        (("times", "target", 0, "rows"), 0),
        (("times", "target"), []),
        (("acceptance", "alpha", "value"), 1.5),
        (("acceptance", "alpha", "value"), "high"),
        (("schema",), 2),
    ],
)
def test_a_profile_with_numbers_that_mean_nothing_is_refused(cli, calibrated, path, value):
    """A pass that took no time was divided by."""
    assert "profile.json" in cli(*calibrated(path, value)).refused()


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_profile_with_what_is_no_number_is_refused(cli, calibrated, number):
    asked = calibrated(("break_even_alpha",), 0.123456)
    file = asked[1] / "profile.json"
    file.write_text(file.read_text().replace("0.123456", number))
    assert "is not valid JSON" in cli(*asked).refused()


@pytest.mark.parametrize("text", ["-1", "5", "99999999999999", "1.5", "nan", "", "AUTO"])
def test_gammas_that_mean_nothing_are_refused(cli, tiny_bundle, text):
    asked = ("run", tiny_bundle, "--prompt", "In the", "--max-tokens", 4, f"--gamma={text}")
    assert "gamma" in cli(*asked).refused()

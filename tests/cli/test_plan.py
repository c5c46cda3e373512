"""`plan` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spec_export.calibration.profile import write_profile
from tests.calibration.test_profile import FAST, altered, profile_of


def test_plan_prints_a_verdict_a_table_and_a_chart(cli):
    called = cli("plan", "--alpha", 0.8, "--cost-ratio", 0.1)
    assert called.code == 0
    lines = called.out.splitlines()
    assert lines[0].startswith("gamma 6: 2.47x")
    assert max(map(len, lines)) < 80
    assert any(line.startswith("->    6") for line in lines)
    assert sum("|" in line for line in lines) == 12


def test_plan_as_json_and_as_a_page(cli, tmp_path):
    costs, report = tmp_path / "v.json", tmp_path / "plan.html"
    costs.write_text('{"schema": 1, "rows": [1, 2, 3, 5], "ms": [10, 11, 40, 42]}')
    called = cli(
        *("plan", "--alpha", 0.8, "--cost-ratio", 0, "--verify-cost", costs),
        *("--report", report, "--json"),
    )
    assert called.code == 0
    assert called.out.count("\n") == 1
    found = json.loads(called.out)
    assert found["gamma"] == 1 and len(found["by_gamma"]) == 5
    assert {"expected_tokens", "speedup", "break_even_cost_ratio"} <= set(found)
    assert "Gamma 1: 1.64x" in report.read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--alpha and --cost-ratio"),
        (("--alpha", "0.5"), "--cost-ratio"),
        (("--alpha", "1.5", "--cost-ratio", "0.1"), "alpha is 1.5"),
        (("--alpha", "nan", "--cost-ratio", "0.1"), "alpha is nan"),
        (("--alpha", "-inf", "--cost-ratio", "0.1"), "alpha is -inf"),
        (("--alpha", "-1e-9", "--cost-ratio", "0.1"), "alpha is -1e-09"),
        (("--alpha", "0.5", "--cost-ratio", "-1"), "cost_ratio is -1"),
        (("--alpha", "0.5", "--cost-ratio", "nan"), "cost_ratio is nan"),
        (("--alpha", "0.5", "--cost-ratio", "inf"), "cost_ratio is inf"),
        (("--alpha", "0.5", "--cost-ratio", "1e7"), "cost_ratio is 10000000.0"),
        (("--alpha", "0.5", "--cost-ratio", "0.1", "--gamma-max", "0"), "gamma_max is 0"),
        (("--alpha", "0.5", "--cost-ratio", "0.1", "--gamma-max", "-3"), "gamma_max is -3"),
        (("--alpha", "0.5", "--cost-ratio", "0.1", "--gamma-max", "257"), "expected 1 to 256"),
        (("--alpha", "0.5", "--cost-ratio", "0.1", "--gamma-max", "9" * 40), "expected 1 to 256"),
        (("--alpha", "0.5", "--cost-ratio", "0.1", "--verify-cost", "nowhere"), "nowhere"),
    ],
)
def test_plan_refuses_what_means_nothing(cli, arguments, word):
    assert word in cli("plan", *arguments).refused()


@pytest.mark.parametrize("option", ["--alpha", "--cost-ratio", "--gamma-max"])
@pytest.mark.parametrize("text", ["much", "", "1,5", "0x10"])
def test_plan_takes_numbers_only(cli, option, text):
    """What is no number is a mistake of usage: told with the option's name, exit code 2."""
    called = cli("plan", option, text)
    assert (called.code, called.out) == (2, "")
    assert f"Invalid value for '{option}'" in called.err


def test_plan_refuses_a_picture_where_nothing_can_draw_it(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    called = cli("plan", "--alpha", 0.5, "--cost-ratio", 0.1, "--report", tmp_path / "plan.png")
    assert "none is installed; write the report as .html" in called.refused()


def test_plan_refuses_a_report_it_cannot_write(cli, tmp_path):
    called = cli(
        "plan", "--alpha", 0.5, "--cost-ratio", 0.1, "--report", tmp_path / "no" / "r.html"
    )
    assert "could not be written" in called.refused()


def test_plan_loads_no_model_and_no_engine_library():
    code = (
        "import sys; from spec_export.cli import app\n"
        "try: app(['plan', '--alpha', '0.8', '--cost-ratio', '0.1'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.splitlines()[-1].split())
    assert "spec_export.calibration.plan" in loaded
    unwanted = {"torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "tokenizers", "scipy"}
    assert not loaded & unwanted


# --- out of a profile -----------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path):
    file = tmp_path / "profile.json"
    write_profile(file, profile_of(FAST))
    return file


def test_plan_takes_acceptance_and_costs_of_a_profile(cli, profile):
    """Nothing else has to be given; what is given goes first."""
    called = cli("plan", "--verify-cost", profile)
    assert called.code == 0
    said = " ".join(called.out.split())
    assert said.startswith("gamma 4: 2.6")
    assert "alpha, the cost of a draft step: as measured on A processor" in said
    found = json.loads(cli("plan", "--verify-cost", profile, "--json").out)
    assert found["alpha"] == pytest.approx(0.8, abs=0.03)
    assert found["cost_ratio"] == pytest.approx(0.05) and len(found["by_gamma"]) == 5
    given = ("--alpha", 0.1, "--cost-ratio", 0.3)
    found = json.loads(cli("plan", "--verify-cost", profile, *given, "--json").out)
    assert (found["alpha"], found["cost_ratio"], found["gamma"]) == (0.1, 0.3, 0)
    assert found["sources"][0].startswith("times of target passes: as measured on A processor")


def test_plan_warns_of_a_profile_of_another_device_and_plans_for_it(cli, profile):
    called = cli("plan", "--verify-cost", profile, "--json")
    assert called.code == 0
    (warning,) = called.err.splitlines()
    assert warning.startswith("warning: the profile was measured on A processor with onnxruntime")
    assert "the plan is for where it was measured" in warning


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (["schema"], 3, "schema version 3"),
        (["times", "target", 0, "ms", "median"], -1.0, "a time is -1.0 ms"),
        (["times", "target", 0, "ms"], {"median": 0, "low": 0, "high": 0, "count": 1}, "no time"),
        (["acceptance", "alpha", "value"], 1.5, "an acceptance is 1.5"),
        (["forecasts"], [], "forecasts are not"),
        (["acceptance", "alpha"], None, "give --alpha"),
    ],
)
def test_plan_refuses_a_profile_whose_numbers_mean_nothing(cli, tmp_path, path, value, word):
    file = tmp_path / "profile.json"
    file.write_text(altered(path, value))
    assert word in cli("plan", "--verify-cost", file).refused()


def test_plan_refuses_a_profile_that_is_too_large_and_gammas_it_does_not_reach(
    cli, tmp_path, profile
):
    assert "gamma_max=5" in cli("plan", "--verify-cost", profile, "--gamma-max", 5).refused()
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (1 << 20) + profile.read_bytes())
    assert "at most 1048576 are read" in cli("plan", "--verify-cost", large).refused()


# --- memory ---------------------------------------------------------------------------------------


def test_plan_memory_of_a_bundle_and_of_what_it_is_built_from(cli, tiny_bundle, tiny_pair_exported):
    bundle = json.loads(cli("plan", "--memory", tiny_bundle, "--json").out)
    shapes = ("--max-len", 128, "--gamma", 4, "--chunk", 32)
    exported = json.loads(cli("plan", "--memory", tiny_pair_exported, *shapes, "--json").out)
    assert bundle == exported
    assert bundle["fits"] is None and bundle["total_bytes"] > bundle["plain_total_bytes"]


def test_plan_memory_says_whether_it_fits_by_its_exit_code(cli, tiny_bundle, tmp_path):
    report = tmp_path / "memory.html"
    called = cli("plan", "--memory", tiny_bundle, "--device", "orin-nano-8gb", "--report", report)
    assert called.code == 0
    assert called.out.startswith("fits:") and "Jetson Orin Nano 8GB" in called.out
    assert "is an assumption" in called.out
    assert "Fits:" in report.read_text()
    called = cli("plan", "--memory", tiny_bundle, "--memory-limit", "50MB")
    assert called.code == 1
    assert called.out.startswith("does not fit:")
    assert max(map(len, called.out.splitlines())) < 80


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--memory", "nowhere"), "neither a bundle"),
        (("--memory", "BUNDLE", "--memory-limit", "much"), "no amount"),
        (("--memory", "BUNDLE", "--alpha", "0.8"), "--memory plans memory"),
        (("--alpha", "0.8", "--cost-ratio", "0.1", "--device", "agx-thor"), "--memory PATH"),
        (("--memory", "BUNDLE", "--device", "agx-thor", "--memory-limit", "1GB"), "give one"),
        (("--memory", "BUNDLE", "--max-len", "100000"), "positions"),
        (("--memory", "BUNDLE", "--gamma", "x"), "--gamma x"),
    ],
)
def test_plan_memory_refuses_what_means_nothing(cli, tiny_bundle, arguments, word):
    given = [tiny_bundle if argument == "BUNDLE" else argument for argument in arguments]
    assert word in cli("plan", *given).refused()

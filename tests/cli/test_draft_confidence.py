"""`run --draft-confidence P`, and the threshold that `calibrate` leaves for `--gamma auto`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from spec_export.calibration.early_exit import EarlyForecast
from spec_export.calibration.estimate import Interval
from spec_export.calibration.evidence import Times
from spec_export.calibration.profile import (
    PROFILE_FILE,
    RoundTimes,
    read_profile,
    write_profile,
)

COSTS = {0: 50.0, 1: 10.0, 2: 10.1, 3: 10.2, 4: 10.3}  # milliseconds by drafts
ASKED = ("--prompt", "And the king said unto him", "--max-tokens", 40)


def test_rounds_stop_early_and_the_text_is_the_same(cli, tiny_bundle):
    found = {}
    for least in (0, 0.1, 0.3, 0.99):
        called = cli("run", tiny_bundle, *ASKED, "--json", "--draft-confidence", least)
        assert called.code == 0, called.err
        found[least] = json.loads(called.out)
    assert len({tuple(run["token_ids"]) for run in found.values()}) == 1
    assert [run["draft_confidence"] for run in found.values()] == list(found)
    assert found[0]["early_rounds"] == 0 < found[0.1]["early_rounds"]
    drafted = [run["drafted"] for run in found.values()]
    assert sorted(drafted, reverse=True) == drafted and drafted[0] > drafted[-1]


def test_the_report_says_so(cli, tiny_bundle):
    called = cli("run", tiny_bundle, *ASKED, "--draft-confidence", 0.3)
    said = " ".join(called.err.split())
    assert "gamma 4, no draft after one below 0.3" in said
    assert "stopped drafting early" in said
    assert "early" not in cli("run", tiny_bundle, *ASKED).err


def test_samples_are_added_up(cli, tiny_bundle):
    options = ("--samples", 2, "--temperature", 0.8, "--seed", 3, "--draft-confidence", 0.3)
    found = json.loads(cli("run", tiny_bundle, *ASKED, "--json", *options).out)
    early = [run["early_rounds"] for run in found["samples"]]
    assert found["total"]["early_rounds"] == sum(early) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--draft-confidence", "1.5"), "draft_confidence=1.5: it is 0 to 1"),
        (("--draft-confidence", "-0.5"), "draft_confidence=-0.5: it is 0 to 1"),
        (("--draft-confidence", "nan"), "draft_confidence=nan: it is 0 to 1"),
        (("--draft-confidence", "0.3", "--pipeline"), "leave out one of the two"),
    ],
)
def test_a_bad_value_is_one_line(options, said, cli, tiny_bundle):
    assert said in cli("run", tiny_bundle, *ASKED, *options).refused()


def test_it_needs_a_drafting_model(cli, tiny_ngram_bundle, tiny_plain_bundle):
    for bundle in (tiny_ngram_bundle, tiny_plain_bundle):
        assert "no model drafts" in cli("run", bundle, *ASKED, "--draft-confidence", 0.3).refused()
        assert cli("run", bundle, *ASKED, "--draft-confidence", 0, "--quiet").code == 0


@pytest.fixture
def measured(tiny_bundle, tmp_path, cli):
    """A copy of the bundle with a profile by which it pays to stop below 0.3, and to draft."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("In the beginning\nAnd it came to pass\n")
    called = cli("calibrate", bundle, "--prompts", prompts, "--tokens", 16)
    assert called.code == 0, called.err
    assert "draft confidence" in called.out
    profile = read_profile(bundle / PROFILE_FILE)
    gain = Interval(1.1, 1.05, 1.2)
    early = EarlyForecast(0.3, 4, 2.0, 1.0, gain, gain, 0.5, 0.5)
    rounds = tuple(RoundTimes(n, Times(ms, ms, ms, 30)) for n, ms in COSTS.items())
    times = replace(profile.times, rounds=rounds)
    write_profile(
        bundle / PROFILE_FILE,
        replace(profile, draft_confidence=0.3, early=early, times=times),
    )
    return bundle


def test_gamma_auto_goes_by_the_profile(cli, measured):
    plain = json.loads(cli("run", measured, *ASKED, "--json", "--gamma", 0).out)
    auto = ("run", measured, *ASKED, "--json", "--gamma", "auto")
    found = json.loads(cli(*auto).out)
    assert (found["draft_confidence"], found["token_ids"]) == (0.3, plain["token_ids"])
    assert found["early_rounds"] > 0
    off = json.loads(cli(*auto, "--draft-confidence", 0).out)
    assert (off["draft_confidence"], off["early_rounds"]) == (0, 0)
    other = json.loads(cli(*auto, "--draft-confidence", 0.6).out)
    assert other["draft_confidence"] == 0.6
    pipelined = json.loads(cli(*auto, "--pipeline").out)
    assert pipelined["draft_confidence"] == 0
    assert any("draft_confidence of 0.30 is not used" in remark for remark in pipelined["remarks"])

"""`calibrate` on the command line. Times of a tiny pair mean nothing, so none is looked at."""

from __future__ import annotations

import json

import pytest

from spec_export.calibration.profile import read_profile, why_unusable
from spec_export.runtime.opened import make_backend


def test_calibrate_writes_a_profile_and_says_what_it_advises(
    cli, tiny_bundle, tmp_path, prompts, open_once
):
    out, report = tmp_path / "p.json", tmp_path / "p.html"
    called = cli(
        *("calibrate", tiny_bundle, "--prompts", prompts, "--tokens", 16),
        *("-o", out, "--report", report),
    )
    assert called.code == 0, called.err
    profile, opened = read_profile(out), open_once(tiny_bundle)
    device = make_backend("onnxruntime", opened.manifest.device.threads).describe()
    assert why_unusable(profile, opened.bundle.sha256, device) is None
    assert " ".join(called.out.split()).startswith(profile.reason)
    assert profile.reason[1:] in report.read_text()
    assert profile.setting.prompts == 3 and profile.setting.tokens == 16
    assert not list(tmp_path.glob("*.partial")) and not (tiny_bundle / "profile.json").exists()


def test_calibrate_as_json_and_quietly(cli, tiny_bundle, tmp_path, prompts):
    given = ("calibrate", tiny_bundle, "--prompts", prompts, "--tokens", 8, "-o", tmp_path / "p")
    called = cli(*given, "--json", "--temperature", 0.7, "--seed", 5)
    assert called.out.count("\n") == 1
    found = json.loads(called.out)
    setting = found["setting"]
    assert (setting["temperature"], setting["seed"], setting["rule"]) == (0.7, 5, "reject")
    called = cli(*given, "--quiet")
    assert called.out.count("\n") == 1 and called.err == ""
    assert called.out.strip() == read_profile(tmp_path / "p").reason


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "has no prompts"),
        (b" \n\t\n", "has no prompts"),
        (b"\xff\xfe", "not UTF-8"),
        ("In the beginning\n".encode("utf-16"), "not UTF-8: byte 0 is 0xff"),
        (b"word " * 500 + b"\nshort\n", "leaves room for"),
        (b"only one\n", "at least 2"),
    ],
)
def test_calibrate_refuses_prompts_it_cannot_use(cli, tiny_bundle, prompts, content, word):
    prompts.write_bytes(content)
    assert word in cli("calibrate", tiny_bundle, "--prompts", prompts).refused()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--tokens", 2), "--tokens 2"),
        (("--tokens", 0), "--tokens 0"),
        (("--tokens", -5), "--tokens -5"),
        (("--tokens", 128), "--tokens 128: 8 to 127"),
        (("--tokens", 10**30), "8 to 127"),
        (("--temperature", -1), "temperature"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--temperature", "inf"), "temperature=inf"),
        (("--temperature", 0.5, "--seed", -1), "seed=-1"),
        (("--prompts", "/dev/zero"), "more than the 16777216 bytes"),
        (("--prompts", "nowhere.txt"), "cannot be read"),
    ],
)
def test_calibrate_refuses_numbers_that_mean_nothing(cli, tiny_bundle, arguments, word):
    assert word in cli("calibrate", tiny_bundle, *arguments).refused()


@pytest.mark.parametrize("option", ["--tokens", "--temperature", "--seed", "--threads"])
@pytest.mark.parametrize("text", ["much", "", "1,5", "0x10"])
def test_calibrate_takes_numbers_only(cli, tiny_bundle, option, text):
    """What is no number is a mistake of usage: told with the option's name, exit code 2."""
    called = cli("calibrate", tiny_bundle, option, text)
    assert (called.code, called.out) == (2, "")
    assert f"Invalid value for '{option}'" in called.err


def test_calibrate_refuses_a_bundle_without_drafts_and_what_is_no_bundle(
    cli, tiny_plain_bundle, tmp_path
):
    assert "without a draft" in cli("calibrate", tiny_plain_bundle).refused()
    assert "not a bundle" in cli("calibrate", tmp_path).refused()


def test_calibrate_refuses_what_does_not_fit_before_it_opens_anything(
    cli, tiny_bundle, monkeypatch
):
    monkeypatch.setattr("spec_export.calibration.devices.available_bytes", lambda: 50_000_000)
    monkeypatch.setattr(
        "spec_export.runtime.opened.open_runtime", lambda *_, **__: pytest.fail("opened")
    )
    assert "this machine has" in cli("calibrate", tiny_bundle).refused()


def test_calibrate_refuses_a_profile_it_cannot_write(cli, tiny_bundle, tmp_path, prompts):
    """Before any work: the measurement itself is kept beside the profile."""
    out = tmp_path / "no" / "p.json"
    called = cli("calibrate", tiny_bundle, "--prompts", prompts, "--tokens", 8, "-o", out)
    assert f"there is no directory {out.parent}" in called.refused()


@pytest.mark.parametrize(
    ("option", "place", "word"),
    [
        ("-o", "folder", "-o {} is a directory"),
        ("--report", "folder", "--report {} is a directory"),
        ("--report", "nowhere/p.html", "there is no directory"),
        ("--report", "p.txt", "a page (.html) or a picture (.png)"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    cli, tiny_bundle, tmp_path, option, place, word
):
    """Minutes of measuring came first, and `Is a directory` was said of a hidden file."""
    (tmp_path / "folder").mkdir()
    called = cli("calibrate", tiny_bundle, option, tmp_path / place)
    assert word.format(tmp_path / place) in called.refused()
    assert "measuring" not in called.err and not (tiny_bundle / "profile.json").exists()

"""`calibrate --exported`: other precisions of both models, in the profile and in the advice."""

from __future__ import annotations

import json

import pytest

TEXTS = ("In the beginning", "And it came to pass", "The king said unto")


def test_calibrate_compares_precisions_when_it_is_given_what_was_exported(
    cli, tiny_bundle, tiny_exported, tmp_path
):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(TEXTS))
    out, report = tmp_path / "p.json", tmp_path / "p.html"
    called = cli(
        *("calibrate", tiny_bundle, "--prompts", file, "--tokens", 12, "-o", out),
        *("--exported", tiny_exported("pair"), "--precisions", "int8", "--report", report),
    )
    assert called.code == 0, called.err
    profile = json.loads(out.read_text())
    assert [t["name"] for t in profile["precisions"]["targets"]] == ["float32", "int8"]
    assert " target " in profile["reason"] or "bits are not faster here" in profile["reason"]
    page = report.read_text()
    assert "Precisions of the target" in page and "Memory of a process" in page
    assert sum(profile["memory"].values()) > 1e6


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--precisions", "int8"), "--precisions needs --exported"),
        (("--exported", "nowhere", "--synthetic", "0.5"), "--synthetic compares no precisions"),
        (("--exported", "nowhere", "--precisions", "int3"), "--precisions int3: int8 or int4"),
    ],
)
def test_options_that_do_not_go_together_are_refused(cli, tiny_bundle, options, word):
    called = cli("calibrate", tiny_bundle, *options)
    assert called.code == 2 and word in called.err and called.err.count("\n") == 1


def test_another_directory_is_refused_before_anything_is_measured(cli, tiny_bundle, tiny_exported):
    """Its hashes were looked at after the measuring."""
    called = cli("calibrate", tiny_bundle, "--exported", tiny_exported("none"))
    assert "name the directory it was built from" in called.refused()
    assert "measuring" not in called.err and not list(tiny_bundle.glob("profile.json*"))

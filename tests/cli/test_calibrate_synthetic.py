"""`calibrate --synthetic`: a table by acceptance. Times of a tiny pair mean nothing."""

from __future__ import annotations

import json

import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.ort import OrtBackend


@pytest.fixture
def several(tiny_exported, tmp_path):
    """Verify passes for one, two and four drafts."""
    options = BuildOptions(gamma=4, narrower=(1, 2), max_len=64, chunk=32)
    return build_bundle(tiny_exported("ngram"), tmp_path / "bundle", OrtBackend(), options).path


def test_a_table_of_every_alpha_and_gamma_and_no_profile(cli, several, prompts):
    before = sorted(several.iterdir())
    called = cli(
        *("calibrate", several, "--synthetic", "0.9,0.2", "--prompts", prompts, "--tokens", 16)
    )
    assert called.code == 0, called.err
    lines = called.out.splitlines()
    assert "alpha" in lines[0] and "a draft that costs nothing" in " ".join(lines[:2])
    rows = [line.removeprefix("->").split() for line in lines]
    found = [(row[0], row[2]) for row in rows if len(row) == 8 and row[0] in ("0.2", "0.9")]
    assert found == [(alpha, gamma) for alpha in ("0.2", "0.9") for gamma in "124"]
    said = " ".join(called.out.split())
    assert "- at alpha 0.2:" in said and "- at alpha 0.9:" in said
    assert "no profile is written" in said
    assert sorted(several.iterdir()) == before and max(map(len, lines)) < 80


def test_as_json_with_the_cost_of_a_draft_and_quietly(cli, tiny_bundle, prompts):
    asked = ("calibrate", tiny_bundle, "--synthetic", "0.5", "--prompts", prompts, "--tokens", 8)
    called = cli(*asked, "--json", "--cost-ratio", 0.2)
    assert called.code == 0, called.err
    assert called.out.count("\n") == 1
    found = json.loads(called.out)
    (speed,) = found["speeds"]
    assert (speed["alpha"], speed["gamma"], found["cost_ratio"]) == (0.5, 4, 0.2)
    assert speed["computed"] < speed["measured"]["value"], "a draft that takes time is slower"
    assert found["prompts"] == 3 and found["rule"] is None
    called = cli(*asked, "--quiet")
    assert called.out.count("\n") == 1 and called.err == ""
    assert not (tiny_bundle / "profile.json").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--synthetic", "2"), "alpha is 2.0"),
        (("--synthetic", "much"), "with commas between"),
        (("--synthetic", "0.5", "--cost-ratio", "nan"), "cost_ratio is nan"),
        (("--synthetic", "0.5", "--cost-ratio", "-1"), "cost_ratio is -1"),
        (("--synthetic", "0.5", "--tokens", "0"), "--tokens 0"),
        (("--synthetic", "0.5", "--temperature", "0.8"), "--rule invariant"),
        (("--synthetic", "0.5", "-o", "p.json"), "writes no profile"),
        (("--synthetic", "0.5", "--report", "p.html"), "writes no profile"),
        (("--cost-ratio", "0.5"), "belongs to --synthetic"),
    ],
)
def test_what_means_nothing_is_refused(cli, tiny_bundle, arguments, word):
    assert word in cli("calibrate", tiny_bundle, *arguments).refused()


def test_a_bundle_without_verify_passes_is_refused(cli, tiny_plain_bundle):
    refused = cli("calibrate", tiny_plain_bundle, "--synthetic", "0.5").refused()
    assert "without a draft" in refused

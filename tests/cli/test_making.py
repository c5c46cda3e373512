"""`export`, `build` and `model-to-engine`: what they report, what they refuse, what they leave."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys

import gguf
import pytest

from spec_export import making
from spec_export.console import size
from spec_export.engines.errors import MissingExtra
from spec_export.runtime.compare import SelfCheck
from tests.tiny_checkpoints import edit_json
from tests.tiny_models import TINY

TARGET, DRAFT = TINY / "target", TINY / "draft"


def left_in(folder):
    """Every name in a folder, hidden ones included."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the tiny target that may be spoiled."""
    return shutil.copytree(TARGET, tmp_path / "checkpoint")


@pytest.fixture
def out(tmp_path):
    """Where to write to, in a folder that holds nothing else."""
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "out"


# --- happy paths ----------------------------------------------------------------------------------


def test_model_to_engine_makes_a_bundle_that_runs(cli, out):
    called = cli("model-to-engine", TARGET, "--draft", DRAFT, "--max-len", 64, "-o", out)
    assert called.code == 0, called.err
    for word in ("parity", "exactness", "self-check", "GroupQueryAttention", "gamma 4"):
        assert word in called.out
    steps = [line.partition(":")[0] for line in called.err.splitlines()]
    assert len(steps) == len(set(steps)), "a step is told once"
    assert {"tracing the target", "tracing the draft", "verifying files"} <= set(steps)
    assert left_in(out.parent) == ["out"], "the exported directory went away"
    assert cli("run", out, "--prompt", "And", "--max-tokens", 4, "-q").code == 0


def test_export_and_build_are_the_two_halves(cli, out, tiny_pair_exported):
    kept = out.parent / "exported"
    called = cli("export", TARGET, "--draft", "none", "-o", kept)
    assert called.code == 0, called.err
    assert f"spec-export build {kept}" in called.out
    called = cli("build", kept, "--max-len", 64, "--chunk", 16, "-o", out)
    assert called.code == 0, called.err
    assert "none (plain decoding), gamma 0" in called.out
    assert left_in(out.parent) == ["exported", "out"]


def test_a_build_over_an_older_bundle_says_that_its_profile_is_gone(cli, out, tiny_pair_exported):
    """It went away without a word, and with it what `run --gamma auto` goes by."""
    asked = ("build", tiny_pair_exported, "--max-len", 32, "--chunk", 16, "-o", out)
    assert "profile" not in cli(*asked).out
    for left in (True, False):
        if left:
            (out / "profile.json").write_text("{}")
        lines = [line for line in cli(*asked).out.splitlines() if "profile" in line]
        assert len(lines) == left
        assert all("is gone; spec-export calibrate" in line for line in lines)
    assert left_in(out.parent) == ["out"] and "profile.json" not in left_in(out)


def test_sizes_are_said_before_they_are_taken(cli, out, tiny_pair_exported):
    """onnxruntime-genai 550: a default of the whole context took all memory."""
    called = cli("build", tiny_pair_exported, "--max-len", 64, "--chunk", 32, "-o", out)
    lines = called.err.splitlines()
    assert lines[0].startswith("sizes: weights ")
    manifest = json.loads((out / "manifest.json").read_text())
    caches = sum(
        4 * 1 * state["dims"][1] * state["dims"][2] * state["dims"][3]
        for model in manifest["models"].values()
        for state in model["states"]
    )
    assert f"one session's caches {size(caches)} for a context of 64 tokens" in lines[0]


def test_the_default_context_is_cut_to_the_target_and_that_is_said(cli, out, tiny_pair_exported):
    called = cli("build", tiny_pair_exported, "-o", out)
    assert called.code == 0
    assert "512 tokens, all the target has positions for" in called.err
    assert json.loads((out / "manifest.json").read_text())["max_len"] == 512


def test_quiet_is_silent(cli, out, tiny_pair_exported):
    called = cli("build", tiny_pair_exported, "--max-len", 64, "-q", "-o", out)
    assert (called.code, called.out, called.err) == (0, "", "")


def test_the_exported_directory_can_be_kept(cli, out, monkeypatch, tiny_pair_exported):
    monkeypatch.setattr(making, "export", lambda _, to, __: shutil.copytree(tiny_pair_exported, to))
    kept = out.parent / "kept"
    arguments = ("--max-len", 64, "--keep-exported", kept, "-q", "-o", out)
    assert cli("model-to-engine", TARGET, *arguments).code == 0
    assert left_in(out.parent) == ["kept", "out"]
    assert (kept / "graphs.json").is_file()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gamma", 0), ["--gamma 0", "1 to 16"]),
        (("--gamma", 17), ["--gamma 17", "1 to 16"]),
        (("--max-len", 513), ["--max-len 513", "512 positions"]),
        (("--max-len", 1), ["--max-len 1"]),
        (("--chunk", 1), ["--chunk 1"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(cli, out, tiny_pair_exported, arguments, words):
    """By `model-to-engine` before the export, which takes minutes."""
    for command in (("build", tiny_pair_exported), ("model-to-engine", TARGET)):
        message = cli(*command, *arguments, "-o", out).refused()
        assert all(word in message for word in words)
    assert left_in(out.parent) == []


def test_an_unknown_backend_is_a_usage_error(cli, out, tiny_pair_exported):
    called = cli("build", tiny_pair_exported, "--backend", "abacus", "-o", out)
    assert called.code == 2
    assert "onnxruntime" in called.err


def test_a_missing_checkpoint(cli, out):
    assert "does not exist" in cli("model-to-engine", "./nowhere", "-o", out).refused()
    assert "does not exist" in cli("export", "./nowhere.gguf", "-o", out).refused()
    assert left_in(out.parent) == []


def test_a_truncated_checkpoint(cli, checkpoint, out):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in cli("model-to-engine", checkpoint, "-o", out).refused()
    assert left_in(out.parent) == []


def test_a_gguf_with_an_unknown_architecture(cli, tmp_path, out):
    file = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(file, "strange")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "strange" in cli("model-to-engine", file, "-o", out).refused()
    assert left_in(out.parent) == []


def test_a_pickle(cli, checkpoint, out):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "pickle" in cli("model-to-engine", checkpoint, "-o", out).refused()
    assert left_in(out.parent) == []


def test_a_model_that_brings_its_own_code(cli, checkpoint, out):
    edit_json(checkpoint / "config.json", auto_map={"AutoModelForCausalLM": "own.Model"})
    message = cli("model-to-engine", checkpoint, "-o", out).refused()
    assert "--trust-remote-code" in message
    assert left_in(out.parent) == []


def test_tokenizers_that_differ(cli, tmp_path, out):
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = cli("model-to-engine", TARGET, "--draft", draft, "-o", out).refused()
    assert "tokenizer" in message and "1031" in message
    assert left_in(out.parent) == []


def test_an_output_that_is_not_ours_is_left_alone(cli, out, tiny_pair_exported):
    out.mkdir()
    (out / "precious").write_text("mine")
    for command in (("model-to-engine", TARGET), ("build", tiny_pair_exported)):
        assert "not ours to replace" in cli(*command, "-o", out).refused()
    assert left_in(out) == ["precious"]


def test_build_wants_an_exported_directory(cli, out, tiny_bundle):
    assert "graphs.json" in cli("build", tiny_bundle, "-o", out).refused()


def test_a_missing_extra_is_named(cli, out, monkeypatch):
    def absent(extra, *_):
        raise MissingExtra(f"torch is not installed, and this step needs the extra [{extra}]")

    monkeypatch.setattr("spec_export.engines.extras.require", absent)
    assert "[export]" in cli("export", TARGET, "-o", out).refused()


# --- nothing half-written -------------------------------------------------------------------------


@pytest.fixture
def existing(out, tiny_bundle):
    """A bundle that is there already, and its content."""
    shutil.copytree(tiny_bundle, out)
    return (out / "manifest.json").read_bytes()


def test_a_full_disk(cli, out, tiny_pair_exported, existing, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    assert "disk is full" in cli("build", tiny_pair_exported, "--max-len", 64, "-o", out).refused()
    assert left_in(out.parent) == ["out"]
    assert (out / "manifest.json").read_bytes() == existing


def test_an_interrupt_keeps_the_existing_bundle(
    cli, out, tiny_pair_exported, existing, monkeypatch
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("spec_export.runtime.compare.check_session", interrupted)
    called = cli("build", tiny_pair_exported, "--max-len", 64, "-o", out)
    assert called.code == 130
    assert called.err.splitlines()[-1] == "interrupted"
    assert left_in(out.parent) == ["out"]
    assert (out / "manifest.json").read_bytes() == existing


def test_a_bundle_that_fails_its_self_check_is_not_kept(cli, out, tiny_pair_exported, monkeypatch):
    found = SelfCheck(tokens=32, accepted=9, departs_at=7, is_promised=True)
    monkeypatch.setattr("spec_export.runtime.compare.check_session", lambda _: found)
    message = cli("build", tiny_pair_exported, "--max-len", 64, "-o", out).refused()
    assert "token 7" in message
    assert left_in(out.parent) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_export_leaves_nothing(out, number, code):
    """Sent while the target is traced: the line before it is out, and tracing takes seconds."""
    command = [sys.executable, "-m", "spec_export.cli", "model-to-engine", str(TARGET)]
    run = subprocess.Popen(
        [*command, "-o", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores SIGINT, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stderr is not None
    while not run.stderr.readline().startswith("loading torch"):
        assert run.poll() is None
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == code
    assert left_in(out.parent) == []

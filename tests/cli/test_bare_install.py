"""A device has no torch, transformers or onnx: what runs there does without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

BLOCKED = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "gguf")
PROGRAM = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
from spec_export.cli import main
sys.argv = ["spec-export", *sys.argv[1:]]
main()
"""


def bare(home, *arguments):
    """Call the program in a process that cannot import what makes models."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=BLOCKED), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(home)},
    )


def test_a_bundle_is_inspected_run_and_compared(tiny_bundle, tmp_path):
    arguments = ("run", tiny_bundle, "--prompt", "And the", "--max-tokens", 8, "--json")
    called = bare(tmp_path, *arguments, "--compare", "--temperature", 0.7)
    assert called.returncode == 0, called.stderr
    assert len(json.loads(called.stdout)["token_ids"]) <= 8
    assert bare(tmp_path, "inspect", tiny_bundle).returncode == 0


def test_a_bundle_is_checked(tiny_ngram_bundle, tmp_path):
    called = bare(tmp_path, "check", tiny_ngram_bundle)
    assert called.returncode == 0, called.stderr


def test_what_needs_an_extra_names_it(tiny_pair_exported, tiny_bundle, tmp_path):
    out = tmp_path / "out"
    graph = tiny_bundle / "target" / "model.onnx"
    for extra, arguments in (
        ("export", ("export", "somewhere", "-o", out)),
        ("export", ("model-to-engine", "somewhere", "-o", out)),
        ("build", ("build", tiny_pair_exported, "--max-len", 64, "-q", "-o", out)),
        ("build", ("inspect", graph)),
    ):
        called = bare(tmp_path, *arguments)
        assert called.returncode == 2
        assert called.stderr.count("\n") == 1
        assert f"[{extra}]" in called.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {".cache"}

"""Asking for help loads neither an engine library nor anything a model is made with.

What is loaded decides how long `--help` takes, and unlike a time it is the same on every machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = (
    "numpy",
    "onnxruntime",
    "tensorrt",
    "tensorrt_rtx",
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "tokenizers",
    "safetensors",
    "gguf",
    "optimum",
    "scipy",
)
COMMANDS = ("model-to-engine", "export", "build", "run", "inspect", "check", "plan", "calibrate")

PROBE = """
import json, sys
sys.argv = ["spec-export", *sys.argv[1:]]
from spec_export.cli import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print(json.dumps({"code": code or 0, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def _run(*arguments: str) -> tuple[str, int, set[str]]:
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"},
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stderr.splitlines()[-1])
    return run.stdout, report["code"], set(report["modules"])


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_loads_nothing_heavy(command):
    shown, code, modules = _run(*command, "--help")
    assert code == 0
    assert "Usage" in shown
    assert not modules & set(HEAVY)


def test_help_names_every_command():
    shown, _, _ = _run("--help")
    assert not [name for name in COMMANDS if name not in shown]


def test_the_probe_sees_a_heavy_module():
    """Negative control: the modules reported are those of the process that was asked."""
    code = PROBE.replace("from spec_export.cli import main", "import numpy\ndef main(): pass")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "numpy" in json.loads(run.stderr.splitlines()[-1])["modules"]

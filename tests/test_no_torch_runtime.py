"""A device has numpy, tokenizers, jinja2 and an engine library, and no model or graph library.

Opening a bundle and running it is done in a process where those cannot be imported.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spec_export.engines import extras
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.errors import MissingExtra
from spec_export.engines.ort import OrtBackend
from tests.decoding import decode

MISSING = (
    *("torch", "transformers", "safetensors", "gguf", "optimum", "huggingface_hub"),
    *("onnx", "onnx_ir", "onnxscript", "scipy", "ml_dtypes"),
)
WITHOUT = f"""
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
RUN = """
import json
from spec_export.engines.bundle import VerifiedFiles
from spec_export.runtime import Request, Sampling, Session, generate, open_runtime

opened = open_runtime(sys.argv[1], memory=VerifiedFiles(None))
session, texts = Session(opened), []
for temperature in (0.0, 1.0):
    request = Request(max_tokens=20, ignore_end=True, sampling=Sampling(temperature, 4))
    pieces = list(generate(session, opened.text.encode("And the king"), request))
    texts.append("".join(piece.text for piece in pieces))
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"texts": texts, "method": opened.manifest.method, "loaded": loaded}))
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_ngram_bundle", "tiny_plain_bundle"])
def test_a_bundle_runs_without_model_and_graph_libraries(name, request, open_once):
    path = request.getfixturevalue(name)
    done = run(RUN, path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not set(found["loaded"]) & set(MISSING)
    assert {"numpy", "onnxruntime", "tokenizers"} <= set(found["loaded"])
    opened = open_once(path)
    assert found["method"] == opened.manifest.method
    greedy = decode(opened, opened.text.encode("And the king"), max_tokens=20, ignore_end=True)
    assert found["texts"][0] == greedy.text


CALIBRATE = """
from spec_export.cli import app
app(["calibrate", sys.argv[1], "--prompts", sys.argv[2], "--tokens", "8", "-o", sys.argv[3]])
"""


def test_a_bundle_is_calibrated_without_model_and_graph_libraries(tiny_ngram_bundle, tmp_path):
    """The comparison of precisions needs them; the report of a profile does not."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "profile.json"
    prompts.write_text("In the beginning\nAnd it came to pass\n")
    done = run(CALIBRATE, tiny_ngram_bundle, prompts, out)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["precisions"] is None


@pytest.mark.parametrize("name", MISSING)
def test_the_libraries_are_really_missing(name):
    """Negative control."""
    done = run(f"import {name}")
    assert done.returncode and "ModuleNotFoundError" in done.stderr


def test_building_without_the_graph_library_names_the_extra(
    tiny_pair_exported, tmp_path, monkeypatch
):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    options = BuildOptions(gamma=1, max_len=16, chunk=8)
    with pytest.raises(MissingExtra, match=r"pip install '.\[build\]'"):
        build_bundle(tiny_pair_exported, tmp_path / "bundle", OrtBackend(), options)
    assert not list(tmp_path.iterdir())

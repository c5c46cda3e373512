"""TensorRT on the command line, on a machine without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_export.compiling import asked_precision
from spec_export.engines import trt_api
from spec_export.engines.bundle import VerifiedFiles, open_bundle
from spec_export.engines.certify import Certificate, record
from spec_export.engines.errors import BundleError
from spec_export.engines.trt import TrtBackend

pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is for x86-64 Linux")
GPUS = ", ".join(trt_api.load("tensorrt-rtx").compute_capabilities())
SMALL = ("--max-len", "64", "--chunk", "16", "--gamma", "2")
RTX = ("--backend", "tensorrt-rtx")


@pytest.fixture(scope="module")
def built(tiny_pair_exported, tmp_path_factory) -> Path:
    """A bundle built by the command from a float32 directory."""
    if TrtBackend("tensorrt-rtx").can_run:
        pytest.skip("what is built ahead of time is looked at where it cannot run")
    out = tmp_path_factory.mktemp("cli") / "bundle"
    command = [sys.executable, "-m", "spec_export.cli", "build", str(tiny_pair_exported), *RTX]
    done = subprocess.run(
        [*command, *SMALL, "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Internal Error" not in done.stderr
    for word in ("device memory: about", "unprobed", f"compute capability {GPUS}", "--record"):
        assert word in done.stdout + done.stderr
    return out


def test_inspect_shows_what_it_is_for(cli, built):
    shown = cli("inspect", built).out
    for word in ("tensorrt-rtx", f"compute capability {GPUS}", "float16"):
        assert word in shown
    described = json.loads(cli("inspect", built, "--json").out)
    assert described["engines"]["target"]["attentions"] == 4
    assert described["exactness"]["kind"] == "unprobed"


@pytest.mark.parametrize("command", [("run", "--prompt", "hi"), ("check",)])
def test_without_a_gpu_it_says_so_in_one_sentence(cli, built, command):
    name, *options = command
    called = cli(name, built, *options)
    assert called.code == 2
    (line,) = called.err.strip().splitlines()
    for word in ("tensorrt-rtx", "compute capability", "no GPU", "spec-export build"):
        assert word in line


def test_a_cut_engine_is_found_before_a_library_sees_it(cli, built, tmp_path):
    copy = shutil.copytree(built, tmp_path / "cut")
    engine = copy / "target" / "model.engine"
    engine.write_bytes(engine.read_bytes()[:-1000])
    called = cli("inspect", copy)
    assert called.code == 2 and "it was cut or altered" in called.err


def test_a_manifest_that_lies_about_a_role_is_refused(cli, built, tmp_path):
    copy = shutil.copytree(built, tmp_path / "lies")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["models"]["target"]["roles"][0]["rows"] = 17
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "roles is" in cli("inspect", copy).err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*RTX, "--compute-capability", "8.7"), ("8.7", "Jetson", "--backend tensorrt")),
        ((*RTX, "--compute-capability", "9.0"), ("9.0", GPUS)),
        ((*RTX, "--workspace", "2GiB"), ("--workspace", "tensorrt-rtx times no kernels")),
        ((*RTX, "--timing-cache", "t"), ("--timing-cache", "Leave it out")),
        ((*RTX, "--builder-optimization-level", "3"), ("--builder-optimization-level",)),
        ((*RTX, "--threads", "2"), ("--threads", "onnxruntime")),
        ((*RTX, "--dtype", "float32"), ("no fused attention for float32", "--dtype float16")),
        (("--dtype", "bfloat16"), ("--dtype bfloat16", "no such kernels on a processor")),
        (
            (*RTX, "--dtype", "float16", "--weights", "bfloat16"),
            ("--weights bfloat16 is the same as --dtype bfloat16", "--dtype float16 was given"),
        ),
        (("--weights", "bfloat16"), ("--dtype bfloat16", "no such kernels on a processor")),
        ((*RTX, "--weights", "int4"), ("160 rows", "blocks of 64", "--weights int8")),
        (("--weights", "fp8"), ("--weights fp8", "--backend tensorrt")),
        (("--compute-capability", "8.9"), ("--compute-capability is for --backend tensorrt",)),
        (("--workspace", "1GiB"), ("--workspace is for --backend tensorrt",)),
        (("--backend", "tensorrt"), ("extra [tensorrt]",)),
    ],
)
def test_an_option_of_another_backend_is_refused_by_name(
    cli, tiny_pair_exported, tmp_path, options, words
):
    called = cli("build", tiny_pair_exported, *options, *SMALL, "-o", tmp_path / "bundle")
    assert called.code == 2
    for word in words:
        assert word in called.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_a_plain_type_are_the_same_as_dtype(dtype):
    """Other tools call it so; nothing is quantized."""
    assert asked_precision(None, dtype) == asked_precision(dtype, dtype) == (dtype, None)
    assert asked_precision(dtype, "int8") == (dtype, "int8")


def test_help_says_what_weights_of_a_plain_type_mean(cli):
    said = " ".join(cli("build", "--help").out.split())
    assert "float16 and bfloat16: the same as --dtype" in said


def test_nothing_is_recorded_of_a_check_that_failed(built):
    bundle = open_bundle(built, VerifiedFiles(None))
    manifest = bundle.manifest
    found = Certificate(
        bundle="bundle",
        bundle_sha256=bundle.sha256,
        created="",
        built_on=manifest.device,
        device=manifest.device,
        files=0,
        bytes=0,
        engines={},
        recorded=manifest.exactness,
        probed=manifest.exactness,
        uncompared=(),
        polygraphy={},
        fusion={},
        failures=("the attention attend_7 of the target was not fused",),
    )
    with pytest.raises(BundleError, match="attend_7"):
        record(built, found)
    assert open_bundle(built, VerifiedFiles(None)).sha256 == bundle.sha256

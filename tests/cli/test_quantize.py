"""`quantize`, and the same options of `build`: what they make, say and refuse."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from spec_export.engines.build import read_exported
from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import QuantizationSpec
from spec_export.engines.weight_blocks import quantize_weights
from tests.precisions import derive

RTX = ("--backend", "tensorrt-rtx")
SMALL = ("--max-len", "64", "--chunk", "16", "--gamma", "2")
TEXT = "In the beginning was the word, and the word was there.\n"


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    file = tmp_path / "texts" / "texts.txt"
    file.write_text(TEXT)
    return file


# --- what it makes -------------------------------------------------------------------------------


def test_quantize_then_build_is_build(cli, tiny_pair_exported, tmp_path, texts):
    """Two halves make the bundle that `build` makes at once: the same bytes of every weight.

    Agreement as it runs is told by `build` and `check` (onnxruntime 29849); what torch was compared
    with is another model than the quantized one, and a report that left that out misled.
    """
    asked = ("--weights", "int4", "--quantizer", "awq", "--calibration", texts)
    out, twice, once = (tmp_path / name for name in ("exported", "twice", "once"))
    called = cli("quantize", tiny_pair_exported, *asked, "-o", out)
    assert called.code == 0, called.err
    for word in ("weights int4 (awq, blocks of 32)", "this is the target from here on", str(out)):
        assert word in called.out
    assert cli("build", out, *SMALL, "-o", twice).code == 0
    called = cli("build", tiny_pair_exported, *asked, *SMALL, "-o", once)
    assert called.code == 0, called.err
    for word in (
        "this is the target from here on",
        "products in 8 bits, row by row: best token",
        "target, before it was quantized: within",
    ):
        assert word in called.out
    for name in ("target", "draft"):
        for file in ("model.onnx", "model.onnx.data", "standard.onnx"):
            assert (once / name / file).read_bytes() == (twice / name / file).read_bytes()
    assert cli("check", twice, "--exported", out).code == 0
    called = cli("check", once)
    assert called.code == 0, called.err
    assert "as it runs, in 8 bits row by row, the best is the same in" in called.out
    shown = json.loads(cli("check", once, "--json").out)["engines"]["target"]
    assert 0.5 < shown["as_run"] <= 1 and shown["argmax_agreement"] == 1


def test_what_comes_out_is_standard_onnx(cli, tiny_pair_exported, tmp_path, texts):
    """So any backend reads it: no operator of another domain, and the checker agrees."""
    asked = ("--weights", "int8", "--head", "int8", "--kv", "int8", "--calibration", texts)
    assert cli("quantize", tiny_pair_exported, *asked, "-o", tmp_path / "out").code == 0
    for name in ("target", "draft"):
        file = tmp_path / "out" / name / "model.onnx"
        onnx.checker.check_model(str(file), full_check=True)
        model = onnx.load(str(file), load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}
    before, after = (read_exported(path) for path in (tiny_pair_exported, tmp_path / "out"))
    wanted = QuantizationSpec("int8", "rtn", 32, False, "int8", "int8", "int8 by row")
    for name, spec in after.models.items():  # the embedding stays, and the head lies beside it
        assert spec.parameters_bytes < 0.7 * before.models[name].parameters_bytes
        assert spec.quantization == wanted


def test_caches_alone_are_quantized_of_both_models(cli, tiny_pair_exported, tmp_path, texts):
    """`--kv` alone left those of the draft in float32."""
    asked = ("--kv", "int8", "--calibration", texts)
    assert cli("quantize", tiny_pair_exported, *asked, "-o", tmp_path / "out").code == 0
    for spec in read_exported(tmp_path / "out").models.values():
        assert {state.dtype for state in spec.states} == {"int8"}
        assert spec.quantization == QuantizationSpec(kv="int8")


def test_a_draft_that_stays_keeps_every_byte(cli, tiny_pair_exported, tmp_path):
    asked = ("--weights", "int8", "--draft-weights", "none")
    assert cli("quantize", tiny_pair_exported, *asked, "-o", tmp_path / "out").code == 0
    mine, other = (path / "draft" for path in (tmp_path / "out", tiny_pair_exported))
    for file in ("model.onnx", "model.onnx.data"):
        assert (mine / file).read_bytes() == (other / file).read_bytes()
    assert read_exported(tmp_path / "out").models["draft"].quantization is None


def test_a_build_for_elsewhere_says_that_its_quantized_graphs_go_away(
    cli, tiny_exported, tmp_path, texts, monkeypatch
):
    """`check --exported` on the device then called the right directory the wrong one."""
    from spec_export.engines.ort import OrtBackend

    monkeypatch.setattr(OrtBackend, "can_run", False)
    for quantizer, is_said in (("gptq", True), ("rtn", False)):
        asked = ["--weights", "int8", "--quantizer", quantizer, *SMALL]
        asked += ["--calibration", texts] if is_said else []
        called = cli("build", tiny_exported("none"), *asked, "-o", tmp_path / quantizer)
        assert called.code == 0, called.err
        assert ("quantize first, with `spec-export quantize`" in called.err) == is_said


# --- what does not go together -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("--weights", "--draft-weights", "--kv")),
        (("--quantizer", "gptq"), ("--quantizer goes with --weights",)),
        (("--block", "32"), ("--block goes with --weights",)),
        (("--head", "int8"), ("--head goes with --weights",)),
        (("--activations", "int8"), ("--activations goes with --weights",)),
        (("--calibration", "t"), ("--calibration goes with --weights",)),
        (("--head", "int8", "--kv", "int8"), ("--head goes with --weights",)),
        (("--block", "32", "--kv", "int8"), ("--block goes with --weights",)),
        (("--weights", "int8", "--calibration", "t"), ("--calibration is for", "leave it out")),
        (("--weights", "int8", "--block", "0"), ("--block 0", "take 32")),
        (("--weights", "int8", "--block", "8"), ("--block 8", "16, 32, 64")),
        (("--weights", "int8", "--block", "48"), ("--block 48", "16, 32, 64")),
        (("--weights", "int8", "--block", "64"), ("160 rows", "blocks of 64", "--block")),
        (("--weights", "fp8"), ("--weights fp8", "int8 or int4", "--backend tensorrt")),
        (("--weights", "nvfp4"), ("--weights nvfp4", "--backend tensorrt")),
        (("--weights", "int8", "--activations", "fp8"), ("--activations fp8", "tensorrt")),
        (("--weights", "int8", "--backend", "onnxruntime-cuda"), ("onnxruntime-cuda", "leave")),
        (("--kv", "int8", *RTX), ("--kv int8", "floating types", "--backend onnxruntime")),
        (("--weights", "int8", "--quantizer", "hqq", *RTX), ("hqq", "rtn, gptq or awq")),
        (("--weights", "int4", "--quantizer", "k-quant", *RTX), ("k-quant", "rtn, gptq or awq")),
        (("--weights", "fp8", "--quantizer", "gptq", *RTX), ("--quantizer gptq", "int8 or int4")),
        (("--weights", "fp8", "--block", "64", *RTX), ("--block is for", "int8 or int4")),
        (("--weights", "int8", "--block", "64", *RTX), ("--block 64", "a scale a column")),
        (("--weights", "int4", "--block", "256", *RTX), ("--block 256", "128 or 64")),
        (("--weights", "int8", "--head", "int4", *RTX), ("--head int4", "one format")),
        (("--draft-weights", "int8", "--head", "int4", *RTX), ("--head int4", "one format")),
        (
            ("--weights", "int4", "--activations", "int8", *RTX),
            ("--activations int8", "these are int4", "--weights int8"),
        ),
        (
            ("--weights", "fp8", "--activations", "int8", *RTX),
            ("--activations int8", "these are fp8", "--weights int8"),
        ),
        (
            ("--weights", "int8", "--quantizer", "awq", "--activations", "int8", *RTX),
            ("--quantizer awq", "not rounded"),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    cli, tiny_pair_exported, tmp_path, options, words
):
    said = cli("quantize", tiny_pair_exported, *options, "-o", tmp_path / "out").refused()
    for word in words:
        assert word in said
    assert list(tmp_path.iterdir()) == []


def test_a_refused_format_of_the_draft_names_the_option_of_the_draft(
    cli, tiny_pair_exported, tmp_path
):
    """`--weights nvfp4` was refused where `--draft-weights nvfp4` had been given."""
    asked = ("--weights", "int8", "--draft-weights", "nvfp4", "-o", tmp_path / "out")
    said = cli("quantize", tiny_pair_exported, *asked).refused()
    assert "--draft-weights nvfp4" in said


@pytest.mark.parametrize("place", [".", "small", ".."])
def test_quantize_leaves_what_it_reads(cli, tiny_pair_exported, tmp_path, place):
    """`quantize exported -o exported` replaced the only float32 weights by those of fewer bits."""
    exported = shutil.copytree(tiny_pair_exported, tmp_path / "holds" / "exported")
    before = sorted(path for path in tmp_path.rglob("*"))
    asked = ("--weights", "int8", "-o", exported / place)
    said = cli("quantize", exported, *asked).refused()
    assert "which is read and has to stay" in said and "another -o" in said
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert read_exported(exported).models["target"].quantization is None


@pytest.mark.parametrize(
    ("rows", "word"), [(48, "give --block 16"), (72, "--draft-weights none"), (64, None)]
)
def test_what_is_said_of_rows_that_blocks_do_not_divide_can_be_done(tmp_path, rows, word):
    """`--block` was the remedy where no block fits, and int8 where it has the same blocks."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "one",
        [onnx.helper.make_tensor_value_info("x", 1, [1, rows])],
        [onnx.helper.make_tensor_value_info("y", 1, [1, 8])],
        [onnx.numpy_helper.from_array(np.ones((rows, 8), np.float32), "w")],
    )
    model = ir.from_proto(onnx.helper.make_model(graph))
    originals = {"w": model.graph.initializers["w"].const_value}
    for weights in ("int8", "int4"):
        wanted = QuantizationSpec(weights, "rtn", 32, zeros=weights == "int4")
        if word is None:
            quantize_weights(model.clone(), originals, wanted)
            continue
        with pytest.raises(BuildError) as caught:
            quantize_weights(model, originals, wanted)
        assert word in str(caught.value) and "take --weights int8" not in str(caught.value)


def test_a_draft_there_is_not_cannot_be_quantized(cli, tiny_exported, tmp_path):
    asked = ("--draft-weights", "int8", "-o", tmp_path / "out")
    assert "there is none" in cli("quantize", tiny_exported("ngram"), *asked).refused()


def test_only_float32_is_quantized(cli, tiny_pair_exported, tmp_path):
    half = derive(tiny_pair_exported, tmp_path / "half", "float16")
    said = cli("quantize", half, "--weights", "int8", "-o", tmp_path / "out").refused()
    for word in ("exported as float16", "--dtype float32"):
        assert word in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["quantize", "build"])
def test_what_is_quantized_is_not_quantized_again(cli, tiny_pair_exported, tmp_path, command):
    once = derive(tiny_pair_exported, tmp_path / "once", backend="onnxruntime", weights="int8")
    said = cli(command, once, "--weights", "int4", "-o", tmp_path / "out").refused()
    for word in ("quantized already", "weights int8 (rtn, blocks of 32)", "float32 directory"):
        assert word in said
    assert not (tmp_path / "out").exists()


def test_weights_of_several_names_are_refused_in_words(cli, tiny_pair_exported, tmp_path):
    """onnx_ir reads no hard links, and said so in a way nobody could follow."""
    exported = shutil.copytree(tiny_pair_exported, tmp_path / "exported")
    os.link(exported / "target" / "model.onnx.data", tmp_path / "other name")
    said = cli("quantize", exported, "--weights", "int8", "-o", tmp_path / "out").refused()
    for word in ("several names (hard links)", "copy the directory"):
        assert word in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("made_for", "built_for", "asked"),
    [
        ("onnxruntime", "tensorrt-rtx", {"kv": "int8"}),
        ("onnxruntime", "tensorrt-rtx", {"weights": "int8"}),
        ("onnxruntime", "tensorrt-rtx", {"weights": "int4", "quantizer": "rtn"}),
        ("tensorrt-rtx", "onnxruntime", {"weights": "fp8"}),
        ("tensorrt-rtx", "onnxruntime", {"weights": "nvfp4"}),
    ],
)
def test_what_was_quantized_for_another_library_is_refused(
    cli, tiny_pair_exported, tmp_path, made_for, built_for, asked
):
    """TensorRT's parser said `failed to import initializer`."""
    exported = derive(tiny_pair_exported, tmp_path / "q", backend=made_for, **asked)
    options = ("--backend", built_for, *SMALL, "-o", tmp_path / "out")
    said = cli("build", exported, *options).refused()
    for word in ("does not read", f"spec-export quantize --backend {built_for}"):
        assert word in said
    assert not (tmp_path / "out").exists()


# --- texts ---------------------------------------------------------------------------------------


def spoiled(kind: str, folder: Path) -> Path:
    """A file of texts that cannot be used."""
    file = folder / ("texts.txt" if kind in ("empty", "bytes", "few", "folder") else "texts.npz")
    ids = np.ones((2, 16), np.int64)
    arrays = {
        "object": {"input_ids": np.array([{"a": 1}], object)},
        "float": {"input_ids": ids * 0.5},
        "flat": {"input_ids": ids[0]},
        "below": {"input_ids": -ids},
        "above": {"input_ids": ids + 5000},
        "none": {"input_ids": ids[:0]},
        "other": {"ids": ids},
        "cut": {"input_ids": ids},
        "bomb": {"input_ids": np.zeros((33 << 10, 1 << 13), np.uint8)},
    }
    if kind == "bomb":
        np.savez_compressed(file, **arrays.pop(kind))
    if kind == "pipe":
        os.mkfifo(file)
    if kind == "array":
        with file.open("wb") as opened:
            np.save(opened, ids)
    if kind in arrays:
        np.savez(file, **arrays[kind], allow_pickle=True)
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:60])
    contents = {
        "empty": b"",
        "bytes": b"\xff\xfe nothing\n",
        "few": b"And\n",
        "pickle": b"\x80\x04K.",
    }
    if kind in contents:
        file.write_bytes(contents[kind])
    if kind == "folder":
        file.mkdir()
    return file


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", ("cannot be read",)),
        ("folder", ("cannot be read",)),
        ("empty", ("has no prompts",)),
        ("bytes", ("not UTF-8", "0xff")),
        ("few", ("tokens to calibrate on", "give more texts")),
        ("pickle", ("no .npz file of arrays", "numpy.savez")),
        ("array", ("no .npz file of arrays", "numpy.savez")),
        ("pipe", ("not a plain file",)),
        ("bomb", ("too large", "268435456")),
        ("object", ("no .npz file of arrays",)),
        ("cut", (".npz",)),
        ("float", ("float64 [2, 16]", "whole numbers [n, length]")),
        ("flat", ("int64 [16]", "whole numbers [n, length]")),
        ("none", ("int64 [0, 16]",)),
        ("below", ("an id below 0",)),
        ("above", ("the id 5001", "1031")),
        ("other", ("has no array 'input_ids'",)),
    ],
)
def test_texts_that_cannot_be_used_are_refused_in_one_line(
    cli, tiny_pair_exported, tmp_path, kind, words
):
    (tmp_path / "texts").mkdir()
    file = spoiled(kind, tmp_path / "texts")
    asked = ("--weights", "int4", "--calibration", file, "-o", tmp_path / "out")
    said = cli("quantize", tiny_pair_exported, *asked).refused()
    for word in words:
        assert word in said
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_no_pickle_is_loaded(cli, tiny_pair_exported, tmp_path):
    """An array of objects would run what is in it."""

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harmed"),)

    file = tmp_path / "texts.npz"
    np.savez(file, input_ids=np.array([Harmful()], object), allow_pickle=True)
    asked = ("--weights", "int4", "--calibration", file, "-o", tmp_path / "out")
    cli("quantize", tiny_pair_exported, *asked).refused()
    assert not (tmp_path / "harmed").exists()

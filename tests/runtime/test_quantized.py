"""Quantized bundles are exact: what is drafted changes no bit, and a small draft changes no text.

A quantized target is another model; what it emits is its own plain decoding, byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from spec_export.compiling import Compiling
from spec_export.console import Steps
from spec_export.engines import lower
from spec_export.engines.bundle import VerifiedFiles
from spec_export.engines.errors import BuildError, BundleError, EngineError
from spec_export.making import Made, Shapes, build
from spec_export.quantizing import Quantizing
from spec_export.runtime import Sampling, Session, open_runtime
from tests.decoding import decode, same_bits, trace

PROMPTS = ("In the beginning", "And the king said")
TOKENS, GAMMA = 24, 2
SHAPES = Shapes((GAMMA,), 64, 16)
SAMPLED = {"gptq", "awq", "kv"}
Build = Callable[..., Made]


@pytest.fixture(scope="module")
def quantized(tiny_exported, tmp_path_factory) -> Build:
    """The tiny target with a draft, quantized and built; each once."""
    made: dict[str, Made] = {}
    texts = tmp_path_factory.mktemp("texts") / "texts.txt"
    texts.write_text("".join(f"{prompt}, and it was so.\n" for prompt in PROMPTS))

    def make(draft: str = "pair", **asked: object) -> Made:
        key = json.dumps([draft, asked])
        if key not in made:
            out = tmp_path_factory.mktemp("quantized") / "bundle"
            given = texts if SAMPLED & {*asked.values(), *asked} else None
            chosen = Compiling(quantizing=Quantizing(texts=given, **asked))  # type: ignore[arg-type]
            made[key] = build(tiny_exported(draft), SHAPES, out, chosen, Steps(quiet=True))
        return made[key]

    return make


def assert_exact(opened) -> None:
    """Rounds of drafts give the tokens of plain decoding, from logits with the same bits."""
    assert opened.exactness == "width_invariant", opened.manifest.exactness.reason
    accepted = []
    for prompt in map(opened.text.encode, PROMPTS):
        plain, found = (trace(Session(opened), prompt, TOKENS, n) for n in (0, GAMMA))
        assert found.tokens[:TOKENS] == plain.tokens[:TOKENS]
        assert same_bits(found.logits[:TOKENS], plain.logits[:TOKENS])
        accepted += found.accepted
    assert 0 < sum(n for _, n in accepted) < sum(n for n, _ in accepted)


@pytest.mark.parametrize(
    ("weights", "quantizer"),
    [
        *(("int8", quantizer) for quantizer in ("rtn", "k-quant", "hqq", "gptq", "awq")),
        *(("int4", quantizer) for quantizer in ("rtn", "k-quant", "hqq", "gptq", "awq")),
    ],
)
def test_drafts_change_no_bit_of_a_quantized_target(quantized, open_once, weights, quantizer):
    """And the build tells how far the products in 8 bits are from those the graph spells out.

    onnxruntime 29849: the accuracy level of int4 flips the best token, and nobody was told.
    """
    made = quantized(weights=weights, quantizer=quantizer)
    manifest = made.bundle.manifest
    for spec in manifest.models.values():
        found = spec.quantization
        assert found is not None and (found.weights, found.quantizer) == (weights, quantizer)
        assert found.block == 32 and found.activations == "int8 by row"
    for said in manifest.lowered.values():
        (line,) = (line for line in said if "8 bits" in line)
        assert 0.5 < float(line.rpartition(" ")[2].rstrip("%")) / 100 <= 1
    assert made.self_check is not None and made.self_check.departs_at is None
    assert_exact(open_once(made.bundle.path))


@pytest.mark.parametrize(
    "asked",
    [{"activations": "float"}, {"head": "int8", "block": 16}, {"head": "int4"}],
)
def test_nor_with_other_products_blocks_and_heads(quantized, open_once, asked):
    """The vocabulary is odd: the last number of a row of a head of int4 shares its byte."""
    assert_exact(open_once(quantized(weights="int4", quantizer="rtn", **asked).bundle.path))


def test_an_engine_of_few_bits_multiplies_by_few_bits(quantized, open_once):
    """Not by matrices that were read back to float32: onnxruntime fuses what it was given.

    A product in 8 bits, row by row, has other bits than one in float32.
    """
    asked = {"weights": "int4", "quantizer": "rtn"}
    by_row, exact = (
        open_once(quantized(**asked, **more).bundle.path) for more in ({}, {"activations": "float"})
    )
    prompt = by_row.text.encode(PROMPTS[0])
    mine, other = (trace(Session(opened), prompt, 2, 0).logits[0] for opened in (by_row, exact))
    assert 0 < np.abs(mine - other).max() < 0.1 * np.abs(other).max()


# --- a quantized draft ---------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int4"])
def test_a_quantized_draft_leaves_every_byte_of_the_text(quantized, open_once, weights):
    """At temperature 0, and with a seed under the rule whose text no draft changes."""
    floats = open_once(quantized().bundle.path)
    drafted = open_once(quantized(draft_weights=weights).bundle.path)
    assert drafted.manifest.models["target"] == floats.manifest.models["target"]
    quantization = drafted.manifest.models["draft"].quantization
    assert quantization is not None and quantization.weights == weights
    rounds = []
    for sampling in (Sampling(), Sampling(1.0, 7, rule="invariant")):
        for prompt in map(floats.text.encode, PROMPTS):
            mine, other = (
                trace(Session(opened), prompt, TOKENS, GAMMA, sampling=sampling)
                for opened in (drafted, floats)
            )
            assert mine.tokens[:TOKENS] == other.tokens[:TOKENS]
            assert same_bits(mine.logits[:TOKENS], other.logits[:TOKENS])
            rounds.append(mine.accepted != other.accepted)
            texts = [
                decode(o, prompt, sampling=sampling, max_tokens=TOKENS).text
                for o in (drafted, floats)
            ]
            assert texts[0].encode() == texts[1].encode()
    assert any(rounds), "the small draft drafted just the same, so that nothing was shown"


# --- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, "int8"])
def test_drafts_change_no_bit_with_caches_of_int8(quantized, open_once, weights):
    opened = open_once(quantized(weights=weights, kv="int8").bundle.path)
    assert {s.dtype for s in opened.manifest.models["target"].states} == {"int8"}
    assert_exact(opened)


def test_caches_of_int8_are_lowered_whole_and_take_a_quarter(quantized, open_once):
    """Every layer is one operator that writes and reads int8; nothing is left in float32."""
    floats, small = quantized(weights="int8"), quantized(weights="int8", kv="int8")
    spec = small.bundle.manifest.models["target"]
    graph = onnx.load(str(small.bundle.file(spec.file)), load_external_data=False).graph
    types = [node.op_type for node in graph.node]
    assert types.count("GroupQueryAttention") == spec.layers
    assert not {"TensorScatter", "QuantizeLinear", "Attention"} & set(types)
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            said = {a.name: a for a in node.attribute}
            assert said["kv_cache_bit_width"].i == 8 and said["k_quant_type"].s == b"PER_CHANNEL"
    caches = {state.input for state in spec.states}
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    assert {kinds[name] for name in caches} == {onnx.TensorProto.INT8}

    opened = [open_once(made.bundle.path) for made in (small, floats)]
    assert 4 * opened[0].session_bytes() == opened[1].session_bytes()


def test_a_lowering_with_another_scale_is_refused(tiny_exported, tmp_path, monkeypatch):
    """The engine with small caches is held against its graph: negative control."""
    right = lower._cache_write

    def wrong(read):
        found = right(read)
        if found is not None and found.scale is not None:
            found = lower._Write(found.past, found.present, found.rows, found.scale * 1.5)
        return found

    monkeypatch.setattr(lower, "_cache_write", wrong)
    texts = tmp_path / "texts.txt"
    texts.write_text("In the beginning was the word, and the word was there.\n")
    chosen = Compiling(quantizing=Quantizing(kv="int8", texts=texts))
    with pytest.raises(BuildError, match="the compiled target does not compute its graph"):
        build(tiny_exported("none"), SHAPES, tmp_path / "bundle", chosen, Steps(quiet=True))
    assert list(tmp_path.iterdir()) == [texts]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block": 10**30}, "quantization.block"),
        ({"block": -5}, "quantization.block"),
        ({"weights": None}, "quantization"),
        ({"weights": "fp8"}, "quantization"),
        ({"kv": "int8"}, "dtype"),
    ],
)
def test_a_manifest_whose_quantization_cannot_be_is_refused(quantized, tmp_path, change, words):
    bundle = shutil.copytree(quantized("ngram", weights="int8").bundle.path, tmp_path / "bundle")
    file = bundle / "manifest.json"
    found = json.loads(file.read_text())
    found["models"]["target"]["quantization"] |= change
    file.write_text(json.dumps(found))
    with pytest.raises(BundleError, match=words):
        open_runtime(bundle, memory=VerifiedFiles(None))


def test_caches_that_are_not_what_the_manifest_says_are_named(quantized, tmp_path):
    """The library only said that a type was unexpected, without a file or a remedy."""
    bundle = shutil.copytree(quantized("ngram", weights="int8").bundle.path, tmp_path / "bundle")
    file = bundle / "manifest.json"
    found = json.loads(file.read_text())
    target = found["models"]["target"]
    target["quantization"]["kv"] = "int8"
    for tensor in (*target["inputs"], *target["outputs"], *target["states"]):
        name = tensor.get("name", "present")
        if name.startswith(("past", "present")):
            tensor["dtype"] = "int8"
    file.write_text(json.dumps(found))
    with pytest.raises(EngineError, match=r"model\.onnx: the cache .* described as int8"):
        open_runtime(bundle, memory=VerifiedFiles(None))

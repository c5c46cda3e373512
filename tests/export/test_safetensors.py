"""Weights of a directory: found by transformers' rules, mapped, and no header believed."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from spec_export.engines.errors import CheckpointError, UnsupportedModel
from spec_export.export.checkpoint import open_checkpoint
from tests.tiny_checkpoints import (
    VOCABULARY,
    edit_json,
    expected_logits,
    logits,
    parameter_shapes,
    save_directory,
    tiny_config,
    tiny_model,
)


def test_a_directory_gives_its_weights_mapped(directory, llama):
    checkpoint = open_checkpoint(str(directory))
    weights = checkpoint.weights_for(parameter_shapes(llama))
    for name, parameter in llama.named_parameters():
        value = weights.read(name)
        np.testing.assert_array_equal(value, parameter.detach().numpy())
        assert not value.flags.writeable and not value.flags.owndata
    assert weights.unused == ()
    assert weights.nbytes_largest() == 4 * VOCABULARY * 64
    assert checkpoint.source == str(directory)
    assert checkpoint.config.model_type == "llama"


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)]
)
def test_half_weights_stay_what_they_are(tmp_path, dtype, stored):
    model = tiny_model(tiny_config("llama")).to(dtype)
    checkpoint = open_checkpoint(str(save_directory(tmp_path / "half", model)))
    weights = checkpoint.weights_for(parameter_shapes(model))
    value = weights.read("model.layers.1.mlp.up_proj.weight")
    assert value.dtype == stored
    wanted = model.model.layers[1].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(value.astype(np.float32), wanted)


def test_shards_are_one_checkpoint(tmp_path, llama):
    path = save_directory(tmp_path / "sharded", llama, max_shard_size="50KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    assert torch.equal(
        logits(open_checkpoint(str(path)), parameter_shapes(llama)), expected_logits(llama)
    )


@pytest.mark.parametrize("renamed", ["base_model", "extra_prefix"])
def test_a_missing_or_extra_prefix_is_resolved_as_transformers_does(tmp_path, renamed):
    model = tiny_model(tiny_config("gpt2"))
    path = save_directory(tmp_path / "gpt2", model)
    state = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    if renamed == "extra_prefix":
        state = {f"transformer.{name}": value for name, value in state.items()}
    save_file(state, path / "model.safetensors")
    assert torch.equal(
        logits(open_checkpoint(str(path)), parameter_shapes(model)), expected_logits(model)
    )


def test_tied_weights_are_found_under_the_other_name(tmp_path):
    model = tiny_model(tiny_config("llama", tie_word_embeddings=True))
    path = save_directory(tmp_path / "tied", model)
    state = {name: value.clone() for name, value in model.named_parameters()}
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, path / "model.safetensors")
    assert torch.equal(
        logits(open_checkpoint(str(path)), parameter_shapes(model)), expected_logits(model)
    )


def test_experts_stored_one_by_one_are_joined(tmp_path):
    model = tiny_model(tiny_config("mixtral"))
    path = save_directory(tmp_path / "mixtral", model)
    weights = open_checkpoint(str(path)).weights_for(parameter_shapes(model))
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(weights.read(name), parameter.detach().numpy())


def test_leftover_tensors_are_listed_and_rotary_tables_are_not(directory, llama):
    state = {name: value.clone() for name, value in llama.named_parameters()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["mtp.layers.0.weight"] = torch.ones(4)
    save_file(state, directory / "model.safetensors")
    weights = open_checkpoint(str(directory)).weights_for(parameter_shapes(llama))
    assert weights.unused == ("mtp.layers.0.weight",)


def test_missing_and_misshapen_weights_are_named_before_any_is_read(directory, llama, monkeypatch):
    state = {name: value.clone() for name, value in llama.named_parameters()}
    del state["model.layers.1.self_attn.q_proj.weight"]
    state["model.norm.weight"] = torch.ones(63)
    save_file(state, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(directory)).weights_for(parameter_shapes(llama))
    message = str(caught.value)
    assert "model.layers.1.self_attn.q_proj.weight" in message
    assert "model.norm.weight is [63], the model has [64]" in message
    assert str(directory) in message


def test_integers_are_no_weights(directory, llama):
    state = {name: value.clone() for name, value in llama.named_parameters()}
    state["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(state, directory / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is stored as int8"):
        open_checkpoint(str(directory)).weights_for(parameter_shapes(llama))


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


BAD_SAFETENSORS = {
    "empty": (b"", "truncated"),
    "header longer than the file": (safetensors({}, length=1 << 40), "its header claims"),
    "header longer than the format allows": (safetensors({}, length=200_000_000), "claims"),
    "no json": (safetensors(b"{nonsense"), "not valid JSON"),
    "deep json": (safetensors(b"[" * 100_000), "not valid JSON"),
    "no object": (safetensors(b"[]"), "expected an object"),
    "a name twice": (safetensors(b'{"a": 1, "a": 2}'), "'a' appears twice"),
    "truncated data": (safetensors({"a": entry(0, 16, [4])}, b"x" * 15), "truncated: tensor a"),
    "trailing data": (safetensors({"a": entry(0, 16, [4])}, b"x" * 17), "1 bytes that belong"),
    "size lie": (safetensors({"a": entry(0, 16, [5])}, b"x" * 16), "takes 20 bytes"),
    "huge shape": (safetensors({"a": entry(0, 16, [2**40, 2**40])}, b"x" * 16), "tensor a"),
    "negative": (safetensors({"a": entry(0, 16, [-4])}, b"x" * 16), "tensor a has shape"),
    "not a number": (safetensors({"a": entry(0, 16, ["4"])}, b"x" * 16), "tensor a has shape"),
    "overlap": (
        safetensors({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, b"x" * 24),
        "tensor b starts at byte 8, expected 16",
    ),
    "gap": (
        safetensors({"a": entry(0, 16, [4]), "b": entry(20, 36, [4])}, b"x" * 36),
        "tensor b starts at byte 20, expected 16",
    ),
    "unknown dtype": (safetensors({"a": entry(0, 4, [4], "Q4")}, b"x" * 4), "unknown dtype 'Q4'"),
    "entry": (safetensors({"a": 3}), "entry of a is not an object"),
}


@pytest.mark.parametrize("case", BAD_SAFETENSORS)
def test_a_damaged_safetensors_file_is_refused_when_opened(directory, case):
    content, message = BAD_SAFETENSORS[case]
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(str(directory))
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "a/b.safetensors", 7])
def test_a_shard_index_stays_in_its_directory(directory, name):
    (directory.parent / "stolen.safetensors").write_bytes(safetensors({}))
    edit_json(directory / "model.safetensors.index.json", weight_map={"a": name})
    with pytest.raises(CheckpointError, match=r"a shard is a \.safetensors file of the same"):
        open_checkpoint(str(directory))


def test_a_missing_shard_is_named(directory):
    weight_map = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    edit_json(directory / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing, first model-00002-of"):
        open_checkpoint(str(directory))


def test_several_files_without_an_index_are_not_guessed(directory):
    for name in ("one", "two"):
        (directory / f"{name}.safetensors").write_bytes(safetensors({}))
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files and no"):
        open_checkpoint(str(directory))

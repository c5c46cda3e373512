"""Tiny random checkpoints in every form an export reads: directories and GGUF files.

The GGUF writer does to the weights what llama.cpp's converter does (convert_hf_to_gguf.py): it
interleaves Llama's query and key rows, adds one to Gemma's norms, transposes GPT-2's linears.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

BOS, EOS, TURN = "<|bos|>", "<|eos|>", "<|turn|>"
SPECIAL = [BOS, EOS, TURN]
WORDS = ["th", "the", "in", "ing", "er", "on", "Ġt", "Ġth", "Ġthe", "Ġi", "Ġin"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "<{{ m['role'] }}>{{ m['content'] }}<|turn|>\n"
    "{% endfor %}"
)


def tiny_tokenizer(words: list[str] = WORDS, extra: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer: three special tokens, 256 bytes, the words, more special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(words)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*SPECIAL, *extra]])
    return tokenizer


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Each word from a shorter one and a letter, in order."""
    return [(word[:-1], word[-1]) for word in words]


VOCABULARY = tiny_tokenizer().get_vocab_size()
IDS = torch.arange(3, 43)[None]  # longer than every window below
# Nothing here is a default of its class, and heads do not divide the hidden size where they may.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 32, "rope_theta": 5000.0},
    "qwen2": {"num_key_value_heads": 2, "rope_theta": 5000.0},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "rope_theta": 5000.0},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 8},
    "gpt2": {"n_positions": 96, "n_inner": 96},
    "phi3": {"num_key_value_heads": 2, "sliding_window": 8, "partial_rotary_factor": 0.5},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Two layers of four heads over 64 channels, and what `CONFIGS` says."""
    values = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if model_type != "gpt2":
        values |= {"intermediate_size": 96, "max_position_embeddings": 96}
    return AutoConfig.for_model(model_type, **values | CONFIGS.get(model_type, {}) | changes)


def tiny_model(config: Any, seed: int = 0) -> Any:
    """Random weights, norms and biases too, large enough that every option changes the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """What `Checkpoint.weights_for` is asked for; tied parameters once."""
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def save_directory(path: Path, model: Any, **options: Any) -> Path:
    """Write a checkpoint in Hugging Face layout, tokenizer included."""
    model.save_pretrained(path, **options)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def logits(checkpoint: Any, shapes: dict[str, tuple[int, ...]]) -> torch.Tensor:
    """Logits of IDS from the checkpoint's own configuration and weights."""
    model = AutoModelForCausalLM.from_config(checkpoint.config).eval()
    weights = checkpoint.weights_for(shapes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights.read(name).copy()))
        return model(IDS).logits


def expected_logits(model: Any) -> torch.Tensor:
    """Logits of IDS from the model a checkpoint was written from."""
    with torch.no_grad():
        return model(IDS).logits


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file, made if it is not there."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | changes), encoding="utf-8")


# --- GGUF --------------------------------------------------------------------------------------


def save_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a GGUF file.

    Args:
        path: of the file.
        model: whose weights are written.
        kind: how matrices are stored; vectors are F32.
        keys: metadata beside, or instead of, what the converter writes.
        tensors: tensors beside those of the model.
        without: metadata keys and tensors left out.
    """
    architecture = model.config.model_type.removesuffix("_text")
    metadata = {**_metadata(model.config, architecture), **_tokenizer_keys(), **(keys or {})}
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key not in {"general.architecture", *without}:
            _add(writer, key, value)
    stored = _stored(model, architecture) | (tensors or {})
    for name, value in stored.items():
        if name not in without:
            exact = value.ndim == 1 or kind == "F32"
            wanted = gguf.GGMLQuantizationType["F32" if exact else kind]
            writer.add_tensor(name, gguf.quantize(value, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    found = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": hidden,
        "attention.head_count": heads,
    }
    if architecture == "gpt2":
        found |= {"feed_forward_length": config.n_inner}
        found |= {"attention.layer_norm_epsilon": config.layer_norm_epsilon}
    else:
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        found |= {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": float(rope["rope_theta"]),
        }
        if architecture in {"gemma2", "gemma3", "qwen3", "llama"}:
            found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        if architecture in {"llama", "phi3"}:
            factor = rope.get("partial_rotary_factor", 1.0)
            found |= {"rope.dimension_count": int(head_dim * factor)}
        if getattr(config, "sliding_window", None):
            found |= {"attention.sliding_window": config.sliding_window}
        if architecture == "gemma2":
            found |= {
                "attn_logit_softcapping": config.attn_logit_softcapping,
                "final_logit_softcapping": config.final_logit_softcapping,
            }
    prefixed = {f"{architecture}.{key}": value for key, value in found.items()}
    return {"general.architecture": architecture, **prefixed}


def _tokenizer_keys() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    size = tokenizer.get_vocab_size()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(number) for number in range(size)],
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (size - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(WORDS)],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT,
    }


def _stored(model: Any, architecture: str) -> dict[str, np.ndarray]:
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    stored = {}
    for name, parameter in model.named_parameters():
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        value = parameter.detach().numpy()
        stored[found] = _as_llama_cpp(found, value, architecture, model.config)
    return stored


def _as_llama_cpp(name: str, value: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        is_query = ".attn_q." in name
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        value = halves.swapaxes(1, 2).reshape(value.shape)
    elif architecture.startswith("gemma") and name.endswith("norm.weight"):
        value = value + 1
    elif architecture == "gpt2" and value.ndim == 2 and name.startswith("blk."):
        value = value.T
    return np.ascontiguousarray(value)

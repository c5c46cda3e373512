"""Rebuild the text side of a GGUF file, which holds a vocabulary and the name of a splitting rule.

Transformers rebuilds the tokenizer; what llama.cpp does beyond that for a rule is added here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from spec_export.engines.errors import CheckpointError
from spec_export.export.text_files import (
    SPECIAL_TOKENS,
    TextFiles,
    assemble,
    declared_ids,
    parse_tokenizer,
    token_id,
)

# What llama.cpp does for a `tokenizer.ggml.pre` (src/llama-vocab.cpp) and transformers, which knows
# their regular expressions, leaves out. Digits one by one:
_SINGLE_DIGITS = {"codeshell", "command-r", "exaone", "refact", "smollm", "starcoder"}
# Whole words looked up before merging, and a BOS in front unless the file says otherwise:
_WHOLE_WORDS = {
    *("falcon-h1", "falcon3", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken")
}
# A file declares one end, models have several (an answer's, a text's); these names mean an end in
# every model that has them as a control token, and llama.cpp stops at them too.
_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    "<end_of_turn>",
)
# GPT-2's own expression, which is what transformers falls back to for any name:
_LIKE_GPT2 = {
    *("a.x-4.0", "default", "exaone4", "gigachat", "gpt-2", "jais", "mellum", "mpt", "olmo"),
    *("phi-2", "trillion"),
}


def text_from_gguf(path: Path, metadata: Mapping[str, Any]) -> TextFiles:
    """Rebuild the text side of a GGUF file.

    Args:
        path: the file, its header already checked.
        metadata: of that file, as from `read_gguf`.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be rebuilt.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"{path} has no tokenizer; export from a complete GGUF file")
    content, special = _rebuild(path)
    tokenizer = parse_tokenizer(_as_llama_cpp(content, metadata, path), str(path))
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    declared = [i for name in names for i in declared_ids(metadata.get(f"tokenizer.ggml.{name}"))]
    if metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS:
        _add_bos(tokenizer, special, metadata)
    declared += [i for i, t in tokenizer.get_added_tokens_decoder().items() if t.content in _ENDS]
    template = metadata.get("tokenizer.chat_template")
    return assemble(tokenizer, special, template if isinstance(template, str) else None, declared)


def _rebuild(path: Path) -> tuple[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as alone:  # beside other files transformers reads those
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        try:
            loaded = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file="model.gguf")
        except Exception as error:
            raise CheckpointError(
                f"the tokenizer of {path} cannot be rebuilt: {type(error).__name__}: {error}"
            ) from error
    special = loaded.special_tokens_map
    return loaded.backend_tokenizer.to_str(), {
        name: str(special[name]) for name in SPECIAL_TOKENS if name in special
    }


def _as_llama_cpp(content: str, metadata: Mapping[str, Any], path: Path) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    described = json.loads(content)
    # The class a tokenizer is rebuilt with adds its own special tokens, past the model's last id.
    known = len(metadata["tokenizer.ggml.tokens"])
    described["added_tokens"] = [a for a in described["added_tokens"] if a["id"] < known]
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        if name not in {*GGUF_PRE_TOKENIZER_SPLITS, *_SINGLE_DIGITS, *_WHOLE_WORDS, *_LIKE_GPT2}:
            raise CheckpointError(
                f"{path} splits text by the rule {name!r} (tokenizer.ggml.pre), which is not "
                "known; use the safetensors checkpoint"
            )
        described["model"]["ignore_merges"] = name in _WHOLE_WORDS
        if name in _SINGLE_DIGITS:
            digits = {"type": "Digits", "individual_digits": True}
            steps = [digits, described["pre_tokenizer"]]
            described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    elif metadata.get("tokenizer.ggml.add_space_prefix") is False:
        pre = described.get("pre_tokenizer") or {}
        if pre.get("type") == "Metaspace":
            pre["prepend_scheme"] = "never"
    return json.dumps(described, ensure_ascii=False)


def _add_bos(tokenizer: Tokenizer, special: dict[str, str], metadata: Mapping[str, Any]) -> None:
    bos = special.get("bos_token")
    bos_id = token_id(tokenizer, bos)
    if bos is None or bos_id is None or "tokenizer.ggml.add_bos_token" in metadata:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=[f"{bos}:0", "$A:0"],
        pair=[f"{bos}:0", "$A:0", "$B:1"],
        special_tokens=[(bos, bos_id)],
    )

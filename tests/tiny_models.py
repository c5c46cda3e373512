"""Tiny random models of every family an export is verified on, as checkpoints on disk.

Four query heads or more: with fewer, a head order that got lost could still look right. Every model
has two layers and 96 positions; mistral's and gemma's windows (16) are shorter than that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_checkpoints import save_directory, tiny_config, tiny_model

TINY = Path(__file__).parent / "data" / "tiny"  # the trained pair: TINY / "target", TINY / "draft"
POSITIONS = 96
WINDOW = 16
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gpt2": {"n_positions": POSITIONS},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def save_tiny_model(path: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint of `family` to the directory `path`; `changes` go into its config."""
    config = tiny_config(family, **FAMILIES[family] | changes)
    assert config.num_attention_heads >= 4
    return save_directory(path, tiny_model(config, seed))

"""Prompts for the benchmarks: Spec-Bench questions as single ChatML turns."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = Path(__file__).parent / "data" / "spec_bench.jsonl"
CATEGORIES = ("writing", "coding", "translation", "summarization", "qa", "math_reasoning", "rag")


def chatml_prompts(
    path: Path = QUESTIONS, per_category: int = 2, max_chars: int = 4000
) -> list[tuple[str, str]]:
    """`(category, prompt)` pairs: the first questions of each category that are short enough."""
    chosen: dict[str, list[str]] = {category: [] for category in CATEGORIES}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts = chosen.get(row["category"])
        if texts is not None and len(texts) < per_category and len(row["turns"][0]) <= max_chars:
            texts.append(row["turns"][0])
    return [
        (category, f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        for category, texts in chosen.items()
        for text in texts
    ]

"""Every family decodes to the last position of its context as torch does, whatever the draft.

Learned positions (gpt2, opt) end where the context ends: a padded chunk and a verify pass of nine
rows both reach past it. Windows (mistral, gemma) are shorter than the text.
"""

from __future__ import annotations

import numpy as np
import pytest

from spec_export.runtime import OpenedBundle, Session
from tests.decoding import decode
from tests.tiny_models import FAMILIES, POSITIONS

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model_of(export_family):
    """The checkpoint's torch model."""
    from transformers import AutoModelForCausalLM

    made = {}

    def load(family: str):
        if family not in made:
            checkpoint = export_family(family).parent / "checkpoint"
            made[family] = AutoModelForCausalLM.from_pretrained(
                checkpoint, attn_implementation="eager", dtype=torch.float32
            ).eval()
        return made[family]

    return load


def assert_torch_agrees(model, prompt: list[int], tokens: list[int]) -> None:
    """Each token is torch's choice after the ones before it; within 1e-3 of it at a near tie."""
    with torch.no_grad():
        rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = rows[range(len(tokens)), tokens]
    assert (rows.max(-1).values - chosen).max() < 1e-3


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 259, length).tolist()


def assert_decodes(opened: OpenedBundle, model, length: int) -> None:
    prompt, session = prompt_of(length), Session(opened)
    found = decode(session, prompt, ignore_end=True)
    assert len(found.tokens) == POSITIONS - length
    assert found.finish == "length"
    plain = decode(session, prompt, ignore_end=True, gamma=0)
    assert found.tokens == plain.tokens
    assert_torch_agrees(model, prompt, found.tokens)


@pytest.mark.parametrize("family", ["gpt2", "opt", "mistral", "gemma3_text"])
@pytest.mark.parametrize("draft", ["self", "ngram"])
def test_the_last_positions_are_right(family, draft, build_family, open_once, model_of):
    """Prompts of max_len - 1 and less, gamma 8, a chunk of 20 rows that does not divide 96."""
    opened = open_once(build_family(family, draft))
    assert (opened.manifest.gamma, opened.manifest.max_len) == (8, POSITIONS)
    for length in (POSITIONS - 1, POSITIONS - 2, POSITIONS - 8, POSITIONS - 10, 61):
        assert_decodes(opened, model_of(family), length)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_context_is_right(family, build_family, open_once, model_of):
    """From one token to the last position; transformers 48280: windows with drafts."""
    opened = open_once(build_family(family))
    for length in (1, 40):
        assert_decodes(opened, model_of(family), length)

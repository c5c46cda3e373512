"""Which tokenizers may work together."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from spec_export.engines.errors import PairError
from spec_export.export.pair import check_pair
from spec_export.export.text_files import TextFiles, assemble
from tests.tiny_checkpoints import WORDS, tiny_tokenizer


def text(tokenizer: Tokenizer) -> TextFiles:
    return assemble(tokenizer, {}, None, [])


TARGET = text(tiny_tokenizer())


@pytest.mark.parametrize("vocabularies", [(270, 270), (151936, 152064), (320, 272)])
def test_one_tokenizer_with_padded_vocabularies_is_accepted(vocabularies):
    """vllm 7252: one family is padded to different widths."""
    check_pair(TARGET, text(tiny_tokenizer()), *vocabularies)


def test_padding_named_in_one_tokenizer_is_accepted():
    """GGUF files spell the padding out as tokens of their own."""
    described = json.loads(tiny_tokenizer().to_str())
    size = len(described["model"]["vocab"])
    described["model"]["vocab"] |= {f"[PAD{size + n}]": size + n for n in range(50)}
    padded = text(Tokenizer.from_str(json.dumps(described)))
    assert padded.vocabulary == TARGET.vocabulary + 50
    check_pair(TARGET, padded, size, size + 50)
    check_pair(padded, TARGET, size + 50, size)


def test_special_tokens_of_one_side_are_accepted():
    draft = text(tiny_tokenizer(extra=("<|image|>", "<|video|>")))
    assert draft.vocabulary == TARGET.vocabulary + 2
    check_pair(TARGET, draft, 270, 272)
    check_pair(draft, TARGET, 272, 270)


def test_normalizing_unicode_on_one_side_is_accepted():
    """A tokenizer rebuilt from a GGUF file lacks the NFC step of the original."""
    composing = tiny_tokenizer()
    composing.normalizer = normalizers.NFC()
    check_pair(TARGET, text(composing), 270, 270)


def test_a_different_vocabulary_names_the_sizes_and_the_first_id():
    words = [*WORDS[:4], "st", *WORDS[5:]]
    with pytest.raises(PairError) as caught:
        check_pair(TARGET, text(tiny_tokenizer(words)), 272, 288)
    message = str(caught.value)
    assert "id 263 is 'er' in the target and 'st' in the draft" in message
    assert "270 ids (logits 272)" in message
    assert "270 (logits 288)" in message


def test_the_same_tokens_merged_otherwise_are_refused():
    """A word in none of the fixed texts: found by encoding the vocabulary itself."""
    words = [*WORDS, "zq"]
    described = json.loads(tiny_tokenizer(words).to_str())
    described["model"]["merges"].remove(["z", "q"])
    draft = text(Tokenizer.from_str(json.dumps(described)))
    with pytest.raises(PairError, match=r"'zq' becomes \[270\] in the target and \[\d+, \d+\]"):
        check_pair(text(tiny_tokenizer(words)), draft, 271, 271)


def test_the_same_tokens_split_otherwise_are_refused():
    """Only the fixed texts show it: no single token of either is split."""
    whole = tiny_tokenizer()
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(PairError, match=r"becomes \[.*\] in the target"):
        check_pair(TARGET, text(whole), 270, 270)


def test_tokenizers_without_a_common_id_are_refused():
    described = json.loads(tiny_tokenizer().to_str())
    described["added_tokens"] = []
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {token: number + 1000 for token, number in vocabulary.items()}
    with pytest.raises(PairError, match="no id in common"):
        check_pair(TARGET, text(Tokenizer.from_str(json.dumps(described))), 270, 1270)

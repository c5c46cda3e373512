"""Decide whether a draft's ids mean to the target what they mean to the draft.

Speculation hands ids from one model to the other, so both tokenizers must give the same ids for the
same text. The sizes of the models may differ: one family is often padded to different widths.
"""

from __future__ import annotations

import unicodedata

from tokenizers import Tokenizer

from spec_export.engines.errors import PairError
from spec_export.export.text_files import TextFiles, parse_tokenizer

# Every class of character the splitting rules of common tokenizers treat in its own way.
_TEXTS = (
    "Hello, world! It's 5 o'clock; we'll see you (perhaps) at the CAFÉ.",
    "def f(x):\n    return {'a': [x ** 2, -1e-7]}  # TODO\n\n\tpass\r\n",
    "   leading,  double   and trailing spaces   ",
    "\n\n \n\t\t indented",
    "1234567890 3.14159 1,000,000 2024-11-29 0x7fff",
    "naïve façade, Straße, Ærø, ﬁne",
    "Привет, мир. Γειά σου Κόσμε",
    "你好，世界。こんにちは 안녕하세요 สวัสดี",
    "مرحبا بالعالم שלום עולם नमस्ते",
    "👩‍👩‍👧 🇫🇷 👍🏽 ☃\ufe0f ∑∫√ → ≤",
    '<p class="x">&amp;</p> https://example.org/a?b=c#d user@example.org $HOME/../~',
)
_PIECES = 4096  # vocabulary entries that are encoded again


def check_pair(
    target: TextFiles, draft: TextFiles, target_vocabulary: int, draft_vocabulary: int
) -> None:
    """Refuse a draft whose tokenizer is not the target's.

    Tokens that only one of them has are allowed where all others agree: special tokens added
    later, padding of the vocabulary.

    Args:
        target: text side of the target.
        draft: text side of the draft.
        target_vocabulary: size of a row of the target's logits.
        draft_vocabulary: size of a row of the draft's logits.

    Raises:
        PairError: names the sizes and the first id, or the text, that they disagree on.
    """
    if target.tokenizer_json == draft.tokenizer_json:
        return
    sizes = (
        f"the target's has {target.vocabulary} ids (logits {target_vocabulary}), the draft's "
        f"{draft.vocabulary} (logits {draft_vocabulary})"
    )
    ours = parse_tokenizer(target.tokenizer_json.decode(), "the target")
    theirs = parse_tokenizer(draft.tokenizer_json.decode(), "the draft")
    difference = _different_token(ours, theirs) or _different_encoding(ours, theirs)
    if difference:
        raise PairError(
            f"target and draft do not share a tokenizer: {difference}; {sizes}. Use a draft of the "
            "target's family, or --draft ngram"
        )


def _different_token(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    mine = {number: token for token, number in ours.get_vocab(True).items()}
    other = {number: token for token, number in theirs.get_vocab(True).items()}
    common = sorted(mine.keys() & other.keys())
    for number in common:
        if mine[number] != other[number]:
            return (
                f"id {number} is {mine[number]!r} in the target and {other[number]!r} in the draft"
            )
    return None if common else "they have no id in common"


def _different_encoding(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    for text in (*_TEXTS, *_shared_pieces(ours, theirs)):
        # One side may normalize Unicode and the other not; text mostly comes normalized.
        text = unicodedata.normalize("NFC", text)
        mine = ours.encode(text, add_special_tokens=False).ids
        other = theirs.encode(text, add_special_tokens=False).ids
        if mine != other:
            return f"{text!r} becomes {_start(mine)} in the target and {_start(other)} in the draft"
    return None


def _shared_pieces(ours: Tokenizer, theirs: Tokenizer) -> list[str]:
    """Text of tokens that both have, evenly spread: it takes most of the merges to encode them."""
    added = {*ours.get_added_tokens_decoder(), *theirs.get_added_tokens_decoder()}
    common = min(ours.get_vocab_size(True), theirs.get_vocab_size(True))
    picked = range(0, common, max(1, common // _PIECES))
    return [ours.decode([number]) for number in picked if number not in added]


def _start(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}]"

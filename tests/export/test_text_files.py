"""Tokenizers, templates and end tokens, from directories and GGUF files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

from spec_export.engines.errors import CheckpointError
from spec_export.export.checkpoint import open_checkpoint
from tests.tiny_checkpoints import (
    BOS,
    CHAT,
    EOS,
    TURN,
    VOCABULARY,
    edit_json,
    save_gguf,
    tiny_tokenizer,
)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory, llama):
    return save_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", llama)


def test_the_text_side_of_a_directory(directory):
    edit_json(directory / "generation_config.json", eos_token_id=[1, 7])
    text = open_checkpoint(str(directory)).text
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    assert tokenizer.encode("the thing").ids == tiny_tokenizer().encode("the thing").ids
    assert text.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert (text.bos_id, text.add_bos, text.vocabulary) == (0, False, VOCABULARY)
    assert text.chat_template == CHAT
    # declared 1 and 7; the template ends a turn with <|turn|>, which is 2
    assert text.end_ids == (1, 2, 7)


def test_special_tokens_come_from_ids_where_no_file_names_them(directory):
    (directory / "tokenizer_config.json").unlink()
    text = open_checkpoint(str(directory)).text
    assert text.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert text.chat_template is None
    assert text.end_ids == (1,)


def test_ids_a_configuration_class_makes_up_are_not_end_ids(directory):
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    del content["eos_token_id"]  # LlamaConfig's own default is 2
    (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    edit_json(directory / "tokenizer_config.json", chat_template=None)
    edit_json(directory / "generation_config.json", eos_token_id=None)
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.text.end_ids == (1,)  # the tokenizer's


def test_a_tokenizer_that_adds_bos_truncates_and_pads(directory):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    text = open_checkpoint(str(directory)).text
    assert text.add_bos
    ids = Tokenizer.from_str(text.tokenizer_json.decode()).encode("a long prompt").ids
    assert ids[0] == 0 and len(ids) > 4
    assert len(ids) < 16


TEMPLATES: dict[str, tuple[Any, str | None, bool]] = {
    "list": (
        [{"name": "tool", "template": "x"}, {"name": "default", "template": CHAT}],
        CHAT,
        True,
    ),
    "no default": ([{"name": "tool", "template": CHAT}], None, False),
    "no end token": (
        "{% for m in messages %}\n\n{{ m.role }}: {{ m.content }}{% endfor %}",
        "",
        False,
    ),
    "refuses": ("{{ raise_exception('no') }}", "", False),
    "broken": ("{% for %}", "", False),
    "no messages": ("{{ eos_token }}<|turn|>", "", False),
    "attacks": ("{{ ''.__class__.__mro__[1].__subclasses__() }}<|turn|>", "", False),
    "space before": ("{% for m in messages %}{{ m.content + ' <|turn|>' }}{% endfor %}", "", True),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_end_of_a_turn_is_what_the_template_puts_after_an_answer(directory, case):
    given, kept, ends_turn = TEMPLATES[case]
    edit_json(directory / "tokenizer_config.json", chat_template=given)
    text = open_checkpoint(str(directory)).text
    assert text.chat_template == (given if kept == "" else kept)
    assert text.end_ids == ((1, 2) if ends_turn else (1,))


def test_a_template_file_wins(directory):
    (directory / "chat_template.jinja").write_text("{{ 1 }}", encoding="utf-8")
    assert open_checkpoint(str(directory)).text.chat_template == "{{ 1 }}"


def test_a_tokenizer_of_another_format_is_converted(directory):
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    letters = tiny_tokenizer().get_vocab(True)
    merges = [tuple(pair) for pair in json.loads(tiny_tokenizer().to_str())["model"]["merges"]]
    slow = GPT2Tokenizer(vocab=letters, merges=merges, bos_token=BOS, eos_token=EOS, unk_token=EOS)
    slow.save_pretrained(directory)
    described = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (directory / "vocab.json").write_text(json.dumps(described["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in described["merges"])]
    (directory / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    edit_json(directory / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    (directory / "tokenizer.json").unlink()
    text = open_checkpoint(str(directory)).text
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    assert tokenizer.encode("the thing").ids == tiny_tokenizer().encode("the thing").ids
    assert text.special_tokens["bos_token"] == BOS


def test_a_checkpoint_without_a_tokenizer(directory):
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read(directory, content):
    (directory / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="tokenizer"):
        open_checkpoint(str(directory))


# --- GGUF --------------------------------------------------------------------------------------


def test_the_text_side_of_a_gguf_file(gguf_path):
    text = open_checkpoint(str(gguf_path)).text
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    for sample in ("the thing in Latin", f"{TURN}\nin{EOS}", "naïve 你好 12"):
        assert tokenizer.encode(sample).ids == tiny_tokenizer().encode(sample).ids
    assert text.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert (text.bos_id, text.add_bos) == (0, False)
    assert text.end_ids == (1, 2)
    assert text.chat_template == CHAT


def test_a_rebuilt_tokenizer_knows_no_id_the_file_does_not_have(gguf_path):
    """GPT2Tokenizer brings `<|endoftext|>` along, past the end of the model's embedding."""
    text = open_checkpoint(str(gguf_path)).text
    assert text.vocabulary == VOCABULARY
    ids = Tokenizer.from_str(text.tokenizer_json.decode()).encode("in<|endoftext|>").ids
    assert max(ids) < VOCABULARY


def test_what_llama_cpp_does_for_a_splitting_rule(tmp_path, llama):
    def tokenizer(rule: str, **keys: Any) -> tuple[Any, Tokenizer]:
        path = tmp_path / f"{rule}{len(keys)}.gguf"
        save_gguf(path, llama, keys={"tokenizer.ggml.pre": rule, **keys})
        text = open_checkpoint(str(path)).text
        return text, Tokenizer.from_str(text.tokenizer_json.decode())

    text, llama3 = tokenizer("llama-bpe")
    assert text.add_bos
    assert json.loads(llama3.to_str())["model"]["ignore_merges"]
    text, _ = tokenizer("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    assert not text.add_bos
    text, _ = tokenizer("gpt-2", **{"tokenizer.ggml.add_bos_token": True})
    assert text.add_bos
    _, smollm = tokenizer("smollm")
    steps = json.loads(smollm.to_str())["pre_tokenizer"]["pretokenizers"]
    assert steps[0] == {"type": "Digits", "individual_digits": True}


def test_known_ends_beside_the_declared_one(tmp_path, llama):
    tokens = [*(tiny_tokenizer().id_to_token(i) for i in range(VOCABULARY - 1)), "<|eot_id|>"]
    types = [3, 3, 3, *[1] * (VOCABULARY - 4), 3]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [" ".join(pair) for pair in json.loads(tiny_tokenizer().to_str())["model"]["merges"]]
    path = save_gguf(
        tmp_path / "m.gguf", llama, keys={**keys, "tokenizer.ggml.merges": merges[:-1]}
    )
    assert open_checkpoint(str(path)).text.end_ids == (1, 2, VOCABULARY - 1)


@pytest.mark.parametrize(("prefix", "tokens"), [(None, ["▁ab"]), (True, ["▁ab"]), (False, ["ab"])])
def test_a_sentencepiece_vocabulary_and_its_leading_space(tmp_path, llama, prefix, tokens):
    """Transformers puts a space in front of every text, whatever the file says."""
    pieces = ["<unk>", BOS, EOS, "▁", "a", "b", "ab", "▁ab"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [f"<pad{n}>" for n in range(VOCABULARY - len(pieces))]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(n) for n in range(VOCABULARY)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 5, *[6] * 256, *[5] * (VOCABULARY - 264)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if prefix is not None:
        keys["tokenizer.ggml.add_space_prefix"] = prefix
    without = ("tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.chat_template")
    path = save_gguf(tmp_path / "m.gguf", llama, keys=keys, without=without)
    text = open_checkpoint(str(path)).text
    assert (text.bos_id, text.add_bos, text.end_ids) == (1, True, (2,))
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    assert tokenizer.encode("ab").tokens == [BOS, *tokens]
    assert tokenizer.encode("é", add_special_tokens=False).tokens[-2:] == ["<0xC3>", "<0xA9>"]

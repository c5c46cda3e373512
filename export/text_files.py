"""The text side of a checkpoint: its tokenizer, chat template and the tokens that end a text.

Everything is brought into one form, the JSON of the `tokenizers` library, because that is all the
runtime reads. Does not know the model; the ids its configuration declares are passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from spec_export.engines.errors import CheckpointError
from spec_export.export.json_files import read_json_object

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_MAX_TEXT_BYTES = 256 << 20  # Gemma's tokenizer.json has 33 MB
# Without one of these there is nothing to convert, and transformers makes up an empty tokenizer.
_CONVERTIBLE = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "*.tiktoken")


@dataclass(frozen=True)
class TextFiles:
    """How text becomes ids and back.

    Attributes:
        tokenizer_json: content for `tokenizers.Tokenizer.from_str`; never truncates or pads.
        chat_template: jinja source, if the checkpoint has one.
        special_tokens: those of `bos_token`, `eos_token`, `pad_token`, `unk_token` there are.
        bos_id: id of `bos_token`; None when there is none.
        add_bos: whether encoding a prompt puts `bos_id` in front.
        end_ids: tokens that end a text, ascending.
        vocabulary: ids the tokenizer knows.
    """

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_id: int | None
    add_bos: bool
    end_ids: tuple[int, ...]
    vocabulary: int


def text_from_directory(
    directory: Path, config: Mapping[str, Any], trust_remote_code: bool = False
) -> TextFiles:
    """Read the text side of a checkpoint in Hugging Face layout.

    Args:
        directory: of the checkpoint.
        config: content of its `config.json` (not the configuration object, whose class fills in
            ids the checkpoint never stated).
        trust_remote_code: whether a tokenizer may bring its own code.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be read.
    """
    settings = _optional(directory / "special_tokens_map.json")
    settings |= _optional(directory / "tokenizer_config.json")
    if (directory / "tokenizer.json").is_file():
        content = _read_text(directory / "tokenizer.json")
    else:
        content, converted = _convert(directory, trust_remote_code)
        settings = converted | settings
    tokenizer = parse_tokenizer(content, str(directory))
    special = _special_tokens(settings, tokenizer, config)
    generation = _optional(directory / "generation_config.json")
    declared = [
        *declared_ids(generation.get("eos_token_id")),
        *declared_ids(config.get("eos_token_id")),
    ]
    return assemble(tokenizer, special, _template(directory, settings), declared)


def parse_tokenizer(content: str, where: str) -> Tokenizer:
    """Parse the JSON of a tokenizer.

    Raises:
        CheckpointError: it is not one the `tokenizers` library can read.
    """
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"the tokenizer of {where} cannot be read: {error}") from error


def assemble(
    tokenizer: Tokenizer,
    special: dict[str, str],
    template: str | None,
    declared_ends: Iterable[int],
) -> TextFiles:
    """Put the text side together and ask the tokenizer what it does.

    Args:
        tokenizer: made ready for prompts here: it neither truncates nor pads afterwards.
        special: names such as `bos_token` to their text.
        template: jinja source.
        declared_ends: end ids the configurations of the checkpoint declare.
    """
    special = {
        name: text for name, text in special.items() if token_id(tokenizer, text) is not None
    }
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bos_id = token_id(tokenizer, special.get("bos_token"))
    first = tokenizer.encode("a").ids[:1]
    ends = {*declared_ends, token_id(tokenizer, special.get("eos_token"))}
    if template is not None:
        ends.add(_end_of_turn(tokenizer, template, special))
    return TextFiles(
        tokenizer_json=tokenizer.to_str().encode("utf-8"),
        chat_template=template,
        special_tokens=special,
        bos_id=bos_id,
        add_bos=bos_id is not None and first == [bos_id],
        end_ids=tuple(sorted(end for end in ends if end is not None)),
        vocabulary=tokenizer.get_vocab_size(with_added_tokens=True),
    )


def _end_of_turn(tokenizer: Tokenizer, template: str, special: dict[str, str]) -> int | None:
    """The special token a chat template puts after an answer.

    A model trained on the template ends its answers with that token, but many checkpoints declare
    only the end of a text (Llama 3 `<|end_of_text|>`, not `<|eot_id|>`; Gemma `<eos>`, not
    `<end_of_turn>`), and every GGUF file declares just one. So a conversation that ends with an
    answer is rendered, and what follows the answer, white space aside, is looked at: a special
    token there ends turns. Text there (templates without such a token) adds nothing.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render = cast(Any, render_jinja_template)  # annotated as returning one string
    question, answer = "QUESTION", "LAST-ANSWER"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        rendered = render(conversations=[messages], chat_template=template, **special)[0][0]
    except Exception:  # a template may demand tools, images or other roles: it declares no end then
        return None
    if answer not in rendered:
        return None
    after = rendered.rpartition(answer)[2].lstrip()
    ids = [
        (token.content, number)
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content and after.startswith(token.content)
    ]
    return max(ids, key=lambda found: len(found[0]))[1] if ids else None


def _special_tokens(
    settings: Mapping[str, Any], tokenizer: Tokenizer, config: Mapping[str, Any]
) -> dict[str, str]:
    """Text of the special tokens; where no file names one, the id in `config.json` does."""
    special = {}
    for name in SPECIAL_TOKENS:
        token: Any = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if name not in settings and type(config.get(f"{name}_id")) is int:
            token = tokenizer.id_to_token(config[f"{name}_id"]) if config[f"{name}_id"] >= 0 else ""
        if isinstance(token, str):
            special[name] = token
    return special


def token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    """Id of a token's text; None when there is none."""
    return None if token is None else tokenizer.token_to_id(token)


def declared_ids(value: Any) -> list[int]:
    """Token ids in a configuration value: one, a list of them, or none."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """A file beside the tokenizer wins over the one inside its configuration."""
    if (directory / "chat_template.jinja").is_file():
        return _read_text(directory / "chat_template.jinja")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _convert(directory: Path, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """Convert a tokenizer of another format; returns its JSON and its special tokens."""
    if not any(any(directory.glob(pattern)) for pattern in _CONVERTIBLE):
        raise CheckpointError(
            f"{directory} has no tokenizer (tokenizer.json, {', '.join(_CONVERTIBLE)}); copy it "
            "from the model it belongs to"
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
        content = loaded.backend_tokenizer.to_str()
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer of {directory} cannot be converted to tokenizer.json: {error}"
        ) from error
    return content, {name: str(token) for name, token in loaded.special_tokens_map.items()}

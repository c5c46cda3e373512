"""Prompts as ids: beginnings of texts, chat templates, and templates that misbehave."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spec_export.engines.bundle import open_bundle
from spec_export.engines.errors import BundleError, RequestError
from spec_export.runtime.text import Text
from tests.tiny_checkpoints import tiny_tokenizer
from tests.tiny_models import TINY

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hé \U0001f44d"},
]


@pytest.fixture
def text_with(tiny_bundle, tmp_path):
    """The tiny pair's text side with another template, or other special tokens."""
    bundle = open_bundle(tiny_bundle)

    def make(template: str | None = None, **changes: object) -> Text:
        file = None
        if template is not None:
            file = tmp_path / "template.jinja"
            file.write_text(template, encoding="utf-8")
        spec = replace(bundle.manifest.text, **changes)
        return Text(bundle.file(spec.tokenizer), file, spec)

    return make


def test_ids_are_those_of_the_checkpoints_tokenizer(text_with):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TINY / "target")
    for prompt in ("And the king said", " x", "\n\n", "naïve \U0001f469‍\U0001f467", "<s>"):
        assert text_with().encode(prompt) == theirs(prompt)["input_ids"]


def test_an_empty_prompt_starts_from_bos_or_is_refused(text_with, tmp_path):
    """Of a tokenizer that puts nothing in front of texts by itself."""
    file = tmp_path / "tokenizer.json"
    tiny_tokenizer().save(str(file))
    spec = text_with().spec
    assert Text(file, None, replace(spec, bos_id=2)).encode("") == [2]
    with pytest.raises(RequestError, match="prompt is empty and this model has no BOS token"):
        Text(file, None, replace(spec, bos_id=None)).encode("")


def test_a_long_prompt_is_not_cut(text_with):
    """Tokenizer files may ask for truncation and padding; a prompt is what was typed."""
    assert len(text_with().encode("word " * 5000)) >= 5000


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    "{%- for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
    "{{ m['content'] | trim }}\n{%- endfor %}",
    "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "{{ strftime_now('%Y') }}{{ missing }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_transformers_renders_them(template, text_with):
    """Loop controls, dates and JSON without HTML escapes are what templates are written for."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TINY / "target")
    expected = theirs.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    ours = text_with(template, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    found = ours.encode_chat(MESSAGES)
    assert found == theirs(expected, add_special_tokens=False)["input_ids"]
    assert json.dumps(expected)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only user messages') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ messages['x'] + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
    ],
)
def test_a_template_that_misbehaves_is_one_sentence(template, text_with):
    """It came with a checkpoint: it may refuse, break, or try to get out; nothing else happens."""
    with pytest.raises(RequestError, match="the chat template refused the messages: "):
        text_with(template).encode_chat(MESSAGES)


def test_a_model_without_a_template_says_so(text_with):
    with pytest.raises(RequestError, match="no chat template; run it without --chat"):
        text_with().encode_chat(MESSAGES)


def test_a_file_that_is_no_tokenizer_is_refused(tiny_bundle, tmp_path):
    spec = open_bundle(tiny_bundle).manifest.text
    for content in ("", "{}", '{"model": 1}'):
        file = tmp_path / "tokenizer.json"
        file.write_text(content)
        with pytest.raises(BundleError, match="is not a tokenizer"):
            Text(file, None, spec)

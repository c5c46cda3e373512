"""Options of `run` that shape the draw, and `check --law`."""

from __future__ import annotations

import json

import pytest


def test_every_sampling_option_reaches_the_draw(cli, tiny_bundle):
    """Edge-LLM 211: options were silently dropped."""
    called = cli(
        "run", tiny_bundle, "--prompt", "And the king", "--max-tokens", 12, "--json",
        "--temperature", 0.8, "--seed", 5, "--rule", "block", "--draft-sampling", "probabilistic",
        "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--repetition-penalty", 1.1,
        "--presence-penalty", 0.1, "--frequency-penalty", 0.1, "--no-repeat-ngram", 4,
        "--logit-bias", "17=-100", "--ban", 18, "--min-tokens", 2, "--logprobs", 3,
    )  # fmt: skip
    assert called.code == 0, called
    found = json.loads(called.out)
    assert (found["seed"], found["rule"]) == (5, "block")
    assert not {17, 18} & set(found["token_ids"])
    assert len(found["logprobs"]) == len(found["top_logprobs"]) == len(found["token_ids"])
    assert all(len(row) == 3 for row in found["top_logprobs"])


def test_a_seed_that_was_drawn_is_reported_and_gives_the_text_again(cli, tiny_bundle):
    run = ("run", tiny_bundle, "--prompt", "And the king", "--max-tokens", 12, "--json")
    first = json.loads(cli(*run, "--temperature", 1, "--rule", "reject").out)
    options = ("--temperature", 1, "--rule", "reject", "--seed", first["seed"])
    assert json.loads(cli(*run, *options).out)["token_ids"] == first["token_ids"]


def test_regex(cli, tiny_bundle):
    called = cli(
        "run", tiny_bundle, "--prompt", "And", "--regex", "[a-z]{4}", "--max-tokens", 8, "-q"
    )
    assert called.code == 0
    assert len(called.out.strip()) <= 4


def test_tokens_that_alone_may_come(cli, tiny_bundle):
    allow = [argument for token in (70, 80, 90) for argument in ("--allow", token)]
    called = cli("run", tiny_bundle, "--prompt", "And", "--max-tokens", 9, "--json", *allow)
    assert {70, 80, 90} >= set(json.loads(called.out)["token_ids"])


def test_what_is_served_differently_is_said_in_json_too(cli, tiny_ngram_bundle):
    """`rule` said `block` where `reject` judged, which only the report for people told."""
    run = ("run", tiny_ngram_bundle, "--prompt", "And", "--max-tokens", 4, "--temperature", 1)
    found = json.loads(cli(*run, "--rule", "block", "--json").out)
    assert found["rule"] == "reject"
    assert "rule reject is used" in found["remarks"][0]
    assert "rule reject is used" in cli(*run, "--rule", "block").err
    assert json.loads(cli(*run, "--rule", "reject", "--json").out)["remarks"] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--top-p", "2"), "top_p"),
        (("--temperature", "-1"), "temperature"),
        (("--seed", "-1"), "seed"),
        (("--logit-bias", "x=1"), "ID=BIAS"),
        (("--logit-bias", "99999=1"), "99999"),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), "token 5 has one already"),
        (("--logprobs", "3"), "--logprobs N is shown with --json"),
        (("--allow", "70", "--ban", "70"), "no token is left"),
        (("--regex", "("), "regex"),
        (("--regex", "a", "--json-schema", "absent.json"), "absent.json"),
    ],
)
def test_a_bad_value_is_one_line(options, said, cli, tiny_bundle):
    message = cli("run", tiny_bundle, "--prompt", "And", *options).refused()
    assert said in message


def test_law(cli, tiny_bundle):
    found = json.loads(cli("check", tiny_bundle, "--law", "--json").out)
    assert [result["rule"] for result in found["law"]] == ["reject", "block", "invariant"]
    assert all(result["holds"] for result in found["law"])

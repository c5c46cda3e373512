"""`run`: the text on stdout, the report on stderr, one object with --json, refusals."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from spec_export.runtime import Request, Session, generate
from tests.tiny_checkpoints import edit_json

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "method",
    "gamma",
    "rounds",
    "tokens_per_round",
    "alpha",
    "accepted_per_position",
    "tokens_per_s",
    "ttft_ms",
    "speedup",
    "exactness",
}
PROMPT = "And the LORD said unto"


def ran(called):
    """The object of a call with --json, which is all there is on stdout."""
    assert called.code == 0, called.err
    assert called.out.count("\n") == 1
    return json.loads(called.out)


@pytest.fixture
def changed(tiny_bundle, tmp_path):
    """A copy of the tiny bundle that may be written to."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


# --- what it prints ------------------------------------------------------------------------------


def test_the_text_is_on_stdout_and_the_report_on_stderr(cli, tiny_bundle, open_once):
    called = cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 24)
    assert called.code == 0
    opened = open_once(tiny_bundle)
    pieces = generate(Session(opened), opened.text.encode(PROMPT), Request(max_tokens=24))
    assert called.out == "".join(piece.text for piece in pieces) + "\n"
    for word in (
        "gamma 4",
        "tokens per round",
        "alpha 0.",
        "by position",
        "tokens/s",
        "first token",
    ):
        assert word in called.err
    assert "width_invariant" in called.err


def test_alpha_is_shown_as_accepted_of_tested(cli, tiny_bundle):
    """Accepted of proposed would count drafts that were never looked at."""
    arguments = ("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 40)
    found = ran(cli(*arguments, "--json"))
    shown = f"alpha {found['alpha']:.2f} ({found['accepted']}/{found['tested']})"
    assert shown in cli(*arguments).err
    assert found["alpha"] == found["accepted"] / found["tested"]


def test_quiet_prints_the_text_alone(cli, tiny_bundle):
    called = cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 8, "-q")
    assert called.out.strip()
    assert called.err == ""


def test_json_is_one_object_with_the_promised_keys(cli, tiny_bundle, open_once):
    called = cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 20, "--json")
    found = ran(called)
    assert set(found) >= KEYS
    assert called.err == ""
    assert (found["method"], found["gamma"], found["speedup"]) == ("model", 4, None)
    assert found["exactness"] == "width_invariant"
    assert len(found["token_ids"]) == found["tokens"] == 20
    assert found["finish_reason"] == "length"
    assert found["text"] == open_once(tiny_bundle).text.decode(found["token_ids"])
    assert len(found["accepted_per_position"]) == 4


def test_compare_tells_the_speed_up_and_that_the_texts_are_equal(cli, tiny_ngram_bundle):
    arguments = ("run", tiny_ngram_bundle, "--prompt", PROMPT, "--max-tokens", 16, "--compare")
    found = ran(cli(*arguments, "--json"))
    assert found["speedup"] > 0
    comparison = found["comparison"]
    assert comparison["tokens"] == 16
    assert comparison["exact_departs_at"] is None
    assert [len(speeds) for speeds in comparison["tokens_per_s"].values()] == [3, 3, 3]
    called = cli(*arguments)
    assert called.code == 0
    for word in ("fast plain", "exact plain", "same text", "speed-up", "speculation "):
        assert word in called.err


def test_a_single_token_is_not_compared_and_that_is_said(cli, tiny_bundle):
    called = cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 1, "--compare")
    assert called.code == 0
    assert "not compared" in called.err


# --- what it does ---------------------------------------------------------------------------------


def test_drafts_do_not_change_the_text(cli, tiny_bundle):
    texts = {
        cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 32, "--gamma", g, "-q").out
        for g in range(5)
    }
    assert len(texts) == 1


def test_a_seed_is_a_text(cli, tiny_bundle):
    def text(seed):
        return cli(
            *("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 24, "-q"),
            *("--temperature", 1.0, "--seed", seed),
        ).out

    assert text(1) == text(1) != text(2)


def test_a_prompt_may_come_from_stdin(cli, tiny_bundle):
    """The newline that ends a line of `echo` is not part of the prompt."""
    given = cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 8, "-q").out
    piped = f"{PROMPT}\n".encode()
    for arguments in ((), ("-",), ("--prompt", "-")):
        called = cli("run", tiny_bundle, *arguments, "--max-tokens", 8, "-q", stdin=piped)
        assert (called.code, called.out) == (0, given)


def test_chat_goes_through_the_template(cli, tiny_bundle, open_once):
    found = ran(cli("run", tiny_bundle, "--prompt", "Hello", "--chat", "--max-tokens", 2, "--json"))
    messages = [{"role": "user", "content": "Hello"}]
    assert found["prompt_tokens"] == len(open_once(tiny_bundle).text.encode_chat(messages))


def test_stop_strings_end_the_text_and_are_not_in_it(cli, tiny_bundle):
    whole = ran(cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 32, "--json"))["text"]
    stop = whole.split()[4]
    found = ran(
        cli(
            *("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 32, "--json"),
            *("--stop", "\0never", "--stop", stop),
        )
    )
    assert found["finish_reason"] == "stop"
    assert found["text"] == whole[: whole.index(stop)]


def test_an_empty_prompt_begins_with_bos(cli, tiny_bundle):
    found = ran(cli("run", tiny_bundle, "--prompt", "", "--max-tokens", 4, "--json"))
    assert found["prompt_tokens"] == 1


def test_a_prompt_that_fills_the_context_ends_at_once(cli, tiny_bundle, open_once):
    text = open_once(tiny_bundle).text
    prompt = text.decode(text.encode(PROMPT * 40)[:128])
    while len(text.encode(prompt)) > 128:
        prompt = prompt[:-1]
    found = ran(cli("run", tiny_bundle, "--prompt", prompt, "--json"))
    assert found["prompt_tokens"] + found["tokens"] == 128
    assert found["finish_reason"] == "length"


# --- speculation is never off without a word ------------------------------------------------------


def test_gamma_0_says_that_drafts_are_off(cli, tiny_bundle):
    arguments = ("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 8, "--gamma", 0)
    assert "drafts are off: --gamma 0" in cli(*arguments).err
    found = ran(cli(*arguments, "--json"))
    assert (found["gamma"], found["rounds"], found["alpha"]) == (0, 0, None)
    assert found["drafts_off"]


def test_a_bundle_without_a_draft_says_so(cli, tiny_plain_bundle):
    called = cli("run", tiny_plain_bundle, "--prompt", PROMPT, "--max-tokens", 8)
    assert called.code == 0
    assert "drafts are off: the bundle was made without a draft" in called.err


def test_a_text_that_outgrows_the_draft_says_so(cli, build_tiny):
    """llama.cpp 25345, mlx-engine 280: a draft was given, speculation silently off."""
    called = cli("run", build_tiny("short"), "--prompt", PROMPT * 6, "--max-tokens", 30)
    assert called.code == 0
    assert "outgrew the 40 positions of the draft" in called.err


def test_another_thread_count_is_unprobed_and_says_what_to_do(cli, tiny_bundle, open_once):
    threads = open_once(tiny_bundle).manifest.device.threads + 1
    called = cli("run", tiny_bundle, "--prompt", PROMPT, "--max-tokens", 4, "--threads", threads)
    assert called.code == 0
    assert "unprobed" in called.err and "spec-export check" in called.err


# --- refusals -------------------------------------------------------------------------------------


def test_a_gamma_above_the_built_one_names_both(cli, tiny_bundle):
    message = cli("run", tiny_bundle, "--prompt", PROMPT, "--gamma", 6).refused()
    assert "gamma=6" in message and "gamma=4" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "nan"), "temperature=nan"),
        (("--seed", "-1"), "seed=-1"),
        (("--max-tokens", "0"), "max_tokens=0"),
        (("--stop", ""), "stop string is empty"),
        (("stray",), "'stray'"),
        (("-",), "two prompts"),
    ],
)
def test_a_request_out_of_range_is_refused(cli, tiny_bundle, arguments, words):
    assert words in cli("run", tiny_bundle, "--prompt", PROMPT, *arguments).refused()


def test_a_prompt_longer_than_the_context_is_refused(cli, tiny_bundle):
    message = cli("run", tiny_bundle, "--prompt", PROMPT * 60).refused()
    assert "128" in message and "--max-len" in message


def test_an_empty_prompt_without_bos_is_refused(cli, changed):
    file = changed / "text" / "tokenizer.json"
    edit_json(file, post_processor=None)
    manifest = json.loads((changed / "manifest.json").read_text())
    content = file.read_bytes()
    listed = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    edit_json(
        changed / "manifest.json",
        text=manifest["text"] | {"bos_id": None, "tokenizer_sha256": listed["sha256"]},
        files=manifest["files"] | {"text/tokenizer.json": listed},
    )
    assert "BOS" in cli("run", changed, "--prompt", "").refused()


def test_a_prompt_that_is_not_utf_8_is_refused(cli, tiny_bundle):
    assert "UTF-8" in cli("run", tiny_bundle, stdin=b"\xff\xfe").refused()
    assert "UTF-8" in cli("run", tiny_bundle, "--prompt", "\udcff").refused()


def test_chat_without_a_template_is_refused(cli, changed):
    manifest = json.loads((changed / "manifest.json").read_text())
    edit_json(changed / "manifest.json", text=manifest["text"] | {"chat_template": None})
    assert "chat template" in cli("run", changed, "--prompt", "a", "--chat").refused()


@pytest.mark.parametrize("command", [("run", "--prompt", "a"), ("inspect",), ("check",)])
class TestABundleThatCannotBeTrusted:
    def test_a_changed_byte(self, cli, changed, command):
        file = changed / "target" / "model.onnx.data"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        assert "model.onnx.data was altered" in cli(command[0], changed, *command[1:]).refused()

    def test_a_missing_file(self, cli, changed, command):
        (changed / "sampling" / "sample_greedy.onnx").unlink()
        assert "sample_greedy.onnx is missing" in cli(command[0], changed, *command[1:]).refused()

    def test_an_unknown_schema_version(self, cli, changed, command):
        edit_json(changed / "manifest.json", schema=99)
        assert "schema version 99" in cli(command[0], changed, *command[1:]).refused()

    def test_no_bundle_at_all(self, cli, tmp_path, command):
        cli(command[0], tmp_path / "nowhere", *command[1:]).refused()

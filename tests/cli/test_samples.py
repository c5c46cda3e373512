"""Several texts after one prompt: `run --samples`."""

from __future__ import annotations

import json

import pytest

from spec_export.engines.errors import RequestError
from spec_export.runtime import Request, Sampling, sample_requests

RUN = ("--prompt", "And the king", "--max-tokens", 16, "--temperature", 1)
TIMES = ("tokens_per_s", "ttft_ms")


def without_times(found: dict) -> dict:
    return {key: value for key, value in found.items() if key not in TIMES}


@pytest.mark.parametrize("rule", ["reject", "block", "invariant"])
def test_each_sample_is_what_a_run_with_its_seed_alone_gives(rule, cli, tiny_bundle):
    options = ("run", tiny_bundle, *RUN, "--rule", rule, "--top-p", 0.9, "--json")
    found = json.loads(cli(*options, "--seed", 5, "--samples", 3).out)["samples"]
    assert found[0]["seed"] == 5
    assert len({one["seed"] for one in found}) == len({one["text"] for one in found}) == 3
    for one in found:
        alone = json.loads(cli(*options, "--seed", one["seed"]).out)
        assert without_times(alone) == without_times(one)


def test_a_sample_depends_on_no_other(cli, tiny_bundle):
    options = ("run", tiny_bundle, *RUN, "--seed", 9, "--json", "--samples")
    few, many = (json.loads(cli(*options, count).out)["samples"] for count in (2, 4))
    assert [without_times(one) for one in many[:2]] == [without_times(one) for one in few]


def test_one_sample_is_a_list_as_well(cli, tiny_bundle):
    found = json.loads(cli("run", tiny_bundle, *RUN, "--json", "--samples", 1).out)
    assert len(found["samples"]) == 1


def test_the_total_adds_up(cli, tiny_bundle):
    found = json.loads(cli("run", tiny_bundle, *RUN, "--samples", 3, "--json").out)
    each, total = found["samples"], found["total"]
    for name in ("tokens", "rounds", "plain_steps", "drafted", "accepted", "tested"):
        assert total[name] == sum(one[name] for one in each), name
    assert total["alpha"] == total["accepted"] / total["tested"]
    passes = total["rounds"] + total["plain_steps"]
    assert total["tokens_per_round"] == (total["tokens"] - 3) / passes
    assert min(one["ttft_ms"] for one in each) <= total["ttft_ms"]
    assert total["ttft_ms"] <= max(one["ttft_ms"] for one in each)
    assert set(total) <= set(each[0])


def test_texts_stand_apart_on_stdout_and_the_report_on_stderr(cli, tiny_bundle):
    options = ("run", tiny_bundle, *RUN, "--seed", 5, "--samples", 2)
    found = json.loads(cli(*options, "--json").out)["samples"]
    parts = [
        f"--- sample {i} of 2, seed {one['seed']}\n{one['text']}\n"
        for i, one in enumerate(found, start=1)
    ]
    called = cli(*options)
    assert called.out == "".join(parts)
    for word in ("sample 1", "sample 2", f"seed {found[1]['seed']}", "32 in 2 samples", "alpha 0."):
        assert word in called.err
    quiet = cli(*options, "-q")
    assert (quiet.out, quiet.err) == (called.out, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--samples", 0, "--temperature", 1), "samples=0"),
        (("--samples", 2), "temperature 0"),
        (("--samples", 2, "--temperature", 1, "--compare"), "--compare times one text"),
    ],
)
def test_what_cannot_be_is_refused(options, said, cli, tiny_bundle):
    assert said in cli("run", tiny_bundle, "--prompt", "And", *options).refused()


def test_requests_differ_in_their_seed_alone():
    request = Request(max_tokens=7, sampling=Sampling(1.0, 5, top_k=3), stop=("a",))
    requests = list(sample_requests(request, 3))
    assert requests[0] == request
    assert [each.sampling for each in requests] == [request.sampling.sample(i) for i in range(3)]
    assert {(each.max_tokens, each.stop) for each in requests} == {(7, ("a",))}
    with pytest.raises(RequestError, match="samples=-1"):
        sample_requests(request, -1)


def test_requests_are_made_one_by_one():
    """A hundred million samples took all memory before the first text."""
    assert next(sample_requests(Request(sampling=Sampling(1.0, 5)), 10**12)).sampling.seed == 5

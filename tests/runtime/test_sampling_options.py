"""Every option of `Sampling` through the whole runtime: honoured on every row, or refused.

What a text must be is worked out from the raw logits behind it, by the definitions of
`tests.weighing`. The law of the sampling graphs is shown where they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spec_export.engines.errors import RequestError
from spec_export.engines.graphs import FILTERS
from spec_export.engines.host import HostDevice
from spec_export.runtime import OpenedBundle, Request, Sampling, Session, generate
from spec_export.runtime.call_chains import Fallback
from spec_export.runtime.sampling import plan_for, remarks
from tests import weighing
from tests.decoding import Trace, decode, trace, with_end_ids
from tests.sampling_run import distribution

PROMPT = "And the king said unto the king, And the king"
TOKENS = 40
EDITS = {
    "repetition": Sampling(repetition_penalty=1.3),
    "presence": Sampling(presence_penalty=0.8),
    "frequency": Sampling(frequency_penalty=0.6),
    "negative frequency": Sampling(frequency_penalty=-2.0),
    "n-gram": Sampling(no_repeat_ngram=2),
    "n-gram of one": Sampling(no_repeat_ngram=1),
    "bias": Sampling(logit_bias={5: 4.0, 71: -math.inf}),
    "banned": Sampling(banned_tokens=range(60, 400)),
    "allowed": Sampling(allowed_tokens=range(200, 700)),
    "all": Sampling(
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        no_repeat_ngram=3,
        logit_bias={9: 1.5},
        banned_tokens=(70, 80, 90),
        min_tokens=10,
    ),
}
FILTERED = {
    "none": Sampling(1.0, 7),
    "top-k": Sampling(1.0, 7, top_k=20),
    "large top-k": Sampling(1.5, 7, top_k=600),
    "top-p": Sampling(0.8, 7, top_p=0.9),
    "wide top-p": Sampling(3.0, 7, top_p=0.97),  # more than the 256 tokens that are listed
    "min-p": Sampling(1.0, 7, min_p=0.05),
    "typical": Sampling(1.0, 7, typical_p=0.8),
    "three": Sampling(0.9, 7, top_k=50, top_p=0.9, min_p=0.02),
    "edits": replace(EDITS["all"], temperature=1.0, seed=7, rule="invariant", top_p=0.9),
}


@pytest.fixture(scope="module")
def pair(build_tiny, open_once) -> OpenedBundle:
    return open_once(build_tiny("pair"))


def edits_of(sampling: Sampling, opened: OpenedBundle, prompt: int) -> weighing.Edits:
    return weighing.Edits(
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.no_repeat_ngram,
        sampling.logit_bias,
        opened.manifest.text.end_ids,
        prompt + sampling.min_tokens if sampling.min_tokens else 0,
    )


def weighed(found: Trace, prompt: list[int], sampling: Sampling, opened: OpenedBundle) -> list:
    """The rows each token was chosen from, as the request changes them."""
    edits, rows = edits_of(sampling, opened, len(prompt)), []
    for i, row in enumerate(found.logits):
        edited = weighing.edited(row, prompt, found.tokens[:i], edits)
        allowed = np.zeros(len(row), bool)
        keep = sampling.allowed_tokens
        allowed[range(len(row)) if keep is None else list(keep)] = True
        allowed[list(sampling.banned_tokens)] = False
        rows.append(np.where(allowed, edited, -np.inf))
    return rows


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("draft", ["pair", "ngram"])
def test_each_token_is_the_best_of_its_edited_row(name, draft, build_tiny, open_once) -> None:
    """vllm 18902, 42744, 41768: an option was ignored, or acted on the last row of a round."""
    opened, sampling = open_once(build_tiny(draft)), EDITS[name]
    prompt = opened.text.encode(PROMPT)
    unedited = trace(Session(opened), prompt, TOKENS, 4).tokens
    if name == "bias":
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, unedited[1]: -100.0})
    found = trace(Session(opened), prompt, TOKENS, 4, sampling=sampling)
    assert found.accepted or sampling.no_repeat_ngram == 1, "no round had drafts"
    for token, row in zip(found.tokens, weighed(found, prompt, sampling, opened), strict=False):
        assert row[token] > row.max() - 1e-4, "the best, but for float32 against float64"
    plain = trace(Session(opened), prompt, TOKENS, 0, sampling=sampling)
    assert found.tokens[:TOKENS] == plain.tokens[:TOKENS]
    assert found.tokens[:TOKENS] != unedited[:TOKENS], "the option changed nothing"


@pytest.mark.parametrize("name", FILTERED)
def test_a_seeds_text_depends_on_no_draft(name, build_tiny, open_once) -> None:
    """Rule `invariant`, the default with a seed: any draft, any gamma, and none."""
    sampling, texts = FILTERED[name], set()
    for draft, gammas in {
        "pair": (0, 1, 2, 4),
        "random": (4,),
        "ngram": (3,),
        "none": (0,),
    }.items():
        opened = open_once(build_tiny(draft))
        prompt, session = opened.text.encode(PROMPT), Session(opened)
        for n in gammas:
            found = trace(session, prompt, TOKENS, n, sampling=sampling)
            texts.add(tuple(found.tokens[:TOKENS]))
            if n == 4 and draft == "pair":
                for greedy in (True, False):
                    other = replace(sampling, draft="greedy" if greedy else "probabilistic")
                    text = trace(session, prompt, TOKENS, n, sampling=other).tokens
                    texts.add(tuple(text[:TOKENS]))
    assert len(texts) == 1


@pytest.mark.parametrize("rule", ["reject", "block", "invariant"])
@pytest.mark.parametrize("name", FILTERED)
def test_a_token_that_is_filtered_out_never_comes(name, rule, pair) -> None:
    sampling = replace(FILTERED[name], rule=rule)
    prompt = pair.text.encode(PROMPT)
    found = trace(Session(pair), prompt, TOKENS, 4, sampling=sampling)
    filters = weighing.Filters(sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p)
    outside = 0
    for token, row in zip(found.tokens, weighed(found, prompt, sampling, pair), strict=False):
        p = distribution(row[None, None].astype(np.float32), sampling.temperature)[0]
        kept = weighing.filtered(p, filters)
        outside += kept[token] == 0
        assert p[token] > 0
    # Edits are worked out in float64 here: a token at the very threshold may fall on either side.
    assert outside <= ("edits" in name)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_raw_rows_whatever_is_edited(temperature, pair) -> None:
    """vllm 17876: of the emitted token and of the best ones, as teacher forcing has them."""
    prompt = pair.text.encode(PROMPT)
    drawn = {"temperature": temperature, "seed": 3, "rule": "invariant"}
    sampling = replace(EDITS["all"], top_logprobs=5, **drawn)
    found = trace(Session(pair), prompt, TOKENS, 4, sampling=sampling)
    listed = decode(pair, prompt, max_tokens=TOKENS, ignore_end=True, sampling=sampling)
    assert listed.tokens == found.tokens[:TOKENS]
    top = [row for piece in listed.pieces for row in piece.top]
    assert len(listed.logprobs) == len(top) == TOKENS
    for i, token in enumerate(listed.tokens):
        raw = found.logits[i].astype(np.float64)
        raw -= raw.max() + np.log(np.exp(raw - raw.max()).sum())
        assert listed.logprobs[i] == pytest.approx(raw[token], abs=1e-4)
        best = np.argsort(-raw)[:5]
        assert [id for id, _ in top[i]] == best.tolist()
        np.testing.assert_allclose([value for _, value in top[i]], raw[best], atol=1e-4)
    assert not any(piece.top for piece in decode(pair, prompt, max_tokens=5).pieces)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 6, 7])
def test_an_end_token_comes_from_its_place_on_and_not_before(min_tokens, pair) -> None:
    """vllm 41768, TensorRT-LLM 12358: off by one, in a round and without one."""
    prompt = pair.text.encode(PROMPT)
    end = 77
    opened = with_end_ids(pair, end)
    for gamma in (0, 4):
        sampling = Sampling(logit_bias={end: 100.0}, min_tokens=min_tokens)
        found = decode(opened, prompt, max_tokens=20, gamma=gamma, sampling=sampling)
        assert found.finish == "stop"
        assert len(found.tokens) == min_tokens + 1
        assert found.tokens.index(end) == min_tokens


def test_a_session_forgets_a_text_and_what_it_took_back(pair) -> None:
    """Counts and history follow the text: through rounds, a rewind, and the next text."""
    prompt, sampling = pair.text.encode(PROMPT), EDITS["all"]
    session = Session(pair)
    fresh = trace(session, prompt, TOKENS, 4, sampling=sampling).tokens
    trace(session, pair.text.encode("In the beginning"), 20, 4, sampling=sampling)
    assert trace(session, prompt, TOKENS, 4, sampling=sampling).tokens == fresh
    session.rewind(len(prompt) + 9)
    while len(session.history) < len(prompt) + TOKENS:
        session.round(2)
    assert session.history[len(prompt) :][:TOKENS] == fresh[:TOKENS]


def test_where_no_token_may_come_the_text_ends_with_an_error(pair) -> None:
    """Never with a token that is forbidden; the session goes on with the next text."""
    prompt = pair.text.encode(PROMPT)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, 1, allowed_tokens=(3, 4, 5), no_repeat_ngram=1)
        for gamma in (0, 4):
            with pytest.raises(RequestError, match="no token may come"):
                decode(pair, prompt, max_tokens=10, gamma=gamma, sampling=sampling)
    session = Session(pair)
    with pytest.raises(RequestError):
        decode(session, prompt, max_tokens=10, sampling=sampling)
    assert (
        decode(session, prompt, max_tokens=10).tokens == decode(pair, prompt, max_tokens=10).tokens
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_where_no_token_may_come_is_met_when_the_text_gets_there(
    temperature, build_tiny, open_once
) -> None:
    """It took the accepted drafts before it along, even where one of them ended the text."""
    opened = open_once(build_tiny("self"))
    prompt = opened.text.encode(PROMPT)
    sampling = Sampling(temperature, 1, allowed_tokens=(3, 4, 5), no_repeat_ngram=1)
    texts: list[list[int]] = []
    for gamma in range(5):
        tokens: list[int] = []
        pieces = generate(Session(opened), prompt, Request(sampling=sampling, gamma=gamma))
        with pytest.raises(RequestError, match=f"at token {len(prompt) + 3}"):
            tokens.extend(token for piece in pieces for token in piece.tokens)
        texts.append(tokens)
    assert sorted(texts[0]) == [3, 4, 5]
    assert all(tokens == texts[0] for tokens in texts)
    for place, end in enumerate(texts[0]):
        ending = with_end_ids(opened, end)
        for gamma in range(5):
            found = decode(ending, prompt, gamma=gamma, sampling=sampling)
            assert (found.finish, found.tokens) == ("stop", texts[0][: place + 1])


def test_samples_of_one_prompt_differ_and_come_again(pair) -> None:
    prompt, sampling = pair.text.encode(PROMPT), Sampling(1.0, 5)
    session = Session(pair)
    texts = [trace(session, prompt, 20, 4, sampling=sampling.sample(i)).tokens for i in range(8)]
    assert len({tuple(text) for text in texts}) == 8
    assert trace(session, prompt, 20, 4, sampling=sampling.sample(3)).tokens == texts[3]
    assert sampling.sample(0) == sampling
    with pytest.raises(RequestError, match="sample=-1"):
        sampling.sample(-1)
    assert all(sampling.sample(i).rule == sampling.rule for i in range(8))


# --- which graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "draft", "expected"),
    [
        (Sampling(), "pair", ("greedy", "greedy", "greedy", ())),
        (Sampling(top_k=5, top_p=0.5), "pair", ("greedy", "greedy", "greedy", ())),
        (Sampling(presence_penalty=1), "pair", ("edited", "edited", "edited", ())),
        (Sampling(banned_tokens=(1,)), "ngram", ("edited", "edited", None, ())),
        (Sampling(1.0), "pair", ("dense", "drawn", "drawn", ())),
        (Sampling(1.0, draft="greedy"), "pair", ("one_hot", "drawn", "greedy", ())),
        (Sampling(1.0), "ngram", ("one_hot", "drawn", None, ())),
        (Sampling(1.0, rule="block"), "pair", ("block", "drawn", "drawn", ())),
        (Sampling(1.0, rule="block"), "ngram", ("one_hot", "drawn", None, ())),
        (Sampling(1.0, 3), "pair", ("invariant", "drawn", "drawn", ())),
        (Sampling(1.0, 3, draft="greedy"), "pair", ("invariant", "drawn", "greedy", ())),
        (Sampling(1.0, top_k=50), "pair", ("dense", "drawn", "drawn", ("top", "any"))),
        (Sampling(1.0, top_k=256), "pair", ("dense", "drawn", "drawn", ("any",))),
        (Sampling(1.0, top_k=5000), "pair", ("dense", "drawn", "drawn", ())),
        (Sampling(1.0, top_p=0.9), "pair", ("dense", "drawn", "drawn", ("top", "nucleus", "any"))),
        (Sampling(1.0, min_p=0.1), "pair", ("dense", "drawn", "drawn", ("top", "any"))),
        (Sampling(1.0, typical_p=0.9), "pair", ("dense", "drawn", "drawn", ("typical",))),
    ],
    ids=str,
)
def test_what_is_asked_for_decides_the_graphs(sampling, draft, expected, build_tiny, open_once):
    manifest = open_once(build_tiny(draft)).manifest
    plan = plan_for(sampling, manifest)
    assert (plan.accept, plan.chooses, plan.proposes, plan.filters) == expected
    assert plan.edits == sampling.has_edits and plan.mask == sampling.has_mask


def test_a_bundle_without_lists_filters_by_bisection(pair) -> None:
    """As on TensorRT, which lists nothing; the text is the same."""
    manifest = pair.manifest
    kept = {
        n: s for n, s in manifest.sampling.items() if not n.startswith(("filter_t", "filter_n"))
    }
    opened = replace(pair, bundle=replace(pair.bundle, manifest=replace(manifest, sampling=kept)))
    assert plan_for(Sampling(1.0, top_p=0.9), opened.manifest).filters == ("any",)
    prompt, sampling = pair.text.encode(PROMPT), FILTERED["three"]
    bisected = trace(Session(opened), prompt, TOKENS, 4, sampling=sampling)
    listed = trace(Session(pair), prompt, TOKENS, 4, sampling=sampling)
    assert bisected.tokens == listed.tokens


def test_only_the_graphs_of_a_request_are_opened(build_tiny, open_once) -> None:
    """What is off costs nothing, not even the time to read it."""
    from spec_export.engines.bundle import VerifiedFiles
    from spec_export.runtime import open_runtime

    opened = open_runtime(build_tiny("pair"), memory=VerifiedFiles(None))
    Session(opened)
    assert set(opened.sampling._open) == {"sample_greedy", "accept_greedy.5", "propose_greedy"}
    assert {f"filter_{name}.1" for name in FILTERS} <= set(opened.sampling)


class Way:
    """A way to filter that cannot do some rows, and writes down which ones it was asked for."""

    def __init__(self, name: str, hard: set[int], overflow, log: list) -> None:
        self._name, self._hard, self._overflow, self._log = name, hard, overflow, log
        self.made = 0

    def bind(self, start: int, stop: int):
        self.made += 1

        def enqueue() -> None:
            self._log.append((self._name, *range(start, stop)))
            if self._name != "any":
                self._overflow.host[start:stop] = [row in self._hard for row in range(start, stop)]

        return SimpleNamespace(enqueue=enqueue)


def test_only_the_rows_a_filter_cannot_do_are_done_in_another_way() -> None:
    """All of them were, for one row: with top-p a round with look-up took a tenth longer."""
    device, log = HostDevice(), []
    overflow = device.allocate((3,), np.int64)
    hard: dict[str, set[int]] = {"top": set(), "nucleus": set(), "any": set()}
    ways = [Way(name, hard[name], overflow, log) for name in hard]
    chain = Fallback(device, [way.bind for way in ways], overflow)
    assert [way.made for way in ways] == [1, 0, 0], "others are bound when they are needed"
    for top, nucleus, later in (
        (set(), {0, 1, 2}, []),
        ({1}, set(), [("nucleus", 1)]),
        ({0, 2}, {2}, [("nucleus", 0), ("nucleus", 2), ("any", 2)]),
        ({2}, {2}, [("nucleus", 2), ("any", 2)]),
        (set(), set(), []),
    ):
        hard["top"].clear(), hard["nucleus"].clear(), log.clear()
        hard["top"].update(top), hard["nucleus"].update(nucleus)
        chain.enqueue()
        assert log == [("top", 0, 1, 2), *later]
    assert [way.made for way in ways] == [1, 3, 1]


def test_a_filter_that_always_can_is_not_asked() -> None:
    device, log = HostDevice(), []
    overflow = device.allocate((2,), np.int64)
    overflow.host[:] = 1  # left by something else
    Fallback(device, [Way("any", set(), overflow, log).bind], overflow).enqueue()
    assert log == [("any", 0, 1)]


def test_remarks_say_what_is_served_differently(build_tiny, open_once) -> None:
    """llama.cpp 25345: nothing is off without a word."""
    pair, ngram = (open_once(build_tiny(draft)).manifest for draft in ("pair", "ngram"))
    block = Sampling(1.0, rule="block")
    assert remarks(block, pair, "width_invariant") == ()
    assert "rule reject is used" in remarks(block, ngram, "width_invariant")[0]
    assert "may depend" in remarks(Sampling(1.0, 3), pair, "none")[0]
    assert remarks(Sampling(0.0, 3), pair, "none") == ()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"typical_p": 2}, "typical_p"),
        ({"typical_p": 0.5}, "typical_p"),  # at temperature 0
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": None}, "frequency_penalty"),
        ({"no_repeat_ngram": 9}, "no_repeat_ngram"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"rule": "lossy"}, "rule"),
        ({"draft": "beam"}, "draft"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {1: math.inf}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(65), 1.0)}, "logit_bias"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"logit_bias": {5.5: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: "high"}}, "logit_bias"),
        ({"logit_bias": [(5, 1.0)]}, "logit_bias"),
        ({"allowed_tokens": (1.5,)}, "allowed_tokens"),
        ({"allowed_tokens": "ab"}, "allowed_tokens"),
        ({"allowed_tokens": 5}, "allowed_tokens"),
        ({"banned_tokens": None}, "banned_tokens"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_name(options: dict, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Sampling(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"gamma": True}, "gamma"),
        ({"stop": "the"}, "stop"),  # was taken for three stops of one letter
        ({"stop": ("a", 1)}, "stop"),
        ({"grammar": "[a-z]+"}, "grammar"),
    ],
    ids=str,
)
def test_a_request_of_another_kind_is_refused_by_name(options: dict, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Request(**options)


def test_what_is_given_is_copied() -> None:
    """A list that changed later changed a request under way; an iterator was empty."""
    bias, banned = {5: 1.0}, [3]
    sampling = Sampling(logit_bias=bias, banned_tokens=banned, allowed_tokens=iter((1, 2)))
    bias[6], banned[0] = 2.0, 4
    assert (sampling.logit_bias, set(sampling.banned_tokens)) == ({5: 1.0}, {3})
    assert sampling.allowed_tokens is not None and set(sampling.allowed_tokens) == {1, 2}
    arrays = Sampling(banned_tokens=np.array([3, 4]), logit_bias={np.int64(5): np.float32(1)})
    assert (arrays.logit_bias, set(arrays.banned_tokens)) == ({5: 1.0}, {3, 4})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_bias": {1031: 1.0}}, "logit_bias has 1031"),
        ({"banned_tokens": (-1,)}, "banned_tokens has -1"),
        ({"allowed_tokens": (5, 2000)}, "allowed_tokens has 2000"),
        ({"allowed_tokens": ()}, "no token is left"),
        ({"allowed_tokens": (5,), "banned_tokens": (5,)}, "no token is left"),
    ],
    ids=str,
)
def test_ids_that_the_target_does_not_have_are_refused(options: dict, named: str, pair) -> None:
    with pytest.raises(RequestError, match=named):
        decode(pair, pair.text.encode(PROMPT), sampling=Sampling(**options))


def test_a_seed_that_is_not_given_is_drawn_and_can_be_read() -> None:
    first, second = Sampling(1.0), Sampling(1.0)
    assert first.rule == second.rule == "reject"
    assert first.seed != second.seed
    assert Sampling(1.0, first.seed, rule="reject") == first
    assert Sampling(1.0, 0).rule == "invariant"

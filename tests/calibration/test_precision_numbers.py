"""Numbers of a comparison of precisions, made again from the models' own logits in numpy.

Shared with the comparison are the engines and how passes are run, and what counts the drafts of
look-up along a text, which `test_replays` holds against decoding.
"""

from __future__ import annotations

import numpy as np
import pytest

from spec_export.calibration.candidates import make_candidates
from spec_export.calibration.evidence import Times
from spec_export.calibration.measure import Task
from spec_export.calibration.precision_names import AS_BUILT, parse_precisions
from spec_export.calibration.precision_reading import plain_text
from spec_export.calibration.precision_result import Pairing, Quality, TargetPrecision
from spec_export.calibration.precisions import _marked, compare_precisions
from spec_export.calibration.profile import PartTimes, PassTimes
from spec_export.calibration.prompts import Prompt, encode_prompts
from spec_export.calibration.replays import passes_of_lookup
from spec_export.calibration.teacher import logits_along
from spec_export.engines.build import read_exported
from spec_export.engines.passes import PassRunner
from spec_export.quantizing import Quantizing
from spec_export.runtime import Sampling, Session
from spec_export.runtime.opened import make_backend
from tests.precisions import derive

TEXTS = ("In the beginning", "And it came to pass", "The king said unto", "Thus saith the LORD")
ASKED = {
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int4+head": {"weights": "int4", "head": "int8"},
    "int8+head+kv": {"weights": "int8", "head": "int8", "kv": "int8"},
}
WARMTH = 0.8


def some_times() -> PartTimes:
    """What no pass of a model takes; nothing here depends on it."""
    one = Times(2.0, 2.0, 2.0, 20)
    rows = tuple(PassTimes(m, one) for m in (1, 2, 5))
    return PartTimes(rows, one, one, one, one, one, None, rounds=())


def compared(bundle, exported, folder, names, sampling, tokens):
    prompts = [Prompt("all", text) for text in TEXTS]
    backend = make_backend("onnxruntime", bundle.manifest.device.threads)
    wanted = parse_precisions(names)
    candidates = make_candidates(bundle, backend, exported, wanted, folder)
    ids = tuple(map(tuple, encode_prompts(bundle, prompts)))
    task = Task(tuple(prompts), ids, tokens, sampling)
    return candidates, task, compare_precisions(bundle, candidates, task, some_times())


@pytest.fixture(scope="module")
def pair(open_once, tiny_bundle, tiny_exported, tmp_path_factory):
    opened, folder = open_once(tiny_bundle), tmp_path_factory.mktemp("candidates")
    names, sampling = ",".join(ASKED), Sampling(WARMTH, 7)
    found = compared(opened, tiny_exported("pair"), folder, names, sampling, 24)
    return (opened, folder, *found)


@pytest.fixture(scope="module")
def texts(pair):
    """What the target as it was built goes on with, and how much of each is the prompt."""
    opened, _, _, task, _ = pair
    session = Session(opened)
    return [(np.array(plain_text(session, ids, task)), len(ids)) for ids in task.ids]


def reader(opened, candidates, kind: str, name: str) -> PassRunner:
    candidate = next(c for c in candidates[kind] if c.name == name)
    return PassRunner(opened.device, candidate.engine, candidate.spec)


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64) / temperature)
    return weights / weights.sum(axis=1, keepdims=True)


# --- quality -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int8+head+kv"])
def test_quality_is_that_of_the_targets_own_logits(pair, texts, name):
    """Perplexity of the prompts alone; divergence by p of float32, over the texts alone."""
    opened, _, candidates, _, found = pair
    exact = reader(opened, candidates, "target", AS_BUILT)
    rounded = reader(opened, candidates, "target", name)
    losses, apart, reversed_, same, own = [], [], [], [], []
    for text, prompt in texts:
        p, q = (softmax(logits_along(model, "verify", text, 1)) for model in (exact, rounded))
        chosen = -np.log(q[np.arange(len(q)), text[1:]])
        losses += [*chosen[: prompt - 1]]
        own += [*chosen[prompt - 1 :]]
        p, q = p[prompt - 1 :], q[prompt - 1 :]
        apart += [*(p * np.log(p / q)).sum(axis=1)]
        reversed_ += [*(q * np.log(q / p)).sum(axis=1)]
        same += [*(p.argmax(axis=1) == q.argmax(axis=1))]
    quality = next(t.quality for t in found.targets if t.name == name)
    assert quality.tokens == len(apart) == sum(len(text) - prompt for text, prompt in texts)
    assert quality.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
    assert quality.divergence == pytest.approx(np.mean(apart), rel=1e-6)
    assert quality.agreement == pytest.approx(np.mean(same), abs=1e-12)
    # What it is not is another number here.
    assert np.exp(np.mean(own)) != pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
    assert np.mean(reversed_) != pytest.approx(np.mean(apart), rel=1e-3)


# --- acceptance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft"), [("int4", AS_BUILT), (AS_BUILT, "int4"), ("int8+head+kv", "int4")]
)
def test_alpha_of_a_pairing_is_that_of_its_own_two_models(pair, texts, target, draft):
    opened, _, candidates, _, found = pair
    alphas = {}
    for judge in (target, AS_BUILT, "int8"):
        p_of = reader(opened, candidates, "target", judge)
        q_of = reader(opened, candidates, "draft", draft)
        shares = []
        for text, prompt in texts:
            p = softmax(logits_along(p_of, "verify", text, 1)[prompt - 1 :], WARMTH)
            q = softmax(logits_along(q_of, "step", text, prompt), WARMTH)
            shares += [*np.minimum(p, q).sum(axis=1)]
        alphas[judge] = np.mean(shares)
    pairing = next(p for p in found.pairings if (p.target, p.draft) == (target, draft))
    assert pairing.alpha == pytest.approx(alphas[target], abs=1e-6)
    others = [alpha for judge, alpha in alphas.items() if judge != target]
    assert all(abs(alpha - alphas[target]) > 1e-4 for alpha in others)


def test_alpha_of_look_up_is_along_the_text_that_each_target_writes(
    open_once, tiny_ngram_bundle, tiny_exported, tmp_path
):
    opened = open_once(tiny_ngram_bundle)
    candidates, task, found = compared(
        opened, tiny_exported("ngram"), tmp_path, "int8,int4", Sampling(), 60
    )
    ends, alphas = opened.manifest.text.end_ids, {}
    for name in (AS_BUILT, "int8", "int4"):
        model = reader(opened, candidates, "target", name)
        written = [most_probable(model, ids, task.tokens, ends) for ids in task.ids]
        alphas[name] = passes_of_lookup(written).alpha
    assert {p.target: p.alpha for p in found.pairings} == pytest.approx(alphas, abs=1e-12)
    assert len(set(alphas.values())) > 1


def most_probable(model: PassRunner, ids, count: int, ends) -> tuple[list[int], int]:
    """A prompt and the most probable tokens after it, one pass a token."""
    text = list(ids)
    model.prefill(np.array(text[:-1]))
    while len(text) < len(ids) + count:
        logits = model.run("decode", np.array(text[-1:]), len(text) - 1, np.zeros(1, np.int64))
        text.append(int(logits[0].argmax()))
        if text[-1] in ends:
            break
    return text, len(ids)


# --- what was compared is what `build` makes ------------------------------------------------------


def test_targets_are_quantized_as_build_does_it(pair, tiny_exported):
    _, _, candidates, _, _ = pair
    graphs = read_exported(tiny_exported("pair"))
    built = {
        name: Quantizing(**asked).wanted(graphs, "onnxruntime")["target"]
        for name, asked in ASKED.items()
    }
    made = {c.name: c.spec.quantization for c in candidates["target"][1:]}
    assert made == built
    assert {name: spec.quantizer for name, spec in built.items() if "int4" in name} == {
        "int4": "awq",
        "int4+head": "awq",
    }


def test_the_weights_that_were_compared_are_those_that_build_takes(pair, tiny_exported, tmp_path):
    """A description might say one thing of weights that are another."""
    _, folder, _, _, _ = pair
    built = derive(tiny_exported("pair"), tmp_path, backend="onnxruntime", weights="int4")
    compared = folder / str(list(ASKED).index("int4"))
    hashes = [
        {
            name: entry.sha256
            for name, entry in read_exported(place).files.items()
            if name.startswith("target/")
        }
        for place in (built, compared)
    ]
    assert hashes[0] and hashes[0] == hashes[1]


# --- what is marked ------------------------------------------------------------------------------


def marked(*described: tuple[str, float, float, int]) -> dict[str, bool]:
    """By name, speed-up, divergence and size."""
    targets = [
        TargetPrecision(name, size, Quality(9.0, 1.0, apart, 99), (1,), (1.0,), None)
        for name, _, apart, size in described
    ]
    pairings = [Pairing(name, None, 0.5, 2, speed, 1.0, False) for name, speed, _, _ in described]
    return {p.target: p.is_best for p in _marked(pairings, targets)}


@pytest.mark.parametrize("is_turned", [False, True])
def test_of_two_that_differ_in_size_alone_the_larger_is_not_marked(is_turned):
    two = [("large", 2.0, 0.1, 110), ("small", 2.0, 0.1, 70)]
    assert marked(*(reversed(two) if is_turned else two)) == {"large": False, "small": True}


def test_what_is_smaller_than_all_else_is_marked_though_slower_and_further_off():
    found = marked(("float32", 2.0, 0.0, 400), ("int8", 1.9, 0.1, 110), ("int4", 1.8, 0.2, 70))
    assert found == {"float32": True, "int8": True, "int4": True}
    found = marked(("float32", 2.0, 0.0, 110), ("int8", 1.9, 0.1, 110), ("int4", 1.8, 0.2, 120))
    assert found == {"float32": True, "int8": False, "int4": False}

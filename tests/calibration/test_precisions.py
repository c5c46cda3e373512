"""Precisions of the tiny pair compared: what is measured is what the models are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spec_export.calibration import precision_report
from spec_export.calibration.candidates import check_comparable, check_room, make_candidates
from spec_export.calibration.evidence import Times
from spec_export.calibration.measure import Task
from spec_export.calibration.memory import memory_use, read_described
from spec_export.calibration.precision_costs import Costs
from spec_export.calibration.precision_names import AS_BUILT, flags, parse_precisions
from spec_export.calibration.precision_reading import plain_text
from spec_export.calibration.precision_result import (
    Pairing,
    Precisions,
    Quality,
    TargetPrecision,
)
from spec_export.calibration.precisions import _marked, cliffs, compare_precisions
from spec_export.calibration.profile import PartTimes, PassTimes
from spec_export.calibration.prompts import Prompt, encode_prompts
from spec_export.calibration.replays import passes_along
from spec_export.calibration.teacher import Teacher
from spec_export.calibration.weight_sizes import quantized_bytes
from spec_export.engines.errors import IntegrityError, RequestError
from spec_export.quantizing import Quantizing
from spec_export.runtime import Sampling, Session
from spec_export.runtime.opened import make_backend

TEXTS = ("In the beginning", "And it came to pass", "The king said unto")


def times(plain: float, rows: dict[int, float], **parts: float) -> PartTimes:
    def one(ms: float) -> Times:
        return Times(ms, ms, ms, 20)

    given = {name: one(ms) for name, ms in parts.items()}
    named = ("catch_up", "step", "propose", "accept", "host")
    return PartTimes(
        tuple(PassTimes(m, one(ms)) for m, ms in rows.items()),
        one(plain),
        *(given.get(name) for name in named),
        rounds=(),
    )


@pytest.fixture(scope="module")
def compared(open_once, tiny_bundle, tiny_exported, tmp_path_factory):
    opened = open_once(tiny_bundle)
    backend = make_backend("onnxruntime", opened.manifest.device.threads)
    prompts = [Prompt("all", text) for text in TEXTS]
    ids = tuple(map(tuple, encode_prompts(opened, prompts)))
    task = Task(tuple(prompts), ids, 24, Sampling())
    wanted = parse_precisions("int8+head, int4, int8+kv")
    folder = tmp_path_factory.mktemp("candidates")
    candidates = make_candidates(opened, backend, tiny_exported("pair"), wanted, folder)
    taken = times(2.0, {1: 1.5, 2: 1.6, 5: 2.0}, catch_up=0.4, step=0.3, propose=0.05, accept=0.1)
    return opened, candidates, task, compare_precisions(opened, candidates, task, taken)


def test_every_model_comes_in_every_precision_and_as_it_was_built(compared):
    opened, candidates, _, found = compared
    names = [AS_BUILT, "int8+head", "int4", "int8+kv"]
    assert [t.name for t in found.targets] == [d.name for d in found.drafts] == names
    assert [(p.target, p.draft) for p in found.pairings] == [(t, d) for t in names for d in names]
    assert candidates["target"][0].engine is opened.target
    sizes = {t.name: t.weights_bytes for t in found.targets}
    assert sizes["int4"] < sizes["int8+kv"] < sizes[AS_BUILT]
    assert {s.dtype for s in candidates["target"][3].spec.states} == {"int8"}


def test_the_target_as_built_is_itself_and_fewer_bits_are_further_off(compared):
    quality = {t.name: t.quality for t in compared[3].targets}
    exact = quality[AS_BUILT]
    assert exact.agreement == 1.0 and exact.divergence == 0.0 and exact.tokens > 40
    assert 0 < quality["int8+head"].divergence < quality["int4"].divergence
    assert quality["int4"].agreement < 1.0
    assert quality["int8+head"].perplexity == pytest.approx(exact.perplexity, rel=0.05)


def test_alpha_as_built_is_what_both_models_say_of_the_same_text(compared):
    """Teacher, which shares nothing with the comparison but the engines."""
    opened, _, task, found = compared
    session, teacher = Session(opened), Teacher(opened, 0.0)
    shares = []
    for prompt in task.ids:
        text = plain_text(session, prompt, task)
        shares.append(teacher.beta(text, len(prompt)))
    pairing = next(p for p in found.pairings if (p.target, p.draft) == (AS_BUILT, AS_BUILT))
    assert pairing.alpha == pytest.approx(float(np.concatenate(shares).mean()), abs=1e-12)


def test_every_width_was_timed_built_or_not(compared):
    for target in compared[3].targets:
        assert target.rows == (1, 2, 3, 4, 5)
        assert all(ms > 0 for ms in target.rows_ms)


def test_the_fastest_pairing_of_each_target_was_decoded(compared):
    for name in {p.target for p in compared[3].pairings}:
        mine = [p for p in compared[3].pairings if p.target == name]
        fastest = max(mine, key=lambda p: p.speedup)
        assert fastest.measured is not None and fastest.measured > 0
        assert sum(p.measured is not None for p in mine) == 1


def test_the_report_has_every_number_and_says_what_a_quantized_target_is(compared):
    found = compared[3]
    text = "\n".join(precision_report.terminal_lines(found))
    for target in found.targets:
        assert target.name in text and f"{target.quality.divergence:.4f}" in text
    assert "a quantized target is another target" in text
    assert "a draft's precision changes no text" in text


# --- choices, by times that are made up ----------------------------------------------------------


def target(name: str, rows_ms: dict[int, float], divergence: float = 0.0, size: int = 100):
    quality = Quality(10.0, 1.0 - divergence, divergence, 100)
    described = TargetPrecision(name, size, quality, tuple(rows_ms), tuple(rows_ms.values()), ())
    return described


@pytest.fixture
def widths(open_once, tiny_bundle):
    """An opened bundle that says it was built for 1, 2 and 4 drafts."""
    opened = open_once(tiny_bundle)
    manifest = replace(opened.manifest, gammas=(1, 2, 4))
    return replace(opened, bundle=replace(opened.bundle, manifest=manifest))


@pytest.mark.parametrize(
    ("ms", "found"),
    [
        # One product on a processor, K = N = 2048, microseconds at rows 1, 2, 3, 5, 9.
        ((1330, 1375, 1610, 1300, 1365), ()),  # float32
        ((130, 370, 563, 670, 1230), (2, 3)),  # int4, blocks of 32
        ((70, 90, 651, 522, 941), (2, 3)),  # int4, blocks of 64
        ((22.0, 23.8, 24.3, 25.5, 30.0), ()),  # SmolLM2 float32, milliseconds
        ((11.3, 12.9, 14.1, 17.1, 22.9), ()),  # SmolLM2 int4: dearer, and smoothly so
    ],
)
def test_a_cliff_is_a_row_that_costs_a_quarter_of_a_pass(ms, found):
    """Widths lie further apart the wider they are, which is no cliff."""
    assert cliffs((1, 2, 3, 5, 9), ms) == found


def test_the_int4_cliff_at_three_rows_is_avoided(widths):
    """A model of such products with blocks of 64: a second row is cheap, a third is not."""
    smooth = target(AS_BUILT, {1: 1330.0, 2: 1375.0, 3: 1400.0, 5: 1420.0})
    cliff = target("int4", {1: 70.0, 2: 90.0, 3: 651.0, 5: 522.0})
    costs = Costs(widths, smooth, times(1330.0, {1: 1330.0}))
    passes = passes_along([np.full(500, 0.6)])
    assert costs.best(smooth, None, passes).gamma == 4
    found = costs.best(cliff, None, passes)
    assert found.gamma == 1
    assert found.speedup == pytest.approx(1.6 / 90 * 1330, rel=0.01)


def test_a_draft_too_slow_for_its_target_is_advised_against(widths):
    """tensorrtllm_backend 498: a draft that takes an eighth of a target that it hardly helps."""
    from spec_export.calibration.precision_result import DraftPrecision

    base = target(AS_BUILT, {1: 10.0, 2: 10.5, 3: 11.0, 5: 12.0})
    costs = Costs(widths, base, times(10.0, {1: 10.0}))
    slow = DraftPrecision(AS_BUILT, 1, 6.0, 6.0)
    found = costs.best(base, slow, passes_along([np.full(300, 0.5)]))
    assert (found.gamma, found.speedup) == (0, 1.0)
    fast = costs.best(
        base, replace(slow, catch_up_ms=1.0, step_ms=1.0), passes_along([np.ones(300)])
    )
    assert fast.gamma == 4 and fast.speedup == pytest.approx(5 / 16 * 10, rel=0.01)


def test_what_is_slower_further_off_and_larger_is_not_marked():
    targets = [
        target(AS_BUILT, {1: 1.0}, 0.0, 400),
        target("int8", {1: 1.0}, 0.01, 110),
        target("int4", {1: 1.0}, 0.2, 70),
        target("int4+kv", {1: 1.0}, 0.3, 70),
    ]
    speeds = {AS_BUILT: 1.0, "int8": 1.8, "int4": 2.4, "int4+kv": 2.3}
    pairings = [Pairing(n, None, 0.5, 2, s, 1.0, False) for n, s in speeds.items()]
    marked = {p.target: p.is_best for p in _marked(pairings, targets)}
    assert marked == {AS_BUILT: True, "int8": True, "int4": True, "int4+kv": False}


def test_the_sentence_names_what_is_faster_and_says_which_number_is_predicted():
    targets = (target(AS_BUILT, {1: 1.0}), target("int8", {1: 1.0}), target("int4", {1: 1.0}))
    found = (
        Pairing(AS_BUILT, AS_BUILT, 0.8, 2, 1.3, 1.0, True),
        Pairing(AS_BUILT, "int8", 0.8, 3, 1.5, 1.0, True, 1.45),
        Pairing("int8", "int8", 0.8, 2, 2.0, 1.7, True, 1.9),
        Pairing("int4", "int8", 0.8, 0, 0.4, 0.4, False, 0.41),
    )
    assert precision_report.sentence(Precisions(targets, (), found)) == (
        "int8 draft, same texts, 1.50x predicted, 1.45x measured with gamma 3; "
        "int8 target 2.00x predicted, 1.90x measured with gamma 2"
    )
    slower = (replace(found[0], draft=None), replace(found[3], draft=None))
    said = precision_report.sentence(Precisions(targets, (), slower))
    assert said == "fewer bits are not faster here"


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["int2", "int8+foot", "int8+kv+kv", "", ",", "float32", "int8 head"]
)
def test_names_of_no_precision_are_refused(text):
    with pytest.raises(RequestError, match="--precisions"):
        parse_precisions(text)


@pytest.mark.parametrize(
    ("target", "draft", "options"),
    [
        ("int4+head+kv", None, "--weights int4 --head int8 --kv int8"),
        ("int8+head", "int8+head", "--weights int8 --head int8"),
        ("int8+head", "int4+head", "--weights int8 --draft-weights int4 --head int8"),
        ("int8", "float32", "--weights int8 --draft-weights none"),
        ("float32", "int4+head", "--draft-weights int4 --head int8"),
        ("float32", "float32", ""),
        ("float32", "int4+kv", None),
        ("int8", "int8+head", None),
    ],
)
def test_flags_build_what_was_compared(target, draft, options):
    """`build` has one --head and one --kv for both models: what they cannot say is not said."""
    assert flags(target, draft) == options
    if not options:
        return
    given = dict(zip(options.split()[::2], options.split()[1::2], strict=True))
    asked = Quantizing(
        given.get("--weights"),
        given.get("--draft-weights"),
        head=given.get("--head"),
        kv=given.get("--kv"),
    )
    models = {"target": None} if draft is None else {"target": None, "draft": None}
    made = asked.wanted(SimpleNamespace(models=models, method="model"), "onnxruntime")
    for model, name in (("target", target), ("draft", draft)):
        wanted = {} if name in (None, AS_BUILT) else parse_precisions(name)
        assert made.get(model) == wanted.get(name)


def test_a_quantized_or_foreign_bundle_is_refused(open_once, tiny_bundle, compared):
    opened, candidates, _, _ = compared
    manifest = opened.manifest
    models = {**manifest.models, "target": candidates["target"][1].spec}
    quantized = replace(
        opened, bundle=replace(opened.bundle, manifest=replace(manifest, models=models))
    )
    with pytest.raises(RequestError, match="target of this bundle is no float32 model"):
        check_comparable(quantized)
    device = replace(manifest.device, backend="tensorrt")
    foreign = replace(
        opened, bundle=replace(opened.bundle, manifest=replace(manifest, device=device))
    )
    with pytest.raises(RequestError, match="for tensorrt build a bundle of each"):
        check_comparable(foreign)


def test_candidates_that_do_not_fit_are_refused_before_they_are_made(compared, tiny_bundle):
    opened, candidates, _, _ = compared
    use = memory_use(read_described(tiny_bundle))
    wanted = parse_precisions("int8+head,int4")
    check_room(opened, wanted, use, 1 << 40)
    with pytest.raises(RequestError, match=r"2 more of each model need .* name fewer"):
        check_room(opened, wanted, use, use.total + 1000)
    for found in candidates["target"][1:3]:
        quantization = found.spec.quantization
        assert quantization is not None
        planned = quantized_bytes(opened.manifest.models["target"], quantization)
        assert planned == pytest.approx(found.weights_bytes, rel=0.1)


def test_another_exported_directory_is_refused(open_once, tiny_bundle, tiny_exported, tmp_path):
    opened = open_once(tiny_bundle)
    backend = make_backend("onnxruntime", opened.manifest.device.threads)
    with pytest.raises(IntegrityError, match="is not what"):
        make_candidates(
            opened, backend, tiny_exported("random"), parse_precisions("int8"), tmp_path
        )

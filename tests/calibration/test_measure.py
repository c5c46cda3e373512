"""Measuring the tiny pair: what is counted is what was decoded, and what is done stays done."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spec_export.calibration import calibrate as calibrating
from spec_export.calibration import measure as measuring
from spec_export.calibration.calibrate import calibrate, check_task, widths_of
from spec_export.calibration.conditions import Conditions
from spec_export.calibration.estimate import trials_of
from spec_export.calibration.evidence import accept, replay, target_pass
from spec_export.calibration.measure import Task, decode_rounds, measure, race
from spec_export.calibration.parts import PartsTimer
from spec_export.calibration.prompts import Prompt, encode_prompts
from spec_export.calibration.teacher import Teacher
from spec_export.engines.errors import RequestError
from spec_export.engines.passes import PassRunner
from spec_export.runtime import OpenedBundle, Request, Sampling, Session
from spec_export.runtime.opened import make_backend
from spec_export.runtime.stream import plain_role
from tests.calibration.decoded import decoded_to

TEXTS = ("In the beginning", "And it came to pass", "The king said unto", "Now these are the names")


def task_of(opened: OpenedBundle, tokens: int = 24, **sampling: float) -> Task:
    prompts = [Prompt(("a", "b")[n % 2], text) for n, text in enumerate(TEXTS)]
    ids = tuple(map(tuple, encode_prompts(opened, prompts)))
    return Task(tuple(prompts), ids, tokens, Sampling(**sampling))


@pytest.fixture
def opened(open_once, tiny_bundle):
    return open_once(tiny_bundle)


@pytest.fixture
def device(opened):
    return make_backend("onnxruntime", opened.manifest.device.threads).describe()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("draft", ["pair", "ngram", "self"])
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_a_replay_has_the_rounds_that_decoding_has(open_once, build_tiny, draft, sampling, gamma):
    """Counts of rounds begun at every token, replayed, and of decoding with that gamma agree.

    At temperature 0, and with a seed, where the rule is `invariant`: a text depends on no draft.
    Rounds that a limit would shorten are left out by going on further.
    """
    opened = open_once(build_tiny(draft))
    session, task = Session(opened), task_of(opened, 40, **sampling)
    for ids in task.ids:
        rounds = replay(decode_rounds(session, ids, task).rounds, gamma)
        request = Request(max_tokens=None, sampling=task.sampling, gamma=gamma)
        emitted = 1 + sum(r.kept for r in rounds)
        stats = decoded_to(session, ids, request, emitted)
        trials = trials_of(rounds)
        assert stats.emitted == emitted
        assert (trials.accepted, trials.rejected) == (stats.accepted, stats.rejections)
        assert sum(r.n_draft > 0 for r in rounds) == stats.rounds
        assert sum(r.n_draft == 0 for r in rounds) == stats.plain_steps


def test_every_part_of_a_round_is_timed(opened):
    timer = PartsTimer(opened, 20, greedy=True)
    found = timer.turn(3)
    wanted = {target_pass(m) for m in (1, 2, 3, 4, 5)} | {accept(5), "propose"}
    assert set(found) == wanted | {"draft catch_up", "draft step", "confidence"}
    assert all(len(times) == 3 and min(times) > 0 for times in found.values())
    drawn = PartsTimer(opened, 20, greedy=False)
    assert accept(5) not in drawn.names, "which graphs draw depends on the request"


def test_parts_take_turns(opened):
    """One of each, then again: a machine that gets slower does so for all of them."""

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def enqueue(self) -> None:
            order.append(self.name)

    timer, order = PartsTimer(opened, 20, greedy=True), []
    timer._calls = {name: Part(name) for name in ("one", "two", "three")}
    assert list(timer.turn(3)) == ["one", "two", "three"]
    assert order == ["one", "two", "three"] * 3


def test_an_interrupted_measurement_goes_on_where_it_stopped(opened, device, tmp_path, monkeypatch):
    """Interrupted after the second text: the first two are not decoded again."""
    task, state = task_of(opened), tmp_path / "state"
    real, decoded = measuring.decode_rounds, []

    def counting(session, ids, task):
        decoded.append(ids)
        if len(decoded) == 4:  # the first is the warm-up
            raise KeyboardInterrupt
        return real(session, ids, task)

    monkeypatch.setattr(measuring, "decode_rounds", counting)
    with pytest.raises(KeyboardInterrupt):
        measure(opened, device, task, state)
    decoded.clear()
    monkeypatch.setattr(measuring, "decode_rounds", lambda *a: decoded.append(a[1]) or real(*a))
    texts = measure(opened, device, task, state)
    assert [text.category for text in texts] == ["a", "b", "a", "b"]
    assert decoded[1:] == list(task.ids[2:])
    assert measure(opened, device, task, state) == texts, "nothing is left to do"


@pytest.mark.parametrize("change", ["tokens", "prompts", "device", "sampling", "garbage"])
def test_what_was_measured_of_something_else_is_not_taken_up(opened, device, tmp_path, change):
    task, state = task_of(opened, 8), tmp_path / "state"
    measure(opened, device, task, state)
    if change == "tokens":
        task = dataclasses.replace(task, tokens=9)
    elif change == "prompts":
        task = dataclasses.replace(task, prompts=(*task.prompts[:3], Prompt("a", "another")))
    elif change == "sampling":
        task = dataclasses.replace(task, sampling=Sampling(0.5, 1))
    elif change == "device":
        device = dataclasses.replace(device, processor="another")
    else:
        state.write_bytes(b"\xff{")
    assert measuring._resume(state, opened, device, task) == []


def test_beta_at_temperature_0_is_the_share_of_first_drafts_that_are_accepted(opened, tmp_path):
    """Two ways to the same number: rounds begun at every token, and both models reading the text.

    Nothing of the rounds is used but the text, so that a draft that runs over a stale cache or one
    token behind in them would show. The very same tokens have to agree.
    """
    task = task_of(opened, 40)
    texts = measure(opened, opened.manifest.device, task, tmp_path / "state")
    assert sum(len(text.beta) for text in texts) > 100
    for text in texts:
        assert list(text.beta) == [float(r.n_accepted > 0) for r in text.rounds]


def test_beta_of_a_draft_that_is_the_target_is_1(open_once, build_tiny):
    opened = open_once(build_tiny("self"))
    ids = task_of(opened).ids[0]
    for temperature in (0.0, 0.7):
        beta = Teacher(opened, temperature).beta([*ids, 5, 9, 17, 5, 9, 17, 5, 9], len(ids))
        assert beta == pytest.approx([1.0] * 8, abs=1e-4)


def test_beta_is_of_logits_and_temperature(opened):
    """Against both models' rows, computed here in one pass of each over the whole text."""
    ids = [*task_of(opened).ids[1], 7, 300, 12, 801]
    models, rows = opened.manifest.models, {}
    for name, engine in (("target", opened.target), ("draft", opened.draft)):
        runner = PassRunner(opened.device, engine, models[name])
        runner.prefill(np.array(ids[:-1]))
        logits = runner.run("prefill", np.array(ids[-2:-1]), len(ids) - 2, np.zeros(1, np.int64))
        weights = np.exp(logits[0].astype(np.float64) / 0.7)
        rows[name] = weights / weights.sum()
    wanted = np.minimum(rows["target"], rows["draft"]).sum()
    assert Teacher(opened, 0.7).beta(ids, len(ids) - 1)[-1] == pytest.approx(wanted, rel=1e-4)


def test_a_race_decodes_as_many_tokens_both_ways(opened):
    for found in race(Session(opened), task_of(opened), 2):
        assert found.tokens >= 1
        assert found.speculative_ms > 0 and found.plain_ms > 0


def runs_of(session: Session, monkeypatch) -> list[tuple[str, int]]:
    """Every pass of the target that a session makes from now on: its role and drafts."""
    log: list[tuple[str, int]] = []
    real = session._run

    def running(role, n_draft, *, more):
        log.append((role, n_draft))
        return real(role, n_draft, more=more)

    monkeypatch.setattr(session, "_run", running)
    return log


def test_a_race_is_against_the_fastest_plain_decoding(opened, monkeypatch):
    """One row and no draft a step, where steps without drafts else run more rows."""
    session, task = Session(opened), task_of(opened)
    assert plain_role(opened, Request()) != "decode"
    assert opened.manifest.models["target"].role("decode").rows == 1
    log = runs_of(session, monkeypatch)
    real, asked = measuring.generate, []

    def generating(session, ids, request):
        asked.append((request.gamma, request.fast_plain))
        return real(session, ids, request)

    monkeypatch.setattr(measuring, "generate", generating)
    found = race(session, task, 2)
    assert len(found) == len(task.ids), "no text ends at once"
    assert asked == [(2, False), (0, True)] * len(found)
    starts = [n for n, (role, _) in enumerate(log) if role == "prefill"]
    texts = [log[a + 1 : b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    for raced, drafted, plain in zip(found, texts[::2], texts[1::2], strict=True):
        assert max(n for _, n in drafted) == 2
        assert plain == [("decode", 0)] * raced.tokens


def test_plain_steps_are_those_of_one_row(opened, monkeypatch):
    session, task = Session(opened), task_of(opened)
    log = runs_of(session, monkeypatch)
    times = measuring.decode_plain(session, task.ids[0], task)
    assert log == [("prefill", 0), *[("decode", 0)] * len(times)]


def test_a_profile_has_the_conditions_before_all_work_and_after_it(opened, tmp_path, monkeypatch):
    log: list[str] = []

    def reading() -> Conditions:
        log.append("conditions")
        return dataclasses.replace(Conditions(None, None, None, None), clock_mhz=float(len(log)))

    def logged(name: str) -> None:
        real = getattr(calibrating, name)
        monkeypatch.setattr(calibrating, name, lambda *given: log.append(name) or real(*given))

    monkeypatch.setattr(calibrating, "conditions", reading)
    logged("measure")
    logged("race")
    profile = calibrate(opened, opened.manifest.device, task_of(opened, 12), tmp_path / "state")
    assert log == ["conditions", "measure", "race", "conditions"]
    assert (profile.before.clock_mhz, profile.after.clock_mhz) == (1.0, 4.0)


def test_a_calibration_of_a_draft_that_is_the_target(open_once, build_tiny, tmp_path):
    """Alpha is 1, and a draft as slow as its target never pays: the advice is not to."""
    opened = open_once(build_tiny("self"))
    device = make_backend("onnxruntime", opened.manifest.device.threads).describe()
    profile = calibrate(opened, device, task_of(opened), tmp_path / "state")
    assert profile.acceptance.alpha is not None
    assert profile.acceptance.alpha.value == 1.0
    assert profile.bundle_sha256 == opened.bundle.sha256
    assert len(profile.forecasts) == 4
    best = max(profile.forecasts, key=lambda found: found.speedup.value)
    assert profile.measured_gamma == best.gamma
    tokens = [found.tokens_a_pass for found in profile.forecasts]
    assert tokens == pytest.approx([2, 3, 4, 5], rel=0.05), "less where a text ends in a round"


def test_look_up_is_calibrated_too(open_once, tiny_ngram_bundle, tmp_path):
    opened = open_once(tiny_ngram_bundle)
    device = make_backend("onnxruntime", opened.manifest.device.threads).describe()
    profile = calibrate(opened, device, task_of(opened, 60), tmp_path / "state")
    assert profile.times.step is None and profile.times.propose is None
    assert profile.acceptance.passes >= profile.acceptance.passes_with_drafts


def test_widths_of_a_bundle_with_several_verify_passes(open_once, tmp_path, tiny_exported):
    from spec_export.engines.build import BuildOptions, build_bundle
    from spec_export.engines.ort import OrtBackend

    options = BuildOptions(gamma=4, narrower=(1, 2), max_len=64, chunk=32)
    bundle = build_bundle(tiny_exported("pair"), tmp_path / "bundle", OrtBackend(), options)
    opened = open_once(bundle.path)
    widths = widths_of(opened)
    assert widths.gammas == (1, 2, 4)
    assert (widths.plain_rows, widths.fastest_rows) == (2, 1)
    assert [widths.rows(n) for n in (1, 2, 3, 4)] == [2, 3, 5, 5]
    assert {target_pass(m) for m in (1, 2, 3, 5)} <= set(PartsTimer(opened, 9, greedy=True).names)


def test_what_cannot_be_calibrated_is_refused_before_any_work(opened, open_once, tiny_plain_bundle):
    with pytest.raises(RequestError, match="without a draft"):
        check_task(open_once(tiny_plain_bundle), task_of(opened))
    for tokens in (1, 7, 128, 10**9):
        with pytest.raises(RequestError, match="--tokens"):
            check_task(opened, task_of(opened, tokens))
    one = task_of(opened)
    one = dataclasses.replace(one, prompts=one.prompts[:1], ids=one.ids[:1])
    with pytest.raises(RequestError, match="at least 2"):
        check_task(opened, one)

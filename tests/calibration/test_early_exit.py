"""From how sure the draft was to a threshold: replays that are what decoding does, and the best."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from spec_export.calibration import evidence
from spec_export.calibration.calibrate import calibrate
from spec_export.calibration.choice import gamma_costs
from spec_export.calibration.early_exit import THRESHOLDS, forecast_early
from spec_export.calibration.estimate import RecordedRound, trials_of
from spec_export.calibration.evidence import TextEvidence, TimedRound, replay, sure_drafts
from spec_export.calibration.forecast import forecast
from spec_export.calibration.measure import decode_rounds
from spec_export.calibration.profile import (
    PROFILE_FILE,
    Profile,
    read_profile,
    write_profile,
)
from spec_export.calibration.profile_report import html, remarks
from spec_export.engines.errors import SchemaError
from spec_export.runtime import Request, Session
from spec_export.runtime.adaptive import EarlyExit
from spec_export.runtime.opened import make_backend
from tests.calibration.decoded import decoded_to
from tests.calibration.simulated import MadeUp
from tests.calibration.test_measure import task_of
from tests.calibration.test_profile import profile_of
from tests.deferred_device import deferred

FLAT = {1: 20.0, 2: 20.5, 3: 21.0, 5: 22.0}


def test_the_first_draft_that_is_not_sure_is_the_last():
    sure = (0.9, 0.8, 0.2, 0.9)
    assert [sure_drafts(sure, 4, least) for least in (0.0, 0.2, 0.3, 0.85, 0.95)] == [4, 4, 3, 2, 1]
    assert [sure_drafts(sure, most, 0.3) for most in range(5)] == [0, 1, 2, 3, 3]
    assert sure_drafts((), 4, 0.99) == 4, "where nothing was looked at no round stops"


def test_a_text_is_replayed_with_a_threshold():
    """By hand. An early round rejects nothing that was not refused."""
    rounds = [
        TimedRound(4, 4, 5, 1.0, (0.9, 0.2, 0.9, 0.9)),
        TimedRound(4, 0, 1, 1.0, (0.9, 0.9, 0.9, 0.9)),
        TimedRound(4, 1, 2, 1.0, (0.2, 0.9, 0.9, 0.9)),
        TimedRound(4, 2, 3, 1.0, (0.9, 0.9, 0.2, 0.9)),
        TimedRound(4, 0, 1, 1.0, (0.1, 0.1, 0.1, 0.1)),
    ]
    assert replay(rounds, 4, 0.5) == [RecordedRound(2, 2, 3, True), RecordedRound(3, 2, 3, True)]
    assert [r.is_rejected for r in replay(rounds, 4, 0.5)] == [False, True]
    assert replay(rounds, 2, 0.5)[0] == RecordedRound(2, 2, 3), "there was to be no third"
    assert replay(rounds, 4) == [RecordedRound(4, 4, 5)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("draft", ["pair", "self"])
@pytest.mark.parametrize(("gamma", "least"), [(4, 0.1), (4, 0.35), (3, 0.2), (4, 0.95), (1, 0.5)])
def test_a_replay_has_the_rounds_that_decoding_has(
    open_once, build_tiny, draft, sampling, gamma, least
):
    """Drafts, acceptance and early stops of every text, at temperature 0 and under `invariant`."""
    opened = open_once(build_tiny(draft))
    session, task = Session(opened), task_of(opened, 40, **sampling)
    for ids in task.ids:
        begun = decode_rounds(session, ids, task).rounds
        assert all(len(r.confidences) == r.n_draft for r in begun)
        rounds = replay(begun, gamma, least)
        request = Request(None, task.sampling, gamma=gamma, draft_confidence=least)
        emitted = 1 + sum(r.kept for r in rounds)
        stats = decoded_to(session, ids, request, emitted)
        trials = trials_of(rounds)
        assert stats.emitted == emitted
        assert (trials.accepted, trials.rejected) == (stats.accepted, stats.rejections)
        drafted = [r.n_draft if r.kept > r.n_accepted else r.kept for r in rounds]
        assert sum(drafted) == stats.drafted
        assert sum(r.is_early for r in rounds) == stats.early
        assert len(rounds) == stats.rounds


def test_confidences_are_not_read_where_rounds_are_pipelined(open_once, build_tiny):
    """And look-up has none."""
    later = deferred(open_once(build_tiny("pair")))
    task = task_of(later, 8)
    assert not any(r.confidences for r in decode_rounds(Session(later), task.ids[0], task).rounds)
    opened = open_once(build_tiny("ngram"))
    assert not any(r.confidences for r in decode_rounds(Session(opened), task.ids[0], task).rounds)


# --- the best threshold -------------------------------------------------------------------------


def made_up(
    made: MadeUp, seed: int, sure: float = 0.6, look: float = 0.0, tokens: int = 150
) -> TextEvidence:
    """A text whose drafts pass with 0.95 where the draft is sure (0.7 to 1), else with 0.1."""
    text, rng = made.text(seed, tokens), np.random.default_rng(seed)
    rounds = []
    for begun in text.rounds:
        is_sure = rng.random(begun.n_draft) < sure
        confidences = np.where(is_sure, 0.7 + 0.3 * rng.random(len(is_sure)), 0.1)
        passes = rng.random(len(is_sure)) < np.where(is_sure, 0.95, 0.1)
        accepted = int(np.cumprod(passes).sum())
        rounds.append(
            TimedRound(begun.n_draft, accepted, accepted + 1, begun.ms, tuple(confidences.tolist()))
        )
    parts = text.parts_ms | {evidence.CONFIDENCE: (look,) * 4}
    return dataclasses.replace(text, rounds=tuple(rounds), parts_ms=parts)


SLOW = MadeUp(0.5, FLAT, step=4.0, host=0.5)


def test_the_threshold_is_where_it_pays_and_the_prediction_is_the_oracles():
    """Any threshold above 0.1 and up to 0.7 tells the two kinds apart; the lowest is named.

    Lengths are geometric, and so is what follows an accepted draft: tokens a pass are
    1 + first sum (sure 0.95)^i, ms those of the lengths.
    """
    texts = [made_up(SLOW, seed) for seed in range(24)]
    found = forecast_early(texts, SLOW.widths)
    assert found is not None and found.pays
    assert (found.confidence, found.gamma) == (0.15, 4)
    first = 0.6 * 0.95 + 0.4 * 0.1
    tokens = 1 + first * sum((0.6 * 0.95) ** i for i in range(4))
    lengths = [0.4, 0.6 * 0.4, 0.36 * 0.4, 0.6**3]
    ms = [n * 4.0 + FLAT[SLOW.widths.rows(n)] + 0.5 for n in (1, 2, 3, 4)]
    wanted = sum(share * each for share, each in zip(lengths, ms, strict=True))
    # Means over some 2,000 rounds, whose tokens deviate by 1.2 and times by 5: 5 errors.
    assert found.tokens_a_pass == pytest.approx(tokens, rel=0.07)
    assert found.pass_ms == pytest.approx(wanted, rel=0.03)
    assert found.goes_on == pytest.approx(0.6, abs=0.05)
    assert found.later == pytest.approx(0.6 * 0.95, abs=0.05)
    assert found.speedup.value == pytest.approx(found.tokens_a_pass / found.pass_ms * 20.0)
    best = max(f.speedup.value for f in forecast(texts, SLOW.widths))
    assert found.gain.value == pytest.approx(found.speedup.value / max(1.0, best))
    assert found.gain.low > 1.0


def test_it_is_the_best_of_all_that_were_tried():
    """By counting the rounds of every gamma and threshold here."""
    texts = [made_up(SLOW, seed, sure=0.5, look=0.3) for seed in range(6)]
    found = forecast_early(texts, SLOW.widths)
    assert found is not None

    def speed(gamma: int, least: float) -> float:
        rounds = [r for text in texts for r in replay(text.rounds, gamma, least)]
        ms = sum(
            r.n_draft * 4.0 + FLAT[SLOW.widths.rows(r.n_draft)] + 0.5
            + 0.3 * (r.n_draft - 1 + r.is_early)
            for r in rounds
        )  # fmt: skip
        return sum(r.kept for r in rounds) / ms

    tried = {(g, t): speed(g, t) for g in (2, 3, 4) for t in THRESHOLDS}
    assert tried[found.gamma, found.confidence] == pytest.approx(max(tried.values()))
    assert found.tokens_a_pass / found.pass_ms == pytest.approx(max(tried.values()))


def test_where_it_does_not_pay_it_says_so():
    """A draft that takes no time, or looking that takes as much as a draft."""
    free = MadeUp(0.5, {1: 20.0, 2: 20.0, 3: 20.0, 5: 20.0}, step=1e-3)
    for made, look in ((free, 0.01), (SLOW, 9.0)):
        found = forecast_early([made_up(made, seed, look=look) for seed in range(8)], made.widths)
        assert found is not None and not found.pays
        assert found.gain.value < 1.01


def test_a_confidence_that_tells_nothing_does_not_pay():
    """Negative control: the same confidences, dealt to rounds at random."""
    rng, texts = np.random.default_rng(9), []
    for seed in range(8):
        text = made_up(SLOW, seed)
        order = rng.permutation(len(text.rounds))
        dealt = [
            dataclasses.replace(r, confidences=text.rounds[i].confidences)
            for r, i in zip(text.rounds, order, strict=True)
        ]
        texts.append(dataclasses.replace(text, rounds=tuple(dealt)))
    honest = forecast_early([made_up(SLOW, seed) for seed in range(8)], SLOW.widths)
    found = forecast_early(texts, SLOW.widths)
    assert found is not None and honest is not None
    assert honest.gain.value > found.gain.value + 0.05


def test_without_confidences_there_is_no_forecast():
    assert forecast_early(SLOW.texts(4), SLOW.widths) is None
    one = MadeUp(0.5, FLAT, step=1.0, gammas=(1,))
    assert forecast_early([made_up(one, seed) for seed in range(4)], one.widths) is None


# --- the profile --------------------------------------------------------------------------------


def early_profile() -> Profile:
    early = forecast_early([made_up(SLOW, seed) for seed in range(8)], SLOW.widths)
    assert early is not None
    return dataclasses.replace(profile_of(SLOW), draft_confidence=early.confidence, early=early)


def test_a_profile_keeps_it_and_a_report_says_it(tmp_path):
    profile = early_profile()
    write_profile(tmp_path / PROFILE_FILE, profile)
    assert read_profile(tmp_path / PROFILE_FILE) == profile
    (line,) = (line for line in remarks(profile) if "stop below a draft confidence" in line)
    assert "of 0.15" in line and "run --gamma auto" in line
    assert "stop below a draft confidence of 0.15" in html(profile)
    idle = dataclasses.replace(profile, draft_confidence=0.0)
    assert any("need not stop drafting early" in line for line in remarks(idle))
    none = dataclasses.replace(idle, early=None)
    assert not any("draft confidence" in line for line in remarks(none))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["draft_confidence"], 0.5),
        (["draft_confidence"], -0.15),
        (["early"], None),
        (["early", "confidence"], 1.0),
        (["early", "gamma"], 1),
        (["early", "gamma"], 5),
        (["early", "goes_on"], 1.5),
        (["early", "later"], -0.1),
        (["early", "gain", "low"], 9.0),
        (["early", "speedup", "value"], -1.0),
        (["early", "more"], 1),
    ],
)
def test_a_profile_that_was_altered_is_refused(tmp_path, path, value):
    found = json.loads(json.dumps(dataclasses.asdict(early_profile())))
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / PROFILE_FILE).write_text(json.dumps(found))
    with pytest.raises(SchemaError, match=r"profile\.json"):
        read_profile(tmp_path / PROFILE_FILE)


def test_gamma_auto_goes_by_it(build_tiny, open_once, tmp_path):
    opened = open_once(build_tiny("pair"))
    opened = dataclasses.replace(opened, bundle=dataclasses.replace(opened.bundle, path=tmp_path))
    device = make_backend("onnxruntime", opened.manifest.device.threads).describe()
    profile = dataclasses.replace(
        early_profile(), bundle_sha256=opened.bundle.sha256, device=device
    )
    write_profile(tmp_path / PROFILE_FILE, profile)
    found, early = gamma_costs(opened, Request()), profile.early
    assert early is not None and found.draft_confidence == 0.15
    assert found.early == EarlyExit(0.15, early.goes_on, early.later)
    write_profile(tmp_path / PROFILE_FILE, dataclasses.replace(profile, draft_confidence=0.0))
    assert gamma_costs(opened, Request()).draft_confidence == 0.0


def test_a_calibration_writes_it(open_once, build_tiny, tmp_path):
    """Whether it pays is the machine's to say; what is forecast is there, and consistent."""
    opened = open_once(build_tiny("pair"))
    device = make_backend("onnxruntime", opened.manifest.device.threads).describe()
    profile = calibrate(opened, device, task_of(opened), tmp_path / "state")
    assert profile.early is not None and profile.times.confidence is not None
    assert profile.draft_confidence in (0.0, profile.early.confidence)
    assert profile.early.pays == (profile.draft_confidence > 0)
    write_profile(tmp_path / PROFILE_FILE, profile)
    assert read_profile(tmp_path / PROFILE_FILE) == profile

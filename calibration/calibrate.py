"""Calibrate a bundle: measure, predict, compare, advise."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_export.calibration import evidence
from spec_export.calibration.conditions import conditions
from spec_export.calibration.early_exit import forecast_early
from spec_export.calibration.estimate import (
    Interval,
    RecordedRound,
    alpha_by_category,
    alpha_by_position,
    alpha_of,
    mean_share,
    trials_of,
)
from spec_export.calibration.evidence import (
    TextEvidence,
    pooled_parts,
    pooled_plain,
    replay,
)
from spec_export.calibration.forecast import (
    GammaForecast,
    Widths,
    break_even_alpha,
    forecast,
    host_times,
    jackknife,
    leave_some_out,
    timed_rounds,
)
from spec_export.calibration.measure import Race, Task, measure, race
from spec_export.calibration.profile import (
    PROFILE_SCHEMA,
    Acceptance,
    PartTimes,
    PassTimes,
    Profile,
    RoundTimes,
    Setting,
)
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.errors import RequestError
from spec_export.engines.manifest import DeviceSpec
from spec_export.engines.versions import versions
from spec_export.runtime import OpenedBundle, Request, Session
from spec_export.runtime.stream import plain_role


@dataclass(frozen=True)
class Advice:
    """What to do, in a number and in a sentence."""

    gamma: int
    reason: str


def calibrate(
    opened: OpenedBundle,
    device: DeviceSpec,
    task: Task,
    state_file: Path,
    progress: Progress = no_progress,
) -> Profile:
    """Measure a bundle and advise.

    Args:
        opened: the bundle, with a draft.
        device: where it runs now.
        task: prompts and how to go on from them.
        state_file: what an interrupted run had done; the caller removes it when all is kept.
        progress: called with (step, done, total).

    Raises:
        RequestError: the bundle has no draft, or the prompts give too little to tell anything.
    """
    check_task(opened, task)
    before = conditions()
    texts = [text for text in measure(opened, device, task, state_file, progress) if text.rounds]
    if len(texts) < 2:
        raise RequestError(
            f"{len(texts)} of {len(task.prompts)} texts went on past their first token; at least "
            "2 are needed: give other prompts"
        )
    widths = widths_of(opened)
    forecasts = forecast(texts, widths)
    best = max(forecasts, key=lambda found: found.speedup.value)
    races = race(Session(opened), task, best.gamma, progress)
    measured = measured_speedup(races)
    least = break_even_alpha(texts, widths)
    accepted = acceptance_of(texts, widths.gammas[-1])
    advice = advise(best, measured, accepted.alpha, least)
    early = forecast_early(texts, widths)
    return Profile(
        schema=PROFILE_SCHEMA,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        producer=versions("spec-export", "numpy"),
        bundle_sha256=opened.bundle.sha256,
        device=device,
        before=before,
        after=conditions(),
        setting=_setting(task),
        acceptance=accepted,
        times=times_of(texts, widths),
        forecasts=forecasts,
        gamma=advice.gamma,
        speedup=best.speedup,
        measured_gamma=best.gamma,
        measured=measured,
        break_even_alpha=least,
        reason=advice.reason,
        draft_confidence=early.confidence if early is not None and early.pays else 0.0,
        early=early,
    )


def check_bundle(opened: OpenedBundle) -> None:
    """Refuse a bundle in which there is nothing to choose.

    Raises:
        RequestError: it has no draft.
    """
    if not opened.manifest.gammas:
        raise RequestError(
            "the bundle was made without a draft, so there is nothing to choose; export the target "
            "again with `--draft`"
        )


def check_task(opened: OpenedBundle, task: Task) -> None:
    """Refuse before any work what cannot be calibrated.

    Raises:
        RequestError: there is no draft, or too little to measure on.
    """
    check_bundle(opened)
    if len(task.prompts) < 2:
        raise RequestError(f"{len(task.prompts)} prompt; at least 2 are needed for an interval")
    longest = opened.manifest.max_len - 1
    if not 8 <= task.tokens <= longest:
        raise RequestError(
            f"--tokens {task.tokens}: 8 to {longest} tokens after each prompt tell something and "
            "fit the context"
        )


def widths_of(opened: OpenedBundle) -> Widths:
    """The verify passes of a bundle and the steps beside them."""
    manifest = opened.manifest
    target = manifest.models["target"]
    return Widths(
        gammas=manifest.gammas,
        plain_rows=int(target.role(plain_role(opened, Request())).rows),
        fastest_rows=int(target.role("decode").rows),
    )


def acceptance_of(texts: Sequence[TextEvidence], gamma: int) -> Acceptance:
    """What became of the drafts."""
    recorded = [replay(text.rounds, gamma) for text in texts]
    categories: dict[str, list[list[RecordedRound]]] = {}
    for text, rounds in zip(texts, recorded, strict=True):
        categories.setdefault(text.category, []).append(rounds)
    flat = [r for rounds in recorded for r in rounds]
    trials = trials_of(flat)
    return Acceptance(
        alpha=alpha_of(recorded),
        positions=alpha_by_position(recorded, gamma),
        categories=alpha_by_category(categories),
        passes=len(flat),
        passes_with_drafts=sum(r.n_draft > 0 for r in flat),
        accepted=trials.accepted,
        rejected=trials.rejected,
        beta=mean_share([text.beta for text in texts]),
    )


def times_of(texts: Sequence[TextEvidence], widths: Widths) -> PartTimes:
    """Median and spread of everything that was timed."""
    parts = pooled_parts(texts)
    timed = [(m, parts.get(evidence.target_pass(m))) for m in range(1, widths.gammas[-1] + 2)]
    return PartTimes(
        target=tuple(PassTimes(m, ms) for m, ms in timed if ms is not None),
        plain=pooled_plain(texts),
        catch_up=parts.get(evidence.CATCH_UP),
        step=parts.get(evidence.STEP),
        propose=parts.get(evidence.PROPOSE),
        accept=parts.get(evidence.accept(widths.gammas[-1] + 1)),
        host=host_times(texts, widths),
        rounds=tuple(RoundTimes(n, ms) for n, ms in timed_rounds(texts).items()),
        confidence=parts.get(evidence.CONFIDENCE),
    )


def measured_speedup(races: Sequence[Race]) -> Interval:
    """Plain time over speculative time of all texts together.

    Raises:
        RequestError: fewer than two texts had tokens to time.
    """
    if len(races) < 2:
        raise RequestError("fewer than 2 texts went on past their first token: give other prompts")

    def ratio(used: Sequence[Race]) -> float:
        return sum(r.plain_ms for r in used) / sum(r.speculative_ms for r in used)

    return jackknife(ratio(races), [ratio(group) for group in leave_some_out(races)])


def advise(
    best: GammaForecast, measured: Interval, alpha: Interval | None, least: float | None
) -> Advice:
    """Speculate where both the prediction and the measurement gain."""
    found = (
        f"{span(best.speedup)} predicted, {span(measured)} measured over the fastest plain decoding"
    )
    if best.speedup.value > 1 and measured.value > 1:
        limit = "" if least is None else f"; do not speculate below alpha {least:.2f}"
        doubt = min(best.speedup.low, measured.low)
        unsure = "" if doubt > 1 else "; the spread includes a loss"
        return Advice(best.gamma, f"gamma {best.gamma}: {found}{limit}{unsure}")
    reached = "no draft was tested" if alpha is None else f"alpha is {alpha.value:.2f}"
    if least is None:
        needed = "no alpha would be enough"
    elif alpha is None or alpha.value < least:
        needed = f"it would pay above alpha {least:.2f}"
    else:
        needed = "accepted drafts come in bunches, so that rounds gain less than alpha promises"
    at_odds = (best.speedup.value > 1) != (measured.value > 1)
    again = "; the two disagree: calibrate again on a quiet machine" if at_odds else ""
    advice = f"do not speculate: gamma {best.gamma}, the best, {found}; {reached}, {needed}{again}"
    return Advice(0, advice)


def span(interval: Interval) -> str:
    """Such as `1.62x (1.55-1.70)`."""
    return f"{interval.value:.2f}x ({interval.low:.2f}-{interval.high:.2f})"


def _setting(task: Task) -> Setting:
    return Setting(
        prompts=len(task.prompts),
        prompts_sha256=task.sha256,
        tokens=task.tokens,
        temperature=task.sampling.temperature,
        seed=task.sampling.seed or 0,
        rule=task.rule,
        kv_len=task.kv_len,
    )

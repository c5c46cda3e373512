"""`profile.json`: what a calibration found of one bundle on one device, and what it advises.

It lies beside the manifest and is data, not a part of the bundle: nothing breaks without it. A
profile of another bundle or another device is recognised and not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from spec_export.calibration.conditions import Conditions
from spec_export.calibration.device_text import described, printable
from spec_export.calibration.early_exit import EarlyForecast
from spec_export.calibration.estimate import Interval
from spec_export.calibration.evidence import Times
from spec_export.calibration.forecast import GammaForecast
from spec_export.calibration.precision_result import Precisions, TargetPrecision
from spec_export.calibration.ranges import LARGEST_GAMMA
from spec_export.engines.atomic import write_whole
from spec_export.engines.errors import SchemaError
from spec_export.engines.manifest import DeviceSpec
from spec_export.engines.strict import read_json, to_json

PROFILE_SCHEMA = 1
PROFILE_FILE = "profile.json"
_ROUNDING = 1e-4  # by which a sum of probabilities in float32 may be off


@dataclass(frozen=True)
class Setting:
    """What was measured on.

    Attributes:
        prompts: number of them.
        prompts_sha256: of their texts and categories.
        tokens: asked for after each.
        temperature: of sampling.
        seed: of sampling.
        rule: of acceptance; None at temperature 0.
        kv_len: cached tokens at which passes were timed.
    """

    prompts: int
    prompts_sha256: str
    tokens: int
    temperature: float
    seed: int
    rule: str | None
    kv_len: int


@dataclass(frozen=True)
class Acceptance:
    """What became of drafts.

    Attributes:
        alpha: share of tested drafts that were accepted; None where none was tested.
        positions: the same by position, given that all before were accepted.
        categories: the same by category of prompts.
        passes: target passes.
        passes_with_drafts: of these, the ones that verified drafts; look-up often finds none.
        accepted: drafts accepted.
        rejected: drafts refused, where no stop hid it.
        beta: mean over the texts of sum min(p, q), from both models reading them; None for look-up.
    """

    alpha: Interval | None
    positions: tuple[Interval | None, ...]
    categories: dict[str, Interval]
    passes: int
    passes_with_drafts: int
    accepted: int
    rejected: int
    beta: Interval | None


@dataclass(frozen=True)
class PassTimes:
    """Time of a target pass over `rows` rows."""

    rows: int
    ms: Times


@dataclass(frozen=True)
class RoundTimes:
    """Time of a round with `n_draft` drafts."""

    n_draft: int
    ms: Times


@dataclass(frozen=True)
class PartTimes:
    """Times in milliseconds; None for what this bundle does not have or was not timed alone.

    Attributes:
        target: of a target pass, by built width.
        plain: of a step of the fastest plain decoding, sampling and host included.
        catch_up: of the draft's first pass in a round.
        step: of every other.
        propose: of choosing a draft's token.
        accept: of judging the widest verify pass.
        host: of what is left of a round.
        rounds: of whole rounds as timed in texts, by their drafts; 0: without any, two rows or one.
        confidence: of looking how sure the draft is of its next token.
    """

    target: tuple[PassTimes, ...]
    plain: Times
    catch_up: Times | None
    step: Times | None
    propose: Times | None
    accept: Times | None
    host: Times | None
    rounds: tuple[RoundTimes, ...]
    confidence: Times | None = None


@dataclass(frozen=True)
class Profile:
    """The whole of `profile.json`.

    Attributes:
        schema: version of this description.
        created: UTC time, ISO 8601.
        producer: what made it, name to version.
        bundle_sha256: of the manifest of the bundle that was measured.
        device: where.
        before: the state of the device at the beginning.
        after: and at the end.
        setting: what was measured on.
        acceptance: of drafts.
        times: of passes and of the other parts of a round.
        forecasts: of every gamma from 1 on.
        gamma: the advice; 0: do not speculate.
        speedup: predicted at the best gamma that speculates.
        measured_gamma: the gamma whose speed-up was measured: the best one that speculates.
        measured: its speed-up over the fastest plain decoding, same prompts, same tokens.
        break_even_alpha: do not speculate below; None where even alpha 1 is not enough.
        reason: the advice in a sentence.
        draft_confidence: rounds should stop drafting below it; 0: that does not pay, or was not
            measured. What `run --gamma auto` goes by.
        early: what the best such threshold is predicted to do, whether it pays or not; None where
            none was measured: with look-up, with one draft a round, with pipelined rounds.
        memory: planned bytes of a process that decodes one text, by part.
        precisions: other precisions of both models; None: not compared.
    """

    schema: int
    created: str
    producer: dict[str, str]
    bundle_sha256: str
    device: DeviceSpec
    before: Conditions
    after: Conditions
    setting: Setting
    acceptance: Acceptance
    times: PartTimes
    forecasts: tuple[GammaForecast, ...]
    gamma: int
    speedup: Interval
    measured_gamma: int
    measured: Interval
    break_even_alpha: float | None
    reason: str
    draft_confidence: float = 0.0
    early: EarlyForecast | None = None
    memory: dict[str, int] = field(default_factory=dict)
    precisions: Precisions | None = None


def read_profile(path: Path) -> Profile:
    """Read a profile; the file is untrusted.

    Raises:
        IntegrityError: it is missing, too large or unreadable.
        SchemaError: it is of another schema version, or does not fit together.
    """
    profile = read_json(path, Profile, schema=PROFILE_SCHEMA)
    _check(profile, str(path))
    return profile


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as a whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    write_whole(path, to_json(profile))


def why_unusable(profile: Profile, bundle_sha256: str, device: DeviceSpec) -> str | None:
    """Why a profile says nothing of a bundle on a device, as a warning; None where it does."""
    if profile.bundle_sha256 != bundle_sha256:
        return (
            "the profile is of another bundle "
            f"({profile.bundle_sha256[:12]}..., this one is {bundle_sha256[:12]}...); it is not "
            "used: run `spec-export calibrate` on this one"
        )
    if profile.device != device:
        return (
            f"the profile was measured on {described(profile.device)}, this is "
            f"{described(device)}; it is not used: run `spec-export calibrate` here"
        )
    return None


def _check(profile: Profile, origin: str) -> None:
    gammas = [found.gamma for found in profile.forecasts]
    if not gammas or gammas != list(range(1, len(gammas) + 1)) or len(gammas) > LARGEST_GAMMA:
        _refuse("forecasts are not those of gamma 1, 2, 3 ...", origin)
    if not 0 <= profile.gamma <= len(gammas) or profile.measured_gamma not in gammas:
        _refuse(f"gamma {profile.gamma} has no forecast", origin)
    if len(profile.acceptance.positions) != len(gammas):
        _refuse("there is not one acceptance for each position", origin)
    rows = [found.rows for found in profile.times.target]
    if not rows or rows[0] < 1 or rows != sorted(set(rows)):
        _refuse(f"target passes were timed over {rows[:5]} rows", origin)
    drafts = [found.n_draft for found in profile.times.rounds]
    if drafts != sorted(set(drafts) & set(range(len(gammas) + 1))):
        _refuse(f"rounds were timed with {drafts[:5]} drafts", origin)
    acceptance = profile.acceptance
    shares = [
        acceptance.alpha,
        acceptance.beta,
        *acceptance.positions,
        *acceptance.categories.values(),
    ]
    for share in shares:
        if share is not None and not 0 <= share.low <= share.value <= share.high <= 1:
            _refuse(f"an acceptance is {share.value} in {share.low} to {share.high}", origin)
    speeds = [profile.speedup, profile.measured, *(found.speedup for found in profile.forecasts)]
    early = profile.early
    if early is not None:
        _check_early(early, len(gammas), origin)
        speeds += [early.speedup, early.gain]
    if profile.draft_confidence not in (0.0, 0.0 if early is None else early.confidence):
        _refuse(f"a draft confidence of {profile.draft_confidence} has no forecast", origin)
    for speed in speeds:
        if not 0 < speed.low <= speed.value <= speed.high:
            _refuse(f"a speed-up is {speed.value} in {speed.low} to {speed.high}", origin)
    for times in _all_times(profile.times):
        if not 0 <= times.low <= times.median <= times.high or times.count < 1:
            _refuse(f"a time is {times.median} ms in {times.low} to {times.high}", origin)
    target, rounds = profile.times.target, profile.times.rounds
    whole = [*(found.ms for found in target), *(found.ms for found in rounds)]
    if any(times.median <= 0 for times in (profile.times.plain, *whole)):
        _refuse("a pass took no time", origin)
    if profile.break_even_alpha is not None and not 0 <= profile.break_even_alpha <= 1:
        _refuse(f"speculation pays above alpha {profile.break_even_alpha}", origin)
    if any(count < 0 for count in profile.memory.values()):
        _refuse("a part of the memory is less than nothing", origin)
    if profile.precisions is not None:
        _check_precisions(profile.precisions, len(gammas), origin)


def _check_precisions(found: Precisions, gammas: int, origin: str) -> None:
    targets = [target.name for target in found.targets]
    drafts: list[str | None] = [draft.name for draft in found.drafts]
    for names in (targets, drafts):
        if len(set(names)) != len(names):
            _refuse(f"a precision stands twice among {names[:5]}", origin)
    for target in found.targets:
        _check_target(target, origin)
    for draft in found.drafts:
        if draft.weights_bytes < 1 or not min(draft.catch_up_ms, draft.step_ms) > 0:
            _refuse("a draft has no weights, or its passes took no time", origin)
    pairs = [(pairing.target, pairing.draft) for pairing in found.pairings]
    if not pairs or pairs != [(target, draft) for target in targets for draft in drafts or [None]]:
        _refuse("there is not one pairing of each target with each draft", origin)
    for pairing in found.pairings:
        name = printable(f"{pairing.target} with {pairing.draft or 'look-up'}")
        if pairing.alpha is not None and not 0 <= pairing.alpha <= 1 + _ROUNDING:
            _refuse(f"alpha of {name} is {pairing.alpha}", origin)
        if not 0 <= pairing.gamma <= gammas:
            _refuse(f"gamma of {name} is {pairing.gamma}", origin)
        measured = [] if pairing.measured is None else [pairing.measured]
        for speed in (pairing.speedup, pairing.plain_speedup, *measured):
            if not speed > 0:
                _refuse(f"a speed-up of {name} is {speed}", origin)


def _check_target(target: TargetPrecision, origin: str) -> None:
    name, quality, rows = printable(target.name), target.quality, target.rows
    if not 0 <= quality.agreement <= 1 or quality.divergence < 0 or quality.tokens < 1:
        _refuse(f"the target {name} agrees in {quality.agreement} of the tokens", origin)
    if quality.perplexity < 1 - _ROUNDING or target.weights_bytes < 1:
        _refuse(
            f"the target {name} has a perplexity of {quality.perplexity}, or no weights", origin
        )
    if not rows or rows[0] < 1 or list(rows) != sorted(set(rows)):
        _refuse(f"passes of the target {name} were timed over {rows[:5]} rows", origin)
    if len(target.rows_ms) != len(rows) or not min(target.rows_ms) > 0:
        _refuse(f"not every pass of the target {name} has a time", origin)
    if list(target.cliffs) != sorted(set(target.cliffs) & set(rows[1:])):
        _refuse(f"the target {name} has cliffs at {target.cliffs[:5]} rows", origin)


def _check_early(early: EarlyForecast, gammas: int, origin: str) -> None:
    is_sound = 0 < early.confidence < 1 and 2 <= early.gamma <= gammas
    if not is_sound or not all(0 <= share <= 1 for share in (early.goes_on, early.later)):
        _refuse(f"rounds of {early.gamma} drafts stop below {early.confidence}", origin)


def _all_times(times: PartTimes) -> list[Times]:
    drafting = (times.catch_up, times.step, times.propose, times.confidence)
    parts = (times.plain, *drafting, times.accept, times.host)
    whole = [*(found.ms for found in times.target), *(found.ms for found in times.rounds)]
    return [*whole, *(part for part in parts if part is not None)]


def _refuse(reason: str, origin: str) -> None:
    raise SchemaError(f"{origin}: {reason}; it was altered, or made by something else")

"""What a profile says a round costs, for a text that chooses its drafts round by round."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spec_export.calibration.profile import PROFILE_FILE, PartTimes, read_profile, why_unusable
from spec_export.engines.errors import RequestError
from spec_export.runtime.adaptive import EarlyExit, GammaCosts
from spec_export.runtime.opened import make_backend
from spec_export.runtime.stream import Request, plain_role

_FEWEST_ROUNDS = 10  # for a median that is worth more than the sum of the parts

if TYPE_CHECKING:
    from spec_export.calibration.evidence import Times
    from spec_export.runtime.opened import OpenedBundle


class UnusableProfile(RequestError):
    """The profile that is there says nothing of this bundle on this device."""


def gamma_costs(opened: OpenedBundle, request: Request, threads: int | None = None) -> GammaCosts:
    """The costs of an opened bundle's rounds here, from the profile beside its manifest.

    Args:
        opened: the bundle.
        request: says how steps without drafts run.
        threads: it was opened with; None: as it was built.

    Raises:
        RequestError: there is no profile, or no draft.
        UnusableProfile: it is of another bundle or device.
        IntegrityError: it cannot be read.
        SchemaError: it is malformed.
    """
    manifest, path = opened.manifest, opened.bundle.path / PROFILE_FILE
    if manifest.method == "none":
        raise RequestError("--gamma auto, but the bundle was made without a draft")
    if not path.exists():
        raise RequestError(
            "--gamma auto goes by what was measured here, and nothing was: run `spec-export "
            f"calibrate {opened.bundle.path}` first"
        )
    profile, built = read_profile(path), manifest.device
    device = make_backend(built.backend, threads or built.threads).describe()
    reason = why_unusable(profile, opened.bundle.sha256, device)
    if reason is not None:
        raise UnusableProfile(f"--gamma auto: {reason}")
    alpha = profile.acceptance.alpha
    is_fast = plain_role(opened, request) == "decode"
    costs = costs_of(
        profile.times, manifest.gammas, 0.5 if alpha is None else alpha.value, is_fast=is_fast
    )
    early = profile.early
    if early is None:
        return costs
    exit_ = EarlyExit(profile.draft_confidence, early.goes_on, early.later)
    return replace(costs, early=exit_)


def costs_of(
    times: PartTimes, gammas: tuple[int, ...], alpha: float, *, is_fast: bool
) -> GammaCosts:
    """Rounds as they were timed in texts; of too few, the sum of their parts.

    Args:
        times: of a profile.
        gammas: that verify passes were built for.
        alpha: to begin with.
        is_fast: steps without drafts run one row.

    Raises:
        RequestError: a pass was not timed.
    """
    target = {found.rows: found.ms.median for found in times.target}
    timed = {
        found.n_draft: found.ms.median for found in times.rounds if found.ms.count >= _FEWEST_ROUNDS
    }

    def part(found: Times | None) -> float:
        return 0.0 if found is None else found.median

    def in_parts(n: int) -> float:
        rows = next(gamma for gamma in gammas if gamma >= n) + 1
        drafting = part(times.catch_up) + (n - 1) * part(times.step) + n * part(times.propose)
        return drafting + target[rows] + part(times.accept) + part(times.host)

    missing = sorted({1, 2, *(gamma + 1 for gamma in gammas)} - set(target))
    if missing:
        raise RequestError(
            f"--gamma auto: the profile has no time of a pass of {missing[0]} rows; run "
            "`spec-export calibrate` again"
        )
    rest = max(0.0, times.plain.median - target[1])  # of a token, but for its pass
    plain = times.plain.median if is_fast else timed.get(0, target[2] + rest)
    rounds = tuple(timed.get(n, in_parts(n)) for n in range(1, gammas[-1] + 1))
    return GammaCosts(plain, rounds, alpha)

"""What a profile says a round costs, for a text that chooses its drafts round by round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_export.calibration.profile import PROFILE_FILE, PartTimes, read_profile, why_unusable
from spec_export.engines.errors import RequestError
from spec_export.runtime.adaptive import GammaCosts
from spec_export.runtime.opened import make_backend
from spec_export.runtime.stream import Request, plain_role

if TYPE_CHECKING:
    from spec_export.calibration.evidence import Times
    from spec_export.runtime.opened import OpenedBundle


def gamma_costs(opened: OpenedBundle, request: Request, threads: int | None = None) -> GammaCosts:
    """The costs of an opened bundle's rounds here, from the profile beside its manifest.

    Args:
        opened: the bundle.
        request: says how steps without drafts run.
        threads: it was opened with; None: as it was built.

    Raises:
        RequestError: there is no profile, or it is of another bundle or device.
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
        raise RequestError(f"--gamma auto: {reason}")
    role = plain_role(opened, request)
    rows = int(manifest.models["target"].role(role).rows)
    alpha = profile.acceptance.alpha
    return _costs(profile.times, manifest.gammas, rows, 0.5 if alpha is None else alpha.value)


def _costs(times: PartTimes, gammas: tuple[int, ...], plain_rows: int, alpha: float) -> GammaCosts:
    target = {found.rows: found.ms.median for found in times.target}
    extra = times.plain.median - target[min(target)]  # of a token without drafts, but for its pass

    def part(found: Times | None) -> float:
        return 0.0 if found is None else found.median

    def round_ms(n: int) -> float:
        rows = next(gamma for gamma in gammas if gamma >= n) + 1
        drafting = part(times.catch_up) + (n - 1) * part(times.step) + n * part(times.propose)
        return drafting + target[rows] + part(times.accept) + part(times.host)

    plain = target[plain_rows] + max(0.0, extra)
    return GammaCosts(plain, tuple(round_ms(n) for n in range(1, gammas[-1] + 1)), alpha)

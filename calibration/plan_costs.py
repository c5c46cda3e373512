"""What a plan is computed from, out of a file: times of target passes, or a whole profile.

    {"schema": 1, "rows": [1, 2, 3, 5, 9], "ms": [22.0, 23.8, 24.3, 25.5, 30.0]}

has v(m) alone (`verify_cost`). `profile.json`, as `calibrate` writes it, has the acceptance and the
cost of a draft step besides. A profile of another device is as good: a plan is for the device its
numbers are from, and says which one that is.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path

from spec_export.calibration.asking import ask_gpus
from spec_export.calibration.device_text import described, printable
from spec_export.calibration.profile import PartTimes, read_profile
from spec_export.calibration.verify_cost import (
    MeasuredVerifyCost,
    check_size,
    read_verify_cost,
)
from spec_export.engines.errors import RequestError, SchemaError
from spec_export.engines.manifest import DeviceSpec
from spec_export.engines.processor import processor_name


@dataclass(frozen=True)
class GivenCosts:
    """Numbers of a file.

    Attributes:
        verify_cost: v(m).
        alpha: measured acceptance; None where the file has none.
        cost_ratio: measured c, choosing the draft's token included; None where the file has none.
        device: where they were measured; None where the file does not say.
        created: when, as a profile has it.
    """

    verify_cost: MeasuredVerifyCost
    alpha: float | None = None
    cost_ratio: float | None = None
    device: DeviceSpec | None = None
    created: str = ""


def read_costs(path: Path) -> GivenCosts:
    """Read a file of times or a profile; the file is untrusted.

    Raises:
        IntegrityError: it is missing, too large or unreadable.
        SchemaError: it is neither, or its numbers are no times.
    """
    check_size(path)
    if not _is_profile(path):
        return GivenCosts(read_verify_cost(path))
    profile = read_profile(path)
    alpha = profile.acceptance.alpha
    try:
        return GivenCosts(
            verify_cost=_verify_cost(profile.times),
            alpha=None if alpha is None else alpha.value,
            cost_ratio=cost_ratio_of(profile.times),
            device=profile.device,
            created=profile.created,
        )
    except RequestError as error:
        raise SchemaError(f"{path}: {error}") from error


def where(costs: GivenCosts, *, alpha: bool, cost_ratio: bool) -> tuple[str, ...]:
    """Where the numbers of a plan are from, in words.

    Args:
        costs: of a file.
        alpha: whether its acceptance was used.
        cost_ratio: whether its cost of a draft step was.
    """
    if costs.device is None:
        return ()
    used = ["times of target passes"]
    used += ["alpha"] if alpha else []
    used += ["the cost of a draft step"] if cost_ratio else []
    place = f"{described(costs.device)}, {printable(costs.created)}"
    return (
        f"{', '.join(used)}: as measured on {place}",
        "what a round does besides its passes is not in this plan; the forecasts of the profile "
        "itself have it",
    )


def why_elsewhere(costs: GivenCosts) -> str | None:
    """A warning where the numbers are of another processor or GPU than those here, or None."""
    device, here = costs.device, processor_name()
    if device is None:
        return None
    is_here = (device.processor, device.machine) == (here, platform.machine())
    if device.gpu is not None:
        gpus = _gpus_here()
        is_here = is_here and printable(device.gpu.name) in gpus
        here = f"{', '.join(gpus) or 'no GPU that nvidia-smi shows'}, {here}"
    if is_here:
        return None
    return (
        f"the profile was measured on {described(device)}, this is {here}; the plan is for where "
        "it was measured"
    )


def _gpus_here() -> list[str]:
    """Their names as CUDA has them: on a Jetson `nvidia-smi` adds its driver's."""
    return [printable(name.removesuffix(" (nvgpu)")) for _, name in ask_gpus("index", "name")]


def cost_ratio_of(times: PartTimes) -> float:
    """c: a further step of the draft and choosing its token, over a plain target step.

    Look-up has neither. A draft of a single step a round has only its first pass.
    """
    step = times.step or times.catch_up
    if step is None:
        return 0.0
    propose = 0.0 if times.propose is None else times.propose.median
    return (step.median + propose) / _plain_pass_ms(times)


def _verify_cost(times: PartTimes) -> MeasuredVerifyCost:
    """v(m). Where no pass of a single row was built, a token takes the narrowest."""
    passes = {found.rows: found.ms.median for found in times.target}
    passes = {1: _plain_pass_ms(times)} | passes
    return MeasuredVerifyCost(tuple(passes), tuple(passes.values()))


def _plain_pass_ms(times: PartTimes) -> float:
    ms = times.target[0].ms.median
    if ms <= 0:
        raise RequestError("a target pass took no time")
    return ms


def _is_profile(path: Path) -> bool:
    """Whether a file is meant to be a profile; whether it is one is seen when it is read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool({"bundle_sha256", "forecasts", "times"} & set(found))

"""The state of a device while it is measured: what a time depends on beside the program."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 10


@dataclass(frozen=True)
class Conditions:
    """What the system says of itself; None where it does not.

    Attributes:
        governor: how the system chooses clocks, such as `performance`.
        clock_mhz: median over the processors.
        temperature_c: of the hottest sensor.
        power_mode: of a Jetson, as `nvpmodel -q` names it.
    """

    governor: str | None
    clock_mhz: float | None
    temperature_c: float | None
    power_mode: str | None


def conditions(system: Path = Path("/sys"), processors: Path = Path("/proc/cpuinfo")) -> Conditions:
    """Read them now."""
    cpus = sorted(system.glob("devices/system/cpu/cpu[0-9]*/cpufreq"))
    governors = {_read(cpu / "scaling_governor") for cpu in cpus} - {None}
    clocks = [value / 1000 for cpu in cpus if (value := _number(cpu / "scaling_cur_freq"))]
    clocks = clocks or _clocks_of(processors)
    zones = system.glob("class/thermal/thermal_zone*/temp")
    degrees = [value / 1000 for zone in zones if (value := _number(zone)) is not None]
    degrees = [value for value in degrees if -50 < value < 150]
    return Conditions(
        governor=", ".join(sorted(str(name) for name in governors)) or None,
        clock_mhz=round(statistics.median(clocks), 1) if clocks else None,
        temperature_c=max(degrees) if degrees else None,
        power_mode=_power_mode(),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> float | None:
    text = _read(path)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _clocks_of(processors: Path) -> list[float]:
    lines = (_read(processors) or "").splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("cpu MHz")]
    return [float(value) for value in found if value.replace(".", "", 1).isdigit()]


def _power_mode() -> str | None:
    program = shutil.which("nvpmodel")
    if program is None:
        return None
    try:
        run = subprocess.run(
            [program, "-q"], capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith("NV Power Mode")]
    return lines[0].partition(":")[2].strip() if lines else None

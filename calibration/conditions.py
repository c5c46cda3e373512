"""The state of a device while it is measured: what a time depends on beside the program."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from spec_export.calibration.asking import ask_gpus, told

_GPU = ("clocks.sm", "temperature.gpu", "power.draw")


@dataclass(frozen=True)
class Conditions:
    """What the system says of itself; None where it does not.

    Attributes:
        governor: how the system chooses clocks, such as `performance`.
        clock_mhz: median over the processors.
        temperature_c: of the hottest sensor.
        power_mode: of a Jetson, as `nvpmodel -q` names it.
        gpu_clock_mhz: of the multiprocessors of the first GPU that `nvidia-smi` shows.
        gpu_temperature_c: of the same.
        gpu_power_w: what it draws.
    """

    governor: str | None
    clock_mhz: float | None
    temperature_c: float | None
    power_mode: str | None
    gpu_clock_mhz: float | None = None
    gpu_temperature_c: float | None = None
    gpu_power_w: float | None = None


def conditions(system: Path = Path("/sys"), processors: Path = Path("/proc/cpuinfo")) -> Conditions:
    """Read them now."""
    cpus = sorted(system.glob("devices/system/cpu/cpu[0-9]*/cpufreq"))
    governors = {_read(cpu / "scaling_governor") for cpu in cpus} - {None}
    clocks = [value / 1000 for cpu in cpus if (value := _number(cpu / "scaling_cur_freq"))]
    clocks = clocks or _clocks_of(processors)
    zones = system.glob("class/thermal/thermal_zone*/temp")
    degrees = [value / 1000 for zone in zones if (value := _number(zone)) is not None]
    degrees = [value for value in degrees if -50 < value < 150]
    clock, temperature, power = _gpu()
    return Conditions(
        governor=", ".join(sorted(str(name) for name in governors)) or None,
        clock_mhz=round(statistics.median(clocks), 1) if clocks else None,
        temperature_c=max(degrees) if degrees else None,
        power_mode=_power_mode(),
        gpu_clock_mhz=clock,
        gpu_temperature_c=temperature,
        gpu_power_w=power,
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> float | None:
    return _finite(_read(path) or "")


def _finite(text: str) -> float | None:
    """The number that a text is; None where it is none, such as `[N/A]`."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _clocks_of(processors: Path) -> list[float]:
    lines = (_read(processors) or "").splitlines()
    found = [line.partition(":")[2] for line in lines if line.startswith("cpu MHz")]
    return [value for text in found if (value := _finite(text)) is not None]


def _power_mode() -> str | None:
    lines = told("nvpmodel", "-q").splitlines()
    modes = [line.partition(":")[2].strip() for line in lines if line.startswith("NV Power Mode")]
    return modes[0] if modes else None


def _gpu() -> tuple[float | None, ...]:
    """Clock, temperature and power of the first one."""
    gpus = ask_gpus(*_GPU)
    return tuple(map(_finite, gpus[0])) if gpus else (None,) * len(_GPU)

"""What a system says of its clocks and sensors, or does not."""

from __future__ import annotations

import time

import pytest

from spec_export.calibration import asking
from spec_export.calibration.conditions import Conditions, conditions
from tests.calibration.conftest import Program


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """No program of this machine answers."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_a_system_that_says_everything(tmp_path):
    for cpu, khz in enumerate((1_000_000, 3_000_000)):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text("performance\n")
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
    for zone, value in enumerate(("45000", "61500", "-256000", "none")):
        folder = tmp_path / f"class/thermal/thermal_zone{zone}"
        folder.mkdir(parents=True)
        (folder / "temp").write_text(value)
    assert conditions(tmp_path, tmp_path / "cpuinfo") == Conditions(
        "performance", 2000.0, 61.5, None
    )


def test_a_system_that_says_little(tmp_path):
    nothing = tmp_path / "cpuinfo"
    assert conditions(tmp_path, nothing) == Conditions(None, None, None, None)
    nothing.write_text("model name: x\ncpu MHz\t\t: 2500.5\ncpu MHz : odd\n")
    assert conditions(tmp_path, nothing).clock_mhz == 2500.5


def test_the_power_mode_of_a_jetson(tmp_path, program: Program):
    program("nvpmodel", "echo 'NV Power Mode: MAXN_SUPER'; echo 2")
    assert conditions(tmp_path, tmp_path / "cpuinfo").power_mode == "MAXN_SUPER"


def gpu_of(tmp_path) -> tuple[float | None, float | None, float | None]:
    found = conditions(tmp_path, tmp_path / "cpuinfo")
    return found.gpu_clock_mhz, found.gpu_temperature_c, found.gpu_power_w


def test_the_first_gpu_is_asked(tmp_path, program: Program):
    asked = tmp_path / "asked"
    program("nvidia-smi", f'echo "$@" > {asked}; echo 1980, 41, 112.53; echo 345, 30, 70.00')
    assert gpu_of(tmp_path) == (1980.0, 41.0, 112.53)
    query = "--query-gpu=clocks.sm,temperature.gpu,power.draw --format=csv,noheader,nounits"
    assert asked.read_text().strip() == query


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("echo '1980, [N/A], [Not Supported]'", (1980.0, None, None)),
        ("echo 'N/A, 41, nan'", (None, 41.0, None)),
        ("echo 'inf, -inf, '", (None, None, None)),
        ("echo No devices were found", (None, None, None)),
        ("echo 1980, 41", (None, None, None)),
        ("echo 1980, 41, 112.53; exit 9", (None, None, None)),
        (r"printf '\377\376, 41, 9'", (None, 41.0, 9.0)),
        ("kill -9 $$", (None, None, None)),
        (":", (None, None, None)),
    ],
)
def test_a_gpu_that_says_little(tmp_path, program: Program, script, wanted):
    program("nvidia-smi", script)
    assert gpu_of(tmp_path) == wanted


def test_a_driver_that_hangs_is_not_waited_for(tmp_path, program: Program, monkeypatch):
    monkeypatch.setattr(asking, "_SECONDS", 0.2)
    program("nvidia-smi", "while :; do :; done")
    started = time.monotonic()
    assert gpu_of(tmp_path) == (None, None, None)
    assert time.monotonic() - started < 60

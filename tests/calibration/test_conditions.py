"""What a system says of its clocks and sensors, or does not."""

from __future__ import annotations

from spec_export.calibration.conditions import Conditions, conditions


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


def test_the_power_mode_of_a_jetson(tmp_path, monkeypatch):
    program = tmp_path / "nvpmodel"
    program.write_text("#!/bin/sh\necho 'NV Power Mode: MAXN_SUPER'\necho 2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert conditions(tmp_path, tmp_path / "cpuinfo").power_mode == "MAXN_SUPER"

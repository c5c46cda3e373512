"""What the operating system calls the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Such as `AMD EPYC 9654`; the instruction set where there is no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

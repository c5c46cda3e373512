"""Memory of a device: boards by name, an amount as text, and what this machine has left."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from spec_export.engines.errors import RequestError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000 ** (n + 1) for n, prefix in enumerate(("k", "M", "G", "T"))}
_UNITS |= {f"{prefix}iB": 1024 ** (n + 1) for n, prefix in enumerate(("K", "M", "G", "T"))}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_GIB = 1 << 30


@dataclass(frozen=True)
class Board:
    """A board whose processor and GPU share their memory.

    Attributes:
        title: what it is called.
        memory: bytes of its memory.
    """

    title: str
    memory: int

    @property
    def usable(self) -> int:
        """What is left for a program: an assumption, not a measurement.

        A tenth is taken for regions that firmware and display keep, and 1.5 GiB for the system
        without a desktop, CUDA and the engine library. Say what there really is with a limit.
        """
        return max(0, self.memory - self.memory // 10 - 3 * _GIB // 2)


BOARDS = {
    "orin-nano-8gb": Board("Jetson Orin Nano 8GB", 8 * _GIB),
    "orin-nx-16gb": Board("Jetson Orin NX 16GB", 16 * _GIB),
    "agx-orin-64gb": Board("Jetson AGX Orin 64GB", 64 * _GIB),
    "agx-thor": Board("Jetson AGX Thor 128GB", 128 * _GIB),
}


def parse_bytes(text: str) -> int:
    """Bytes of `8GiB`, `500 MB`, `1.5GB` or `1000000`.

    Raises:
        RequestError: it is none of these, or nothing.
    """
    match = _AMOUNT.fullmatch(text)
    units = {name.lower(): size for name, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise RequestError(
            f"{text!r} is no amount of memory; write a number and a unit, such as 8GiB or 500MB"
        )
    count = float(match[1]) * units[match[2].lower()]
    if not 1 <= count <= 1 << 60:
        raise RequestError(f"{text!r} is no amount of memory that a device has")
    return int(count)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What this machine can still give to programs; None where the system does not say."""
    try:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found and len(found[0]) > 1 else None

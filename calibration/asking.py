"""Ask the programs of a system about it. Whatever is strange is an answer that is not there."""

from __future__ import annotations

import shutil
import subprocess

_SECONDS = 5


def told(program: str, *arguments: str, seconds: float | None = None) -> str:
    """What a program prints; nothing where there is none, it fails, or it takes long."""
    found = shutil.which(program)
    if found is None:
        return ""
    try:
        run = subprocess.run(
            [found, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS if seconds is None else seconds,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return run.stdout.decode(errors="replace")


def ask_gpus(*fields: str) -> list[tuple[str, ...]]:
    """Fields of every GPU, as the driver's own program tells them; empty where it does not."""
    query = f"--query-gpu={','.join(fields)}"
    lines = told("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()
    rows = [tuple(cell.strip() for cell in line.split(",")) for line in lines]
    return [row for row in rows if len(row) == len(fields)]

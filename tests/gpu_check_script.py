"""`bench/gpu_check.py` as a module, with its parts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).resolve().parents[1] / "bench"


def load_gpu_check() -> ModuleType:
    """The script; while it is imported its folder is on the path, as when Python runs it."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("gpu_check")
    finally:
        sys.path.remove(str(BENCH))

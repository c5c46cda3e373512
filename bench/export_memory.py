"""Peak anonymous memory of an export, parity included.

    python bench/export_memory.py TARGET [--dtype float32]

Exports TARGET without a draft in a child process and samples the child's RssAnon, the memory that
is its own and not a mapped file. Holds the peak against 1.5 GB plus twice the largest tensor. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASE_BYTES = 1_500_000_000
_EXPORT = """
import sys
from pathlib import Path
from spec_export.export.exporter import export_pair
pair = export_pair(sys.argv[1], "none", Path(sys.argv[2]), dtype=sys.argv[3],
                   progress=lambda step, done, total: print(step, done, total, flush=True))
"""


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def largest_tensor_bytes(graph: Path) -> int:
    """Bytes of the largest initializer of an exported graph."""
    import onnx_ir as ir

    model = ir.load(graph)
    sizes = [v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value]
    return max(sizes)


def measure(target: str, dtype: str, out: Path) -> dict[str, object]:
    """Run the export and return what was seen."""
    started = time.perf_counter()
    command = [sys.executable, "-c", _EXPORT, target, str(out), dtype]
    peak_by_step: dict[str, int] = {}
    step = "starting"
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while child.poll() is None:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.rsplit(" ", 2)[-1].isdigit()]
            step = lines[-1].rsplit(" ", 2)[0] if lines else step
            peak_by_step[step] = max(peak_by_step.get(step, 0), anonymous_bytes(child.pid))
            time.sleep(0.02)
        log.seek(0)
        if child.returncode:
            sys.exit(log.read())
    largest = largest_tensor_bytes(out / "target" / "model.onnx")
    peak = max(peak_by_step.values())
    return {
        "target": Path(target).name,
        "dtype": dtype,
        "seconds": round(time.perf_counter() - started, 1),
        "peak_anonymous_mb": peak // 1_000_000,
        "peak_by_step_mb": {name: size // 1_000_000 for name, size in peak_by_step.items()},
        "largest_tensor_mb": largest // 1_000_000,
        "limit_mb": (BASE_BYTES + 2 * largest) // 1_000_000,
        "within": peak <= BASE_BYTES + 2 * largest,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("target")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.target, arguments.dtype, Path(folder) / "exported")
    for name, value in result.items():
        print(f"{name:>20}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

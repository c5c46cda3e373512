"""Time of a target pass by row count, T(m)/T(1): what verifying costs on this device.

    python bench/widths.py BUNDLE [--widths 1,2,3,5,9] [--kv-len 128] [--repeats 40]

The widths take turns, so that drift cancels; medians. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from spec_export.engines.bundle import default_memory, open_bundle
from spec_export.engines.graphs import RoleSpec
from spec_export.engines.passes import allocate_caches, bind_role
from spec_export.runtime.opened import make_backend


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--model", default="target")
    parser.add_argument("--widths", default="1,2,3,5,9")
    parser.add_argument("--kv-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    bundle = open_bundle(arguments.bundle, default_memory())
    backend = make_backend(bundle.manifest.device.backend, arguments.threads)
    widths = [int(width) for width in arguments.widths.split(",")]
    roles = tuple(RoleSpec(f"T{m}", m, m, "chain") for m in widths)
    spec = replace(bundle.manifest.models[arguments.model], roles=roles)
    engine = backend.open_model(bundle.file(spec.file), spec)
    caches = allocate_caches(backend.device, spec)
    bound = {m: bind_role(backend.device, engine, spec, f"T{m}", caches) for m in widths}
    for role in bound.values():
        backend.device.upload(role.buffers["kv_len"], np.array([arguments.kv_len], np.int64))
    times: dict[int, list[float]] = {m: [] for m in widths}
    for repeat in range(arguments.repeats + 2):
        for m in widths:
            started = time.perf_counter()
            bound[m].call.enqueue()
            if repeat >= 2:
                times[m].append((time.perf_counter() - started) * 1e3)
    medians = {m: statistics.median(times[m]) for m in widths}
    for m in widths:
        print(f"T={m:<3} {medians[m]:8.2f} ms {medians[m] / medians[widths[0]]:6.3f}x")
    ratios = {str(m): round(medians[m] / medians[widths[0]], 3) for m in widths}
    print(
        json.dumps({"bundle": arguments.bundle.name, "kv_len": arguments.kv_len, "ratio": ratios})
    )


if __name__ == "__main__":
    main()

"""One TensorRT engine with pinned profiles, or one engine for each role: size, build time, memory.

    make bench BENCH=engine_layouts ARGS='EXPORTED [--dtype float16] [--compute-capability 8.9]'

Needs tensorrt_rtx and no GPU. What a context allocates is known to an opened engine only, which
needs the GPU; the size of an engine is what its weights and kernels take there. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from spec_export.console import Steps
from spec_export.engines import trt_api
from spec_export.engines.build import BuildOptions, pinned_models, read_exported
from spec_export.engines.graphs import ModelSpec
from spec_export.engines.prepare import retype_exported
from spec_export.engines.trt_build import TimingCache, TrtOptions, compile_engine
from spec_export.engines.trt_prepare import read_pinned
from spec_export.engines.trt_profiles import profile_shapes
from spec_export.quantizing import Quantizing, quantize_directory


def layouts(spec: ModelSpec) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Names of layouts, and the roles of each of their engines."""
    names = tuple(role.name for role in spec.roles)
    wide = tuple(role.name for role in spec.roles if role.rows != 1)
    yield "one engine, a profile a shape", [names]
    yield "an engine a role", [(name,) for name in names]
    yield "one engine, no role of one row", [wide]
    single = tuple(name for name in names if name not in wide)
    yield "two engines: one row, and the rest", [wide, single]


def measured(
    graph: Path, spec: ModelSpec, roles: tuple[str, ...], capabilities: tuple[str, ...], out: Path
) -> tuple[int, float]:
    """Bytes and seconds of one engine."""
    api = trt_api.load("tensorrt-rtx")
    capacity = int(spec.states[0].dims[2])
    chosen = replace(spec, roles=tuple(spec.role(name) for name in roles))
    model = read_pinned(graph, {"C": capacity}).SerializeToString()
    profiles = profile_shapes(chosen, capacity)
    started = time.perf_counter()
    file = out / "model.engine"
    compile_engine(api, model, graph, profiles, TrtOptions(), capabilities, TimingCache(api), file)
    seconds = time.perf_counter() - started
    size = file.stat().st_size
    file.unlink()
    return size, seconds


def main() -> None:
    """Measure every layout of the target, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exported", type=Path)
    parser.add_argument("--dtype", default=None, help="of weights; as exported unless given")
    parser.add_argument("--weights", default=None, help="int8, int4, fp8 or nvfp4, to nearest")
    parser.add_argument("--compute-capability", default="8.9")
    parser.add_argument("--max-len", type=int, default=1024)
    given = parser.parse_args()
    capabilities = tuple(given.compute_capability.split(","))
    with tempfile.TemporaryDirectory() as folder:
        work, exported = Path(folder), given.exported
        if given.weights is not None:
            quantize_directory(
                exported,
                work / "quantized",
                Quantizing(weights=given.weights, quantizer="rtn"),
                "tensorrt-rtx",
                Steps(quiet=True),
            )
            exported = work / "quantized"
        if given.dtype not in (None, read_exported(exported).models["target"].dtype):
            (work / "retyped").mkdir()
            retype_exported(exported, work / "retyped", given.dtype)
            exported = work / "retyped"
        options = BuildOptions(gamma=4, max_len=given.max_len, chunk=128)
        spec = pinned_models(read_exported(exported), options)["target"]
        weights = spec.parameters_bytes
        print(f"weights {weights / 1e6:.1f} MB, {spec.layers} layers, {spec.dtype}")
        rows = []
        for name, engines in layouts(spec):
            found = [
                measured(exported / spec.file, spec, roles, capabilities, work) for roles in engines
            ]
            size, seconds = sum(b for b, _ in found), sum(s for _, s in found)
            rows.append({"layout": name, "bytes": size, "seconds": round(seconds, 1)})
            print(f"{name:<36} {size / 1e6:9.1f} MB {size / weights:6.2f} x {seconds:7.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"weights_bytes": weights, "layouts": rows, "peak_host_bytes": peak}))


if __name__ == "__main__":
    main()

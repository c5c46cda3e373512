"""Compile one graph with `tensorrt_rtx`, whose builder needs no GPU, and say what it became.

pytest.importorskip("tensorrt_rtx", reason="...")
network = compile_graph(model, {"R": 5})
assert network.layers["TOPK"] == 0
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx

from spec_export.engines import trt_api
from spec_export.engines.trt_build import Network, TimingCache, TrtOptions, compile_engine
from spec_export.engines.trt_prepare import pin

CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")


def compile_graph(
    model: onnx.ModelProto,
    sizes: Mapping[str, int],
    capabilities: tuple[str, ...] = CAPABILITIES,
) -> Network:
    """Pin the symbols of a graph that holds its weights, and compile it, by way of the product."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    pin(copy, sizes)
    api = trt_api.load("tensorrt-rtx")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "graph.engine"
        content = copy.SerializeToString()
        times = TimingCache(api)
        return compile_engine(api, content, None, [], TrtOptions(), capabilities, times, out)

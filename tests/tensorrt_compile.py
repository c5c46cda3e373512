"""Compile a graph with `tensorrt_rtx`, whose builder needs no GPU, and say what it became.

Tests use it to keep every exported graph acceptable to TensorRT:

    pytest.importorskip("tensorrt_rtx", reason="...")
    network = compile_graph(model_bytes, {"logits": (1, 5, 1031), "draft_tokens": (4,)})
    assert network.layers["ATTENTION_INPUT"] == 4

Not imported by the package: needs onnx and tensorrt_rtx.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Network:
    """A parsed and compiled network.

    Attributes:
        layers: how many layers of each type the parsed network has, by TensorRT's name.
        inputs: shapes by name.
        outputs: shapes by name; a data-dependent dimension is -1.
        engine_bytes: size of the compiled engine, 0 when it was only parsed.
    """

    layers: Counter[str]
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    engine_bytes: int


class CompileError(AssertionError):
    """TensorRT refused the graph; the message holds its log."""


def compile_graph(
    model: bytes | str | Path,
    pins: Mapping[str, Shape],
    symbols: Mapping[str, int] | None = None,
    *,
    build: bool = True,
) -> Network:
    """Pin, parse and compile one graph, strongly typed.

    Args:
        model: serialized ONNX, or a path (needed where weights are external data).
        pins: shapes of the inputs that have symbolic dimensions; an output's dimension of the
            same name is pinned with them.
        symbols: sizes of dimensions that only outputs have.
        build: False stops after parsing, which is cheap.

    Raises:
        CompileError: an input is left unpinned, or the parser or the builder refused the graph.
    """
    import tensorrt_rtx as trt

    log = _log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    path = None if isinstance(model, bytes) else str(model)
    if not parser.parse(_pinned(model, pins, symbols or {}).SerializeToString(), path=path):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise CompileError("\n".join([*errors, *log.lines]))
    engine = None
    if build:
        engine = builder.build_serialized_network(network, builder.create_builder_config())
        if engine is None:
            raise CompileError("\n".join(log.lines))
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return Network(
        layers=Counter(network.get_layer(i).type.name for i in range(network.num_layers)),
        inputs={t.name: tuple(t.shape) for t in inputs},
        outputs={t.name: tuple(t.shape) for t in outputs},
        engine_bytes=engine.nbytes if engine is not None else 0,
    )


def _pinned(
    model: bytes | str | Path, pins: Mapping[str, Shape], symbols: Mapping[str, int]
) -> onnx.ModelProto:
    proto = (
        onnx.load_from_string(model)
        if isinstance(model, bytes)
        else onnx.load(str(model), load_external_data=False)
    )
    sizes = dict(symbols)
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = pins.get(value.name, (0,) * len(dims))
        named = [(d.dim_param, n) for d, n in zip(dims, shape, strict=True) if d.dim_param]
        for name, size in named:
            if sizes.setdefault(name, size) != size and size:
                raise CompileError(f"{name} is pinned to both {sizes[name]} and {size}")
            sizes[name] = size or sizes[name]
    for value in [*proto.graph.input, *proto.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                if not sizes.get(dim.dim_param):
                    raise CompileError(f"{value.name} has no pinned size for {dim.dim_param}")
                dim.dim_value = sizes[dim.dim_param]
    return proto


def _log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.Logger.WARNING:
                self.lines.append(f"{severity.name}: {message}")

    return Log()

"""The graphs of a bundle computed by torch: real arithmetic on a GPU that has no engine library.

Not an engine of this product: nothing is fused or fast. It is there so that `gpu_check.py` can
prove everything around an engine on a machine that has torch and a GPU alone: parity, rounds
captured as CUDA graphs, exactness, the emitted law. What depends on shapes only is computed once,
on the host, when a call is bound; the rest is a list of torch calls on the device's stream.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper

from gpu_checks.torch_operators import NUMBERS, OPERATORS, Tensor, shape_of
from spec_export.engines.backend import Buffer
from spec_export.engines.binding import check_aliases, checked, role_symbols, symbols_of
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.graphs import ModelSpec, SamplingSpec
from spec_export.engines.ort import OrtBackend


class Step:
    """A node that runs on the device: names or tensors in, names out."""

    def __init__(self, node: onnx.NodeProto, inputs: list[Any]) -> None:
        self.run = OPERATORS[node.op_type]
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self.inputs, self.outputs = inputs, list(node.output)


class TorchCall:
    """A graph with everything bound."""

    def __init__(
        self,
        device: Any,
        steps: list[Step],
        given: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        keep: object,
    ) -> None:
        self._device, self._steps, self._given = device, steps, given
        self._outputs, self._keep = outputs, keep

    def enqueue(self) -> None:
        """Run every step on the device's stream."""
        values: dict[str, Tensor] = dict(self._given)
        with torch.no_grad(), on_stream(self._device):
            for step in self._steps:
                values.update(computed(step, values))
            for name, place in self._outputs.items():
                if values[name].data_ptr() != place.data_ptr():
                    place.copy_(values[name])


def computed(step: Step, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The outputs of a step."""
    inputs = [values[x] if isinstance(x, str) else x for x in step.inputs]
    result = step.run(step.attributes, *inputs)
    results = result if isinstance(result, tuple) else (result,)
    return zip(step.outputs, results, strict=False)


@contextlib.contextmanager
def on_stream(device: Any) -> Iterator[None]:
    """Have torch enqueue where the device does."""
    if not isinstance(device, CudaDevice):
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(device.stream)):
        yield


def seen(buffer: Buffer) -> Tensor:
    """A buffer as a tensor over the same memory."""
    if buffer.host is not None:
        return torch.from_numpy(buffer.host)
    view = type("View", (), {})()
    view.__cuda_array_interface__ = {
        "shape": buffer.shape,
        "typestr": buffer.dtype.str,
        "data": (buffer.address, False),
        "version": 3,
    }
    return torch.as_tensor(view, device="cuda")


class TorchEngine:
    """A graph and its weights."""

    def __init__(self, file: Path, spec: ModelSpec | SamplingSpec, device: Any) -> None:
        model = onnx.load(file)
        self._nodes, self._device = list(model.graph.node), device
        self._where = "cuda" if isinstance(device, CudaDevice) else "cpu"
        self._constants = {
            x.name: torch.from_numpy(numpy_helper.to_array(x).copy())
            for x in model.graph.initializer
        }
        self._moved: dict[int, Tensor] = {}
        self._read = {value.name for value in model.graph.input}
        self.inputs = {tensor.name: tensor for tensor in spec.inputs}
        self.outputs = {tensor.name: tensor for tensor in spec.outputs}
        self._roles = role_symbols(spec)
        states = [] if isinstance(spec, SamplingSpec) else spec.states
        self._aliases = {state.output: state.input for state in states}

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> TorchCall:
        """Bind buffers; what only depends on shapes is computed here."""
        symbols = symbols_of(self._roles, role)
        named = itertools.chain(self.inputs.values(), self.outputs.values())
        found = {spec.name: checked(buffers, spec, symbols, role) for spec in named}
        check_aliases(found, self._aliases)
        given = {name: seen(found[name]) for name in self.inputs if name in self._read}
        places = {name: seen(found[name]) for name in self.outputs}
        steps = self._folded({name: tuple(value.shape) for name, value in given.items()}, given)
        return TorchCall(self._device, steps, given, places, found)

    def _folded(
        self, shapes: dict[str, tuple[int, ...]], given: Mapping[str, Tensor]
    ) -> list[Step]:
        """The steps that are left for the device; shapes are followed on torch's meta device."""
        host, steps = dict(self._constants), list[Step]()
        meta = {name: torch.empty_like(value, device="meta") for name, value in given.items()}
        for node in self._nodes:
            step = Step(node, [name or None for name in node.input])
            known = all(name is None or name in host for name in step.inputs)
            if node.op_type == "Shape" and node.input[0] in meta:
                host[node.output[0]] = shape_of(step.attributes, meta[node.input[0]])
            elif known:
                host.update(computed(step, host))
            else:
                numbers = NUMBERS.get(node.op_type, ())
                follow = Step(node, list(step.inputs))
                for i, name in enumerate(step.inputs):
                    if name in host:
                        value = host[name]
                        step.inputs[i] = value if i in numbers else self._on_device(value)
                        follow.inputs[i] = value if i in numbers else value.to("meta")
                meta.update(computed(follow, meta))
                steps.append(step)
        return steps

    def _on_device(self, value: Tensor) -> Tensor:
        if id(value) not in self._moved:
            self._moved[id(value)] = value.to(self._where)
            self._moved[-id(value)] = value  # so that its id is not given to another
        return self._moved[id(value)]


class TorchDevice(CudaDevice):
    """A GPU whose recordings torch makes, so that what it allocates meanwhile is theirs."""

    def record(self, work: Callable[[], None]) -> Any:
        """Run `work`, then capture it."""
        self._waiting("record")
        work()
        self.synchronize()
        graph, side, local = torch.cuda.CUDAGraph(), torch.cuda.Stream(), self._local
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                local.capture = local.capture_handle = side.cuda_stream
                work()
        finally:
            local.capture = None
            self._retired.sweep()
        return _Replay(self, graph, work)


class _Replay:
    """A recording, launched on the device's stream."""

    def __init__(self, device: TorchDevice, graph: Any, work: Callable[[], None]) -> None:
        self._device, self._graph, self._work = device, graph, work

    def enqueue(self) -> None:
        """Launch it."""
        with on_stream(self._device):
            self._graph.replay()


class TorchBackend(OrtBackend):
    """Builds standard graphs with pinned dimensions, and computes them with torch."""

    name = "torch"

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.device = TorchDevice() if device is None else device

    def _lower_attention(self, model: Any, spec: ModelSpec, capacity: int) -> int:
        return 0

    def open_model(self, file: Path, spec: ModelSpec) -> Any:
        """Open a model."""
        return TorchEngine(file, spec, self.device)

    def open_sampling(self, file: Path, spec: SamplingSpec) -> Any:
        """Open a sampling graph."""
        return TorchEngine(file, spec, self.device)

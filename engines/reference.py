"""ONNX's own reference evaluator as an engine library, for tests.

Runs the standard graphs as they were exported, nothing lowered, on numpy. Slow, and written by the
people who define the operators: what an engine computes is held against it. Needs onnx, so that no
bundle is opened with it on a device.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from spec_export.engines.backend import Buffer, Compiled
from spec_export.engines.errors import EngineError
from spec_export.engines.graphs import ModelSpec, SamplingSpec, TensorSpec
from spec_export.engines.host import HostDevice
from spec_export.engines.manifest import DeviceSpec
from spec_export.engines.ort import external_files


class ReferenceCall:
    """An evaluator over bound arrays."""

    def __init__(
        self, evaluator: ReferenceEvaluator, inputs: dict[str, Buffer], outputs: dict[str, Buffer]
    ) -> None:
        self._evaluator = evaluator
        self._feeds = {name: _host(buffer) for name, buffer in inputs.items()}
        self._results = {name: _host(buffer) for name, buffer in outputs.items()}

    def enqueue(self) -> None:
        """Run once. Every input is read before any output is written: they may share memory."""
        try:
            with np.errstate(all="ignore"):
                made = self._evaluator.run(list(self._results), self._feeds)
        except Exception as error:
            raise EngineError(f"onnx.reference failed: {error}") from error
        for result, array in zip(self._results.values(), made, strict=True):
            np.copyto(result, array)


class ReferenceEngine:
    """An evaluator and the description of its tensors."""

    def __init__(
        self,
        evaluator: ReferenceEvaluator,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        roles: Mapping[str, dict[str, int]],
        aliases: Mapping[str, str],
    ) -> None:
        self._evaluator = evaluator
        self.inputs = {spec.name: spec for spec in inputs}
        self.outputs = {spec.name: spec for spec in outputs}
        self._roles, self._aliases = roles, aliases

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> ReferenceCall:
        """Bind `buffers` by tensor name for `role`."""
        if role not in self._roles:
            raise EngineError(f"no role {role!r}; this engine has {', '.join(self._roles)}")
        symbols = self._roles[role]
        for spec in (*self.inputs.values(), *self.outputs.values()):
            _check(buffers, spec.pinned(symbols), role)
        for output, source in self._aliases.items():
            if buffers[output].address != buffers[source].address:
                raise EngineError(f"{output} must be the same memory as {source}")
        read = set(self._evaluator.input_names)
        return ReferenceCall(
            self._evaluator,
            {name: buffers[name] for name in self.inputs if name in read},
            {name: buffers[name] for name in self.outputs},
        )


class ReferenceBackend:
    """`onnx.reference` on the host."""

    name = "onnx.reference"
    suffix = ".onnx"
    can_run = True
    left_out: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.device = HostDevice()
        self.threads = 1

    def compile_model(
        self, graph: Path, spec: ModelSpec, capacity: int, out: Path, link: bool
    ) -> Compiled:
        """Copy the graph and its weights into `out`; `capacity` stays a symbol."""
        import onnx_ir as ir

        out.mkdir(parents=True, exist_ok=True)
        for file in (graph, *external_files(ir.load(graph), graph.parent)):
            shutil.copyfile(file, out / file.name)
        return Compiled(graph.name, ())

    def compile_sampling(self, graph: Path, pins: Mapping[str, int], out: Path) -> None:
        """Copy the graph to `out`; its symbols stay."""
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph, out)

    def open_model(self, file: Path, spec: ModelSpec) -> ReferenceEngine:
        """Open an evaluator for every role of a model."""
        roles = {role.name: {"T": int(role.rows), "R": int(role.logit_rows)} for role in spec.roles}
        aliases = {state.output: state.input for state in spec.states if state.aliased}
        return ReferenceEngine(_evaluator(file), spec.inputs, spec.outputs, roles, aliases)

    def open_sampling(self, file: Path, spec: SamplingSpec) -> ReferenceEngine:
        """Open an evaluator for a sampling graph; its one role is called `run`."""
        return ReferenceEngine(_evaluator(file), spec.inputs, spec.outputs, {"run": {}}, {})

    def unfused(self, file: Path) -> tuple[str, ...]:
        """What was not lowered is said when it is built."""
        return ()

    def compiler(self) -> None:
        """Nothing is compiled before a graph is opened."""

    def describe(self) -> DeviceSpec:
        """This machine and this version of onnx."""
        machine = platform.machine()
        return DeviceSpec(
            self.name, onnx.__version__, platform.processor() or machine, machine, self.threads
        )


def _evaluator(file: Path) -> ReferenceEvaluator:
    try:
        return ReferenceEvaluator(str(file))
    except Exception as error:
        raise EngineError(f"onnx {onnx.__version__} cannot open {file}: {error}") from error


def _check(buffers: Mapping[str, Buffer], spec: TensorSpec, role: str) -> None:
    if spec.name not in buffers:
        raise EngineError(f"role {role}: nothing is bound to {spec.name}")
    buffer = buffers[spec.name]
    if buffer.shape != spec.dims or buffer.dtype != np.dtype(spec.dtype):
        raise EngineError(
            f"role {role}: {spec.name} is {spec.dtype} {list(spec.dims)}, "
            f"bound was {buffer.dtype} {list(buffer.shape)}"
        )


def _host(buffer: Buffer) -> np.ndarray[Any, Any]:
    assert buffer.host is not None
    return buffer.host

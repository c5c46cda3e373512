"""ONNX Runtime on the CPU.

One session per model serves every role: rows are a free dimension, the cache capacity is pinned.
A model's workers stop spinning when its pass ends, so that they do not take the cores from the next
model; sampling graphs are too small for more than one thread. The library's global thread pool
would do as well, but whoever else uses the library in the process could open no session of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import _pybind_state as native

from spec_export.engines.backend import Buffer, Compiled, Device
from spec_export.engines.binding import (
    aliases_of,
    check_aliases,
    checked,
    role_symbols,
    symbols_of,
)
from spec_export.engines.errors import EngineError, RequestError
from spec_export.engines.extras import require
from spec_export.engines.graphs import BY_ROW, ModelSpec, SamplingSpec, TensorSpec
from spec_export.engines.host import HostDevice
from spec_export.engines.manifest import DeviceSpec
from spec_export.engines.processor import processor_name

HOST = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
_QUIET = 3
_ACCURACY = "session.qdq_matmulnbits_accuracy_level"
_IN_FLOAT, _IN_INT8 = "1", "4"
_TYPE_NAMES = {"float32": "float"}
_MOST_THREADS = 64  # allowed on any machine: for checks of a bundle that was built on a larger one


class OrtCall:
    """A bound session."""

    def __init__(
        self, session: Any, binding: Any, keep: Mapping[str, Buffer], options: Any
    ) -> None:
        self._run, self._binding, self._keep = session.run_with_iobinding, binding, keep
        self._options = options

    def enqueue(self) -> None:
        """Run once."""
        try:
            self._run(self._binding, self._options)
        except Exception as error:
            raise EngineError(f"onnxruntime failed: {error}") from error


class OrtEngine:
    """A session and the description of its tensors.

    Args:
        session: of the graph.
        spec: what it describes.
        place: the library's name of the device whose memory is bound.
        options: makes what each bound call runs with.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: ModelSpec | SamplingSpec,
        place: Any = HOST,
        options: Callable[[], Any] = ort.RunOptions,
    ) -> None:
        self._session, self._place, self._options = session, place, options
        self._read = {value.name for value in session.get_inputs()}
        self.inputs: Mapping[str, TensorSpec] = {tensor.name: tensor for tensor in spec.inputs}
        self.outputs: Mapping[str, TensorSpec] = {tensor.name: tensor for tensor in spec.outputs}
        self._roles, self._aliases = role_symbols(spec), aliases_of(spec)

    def with_roles(self, spec: ModelSpec) -> OrtEngine:
        """The same session for other roles: its rows are free."""
        return OrtEngine(self._session, spec, self._place, self._options)

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> OrtCall:
        """Bind `buffers` by tensor name for `role`."""
        symbols = symbols_of(self._roles, role)
        binding = self._session.io_binding()._iobinding
        for name, spec in self.inputs.items():
            buffer = checked(buffers, spec, symbols, role)
            if name in self._read:
                bind_at(binding.bind_input, name, buffer, self._place)
        for name, spec in self.outputs.items():
            bind_at(binding.bind_output, name, checked(buffers, spec, symbols, role), self._place)
        check_aliases(buffers, self._aliases)
        return OrtCall(self._session._sess, binding, dict(buffers), self._options())


def bind_at(bind: Callable[..., None], name: str, buffer: Buffer, place: Any) -> None:
    """Bind memory of the device `place` by its address."""
    try:
        bind(name, place, buffer.dtype.type, buffer.shape, buffer.address)
    except Exception as error:
        raise EngineError(f"onnxruntime cannot bind {name}: {error}") from error


class OrtBackend:
    """ONNX Runtime, CPU execution provider."""

    name = "onnxruntime"
    suffix = ".onnx"
    can_run = True
    left_out: frozenset[str] = frozenset()

    def __init__(self, threads: int | None = None) -> None:
        self.device: Device = HostDevice()
        self.threads = _checked_threads(threads)

    def compile_model(
        self, graph: Path, spec: ModelSpec, capacity: int, out: Path, link: bool
    ) -> Compiled:
        """Lower attention, pin the capacity, and write the graph and its weights into `out`."""
        require("build", "onnx_ir")
        import onnx_ir as ir

        from spec_export.engines import lower
        from spec_export.engines.activations import check_rounding

        model = ir.load(graph)
        check_rounding(model.graph)
        lower.pin_dimensions(model, {"C": capacity})
        layers = self._lower_attention(model, spec, capacity)
        lower.remove_unused_inputs(model, frozenset({"input_ids", "kv_len"}))
        lower.stamp_oldest(model)
        out.mkdir(parents=True, exist_ok=True)
        for data in external_files(model, graph.parent):
            _copy_or_link(data, out / data.name, link)
        ir.save(model, out / graph.name)
        return Compiled(graph.name, (f"GroupQueryAttention: {layers} of {spec.layers} layers",))

    def _lower_attention(self, model: Any, spec: ModelSpec, capacity: int) -> int:
        """Replace attention by what this provider has for it; returns the layers replaced."""
        from spec_export.engines import lower

        return lower.lower_attention(model, spec)

    def compile_sampling(self, graph: Path, pins: Mapping[str, int], out: Path) -> None:
        """Pin the symbols, lower the sums and write the graph."""
        require("build", "onnx_ir")
        from spec_export.engines import lower

        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(lower.lower_sampling(graph, pins).SerializeToString())

    def open_model(self, file: Path, spec: ModelSpec) -> OrtEngine:
        """Open a session for every role of a model.

        Products by weights of few bits are done in 8 bits, each row with scales of its own, where
        the model was made so, and else in float32.
        """
        options = ort.SessionOptions()
        by_row = spec.quantization is not None and spec.quantization.activations == BY_ROW
        options.add_session_config_entry(_ACCURACY, _IN_INT8 if by_row else _IN_FLOAT)
        session = open_session(file, options, self.threads)
        _give_back_freed()
        _check_caches(session, spec, file)
        return OrtEngine(session, spec)

    def open_mapped(self, file: Path, spec: ModelSpec) -> OrtEngine:
        """Open a model that reads its weights where they lie on disk: slow, and next to no memory.

        Nothing is folded, fused or packed, so it is also the plain reading of the graph.
        """
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        return OrtEngine(open_session(file, options, self.threads), spec)

    def open_sampling(self, file: Path, spec: SamplingSpec) -> OrtEngine:
        """Open a session for a sampling graph; its one role is called `run`."""
        return OrtEngine(open_session(file, ort.SessionOptions(), threads=1), spec)

    def unfused(self, file: Path) -> tuple[str, ...]:
        """What was not lowered is said when it is built."""
        return ()

    def compiler(self) -> None:
        """Nothing is compiled before a graph is opened."""

    def describe(self) -> DeviceSpec:
        """This processor and this library."""
        return DeviceSpec(
            self.name, ort.__version__, processor_name(), platform.machine(), self.threads
        )


def open_session(
    graph: Path | bytes,
    options: ort.SessionOptions,
    threads: int,
    providers: Sequence[str | tuple[str, dict[str, str]]] = ("CPUExecutionProvider",),
) -> ort.InferenceSession:
    """Open a graph, from its file or as it is serialized.

    Raises:
        EngineError: the library refuses it.
    """
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = _QUIET
    try:
        source = graph if isinstance(graph, bytes) else str(graph)
        return ort.InferenceSession(source, options, providers=list(providers))
    except Exception as error:
        named = "a graph" if isinstance(graph, bytes) else graph
        raise EngineError(f"onnxruntime {ort.__version__} cannot open {named}: {error}") from error


def _give_back_freed() -> None:
    """Return to the system what was freed while a graph was opened.

    onnxruntime transposes and packs weights on the way; what that leaves free stays with the
    process otherwise. November 2026, SmolLM2-135M, weights and caches of int8: 372 MB to 332 MB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _check_caches(session: ort.InferenceSession, spec: ModelSpec, file: Path) -> None:
    """Refuse a graph whose caches are not of the described type, before memory is bound to it."""
    found = {value.name: value.type for value in session.get_inputs()}
    for state in spec.states:
        wanted = f"tensor({_TYPE_NAMES.get(state.dtype, state.dtype)})"
        if found.get(state.input, wanted) != wanted:
            raise EngineError(
                f"{file}: the cache {state.input} is {found[state.input]}, and is described as "
                f"{state.dtype}; it was altered: build it again"
            )


def _copy_or_link(source: Path, target: Path, link: bool) -> None:
    if link:
        with contextlib.suppress(OSError):  # another file system, or one without links
            target.hardlink_to(source)
            return
    shutil.copyfile(source, target)


def _checked_threads(threads: int | None) -> int:
    if threads is None:
        return default_threads()
    most = max(_MOST_THREADS, 4 * (os.cpu_count() or 1))
    if not isinstance(threads, int) or not 1 <= threads <= most:
        raise RequestError(f"threads={threads!r}: a whole number, 1 to {most} on this machine")
    return threads


def default_threads() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def external_files(model: Any, directory: Path) -> list[Path]:
    """The external-data files of a graph, checked to be files beside it."""
    names = set()
    for value in model.graph.initializers.values():
        location = getattr(value.const_value, "location", None)
        if location is not None:
            names.add(str(location))
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise EngineError(
                f"external data {name!r} is not a file beside its graph in {directory}"
            )
    return [directory / name for name in sorted(names)]

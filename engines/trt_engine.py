"""TensorRT engines at run time, of either library.

An engine is opened once and shared. Each `bind` makes an execution context of its own, with its
profile, shapes and addresses set for good, so that a pass is one `execute_async_v3`. Contexts of a
device never run at the same time (everything is on one stream), so they share one scratch memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.engines.backend import Buffer, Call
from spec_export.engines.binding import (
    aliases_of,
    check_aliases,
    checked,
    role_symbols,
    shape_of,
    symbols_of,
)
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.errors import EngineError
from spec_export.engines.graphs import ModelSpec, SamplingSpec, TensorSpec
from spec_export.engines.trt_api import TensorRt
from spec_export.engines.trt_calls import StagedCall, TrtCall


@dataclass(frozen=True)
class Profile:
    """Where a role is compiled.

    Attributes:
        file: of the engine; roles may share one, or have one each.
        index: of its optimization profile.
    """

    file: Path
    index: int = 0


class Scratch:
    """Memory that the contexts of a device work in, one after another.

    It has the size of the largest need that was known when it was first used. A larger one later
    gets memory of its own: the old address may be part of a captured graph.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._largest = device, 0
        self._block: Buffer | None = None

    def expect(self, count: int) -> None:
        """Some context will need `count` bytes."""
        self._largest = max(self._largest, count)

    def block(self, count: int) -> Buffer:
        """At least `count` bytes; whoever uses them keeps the buffer."""
        self.expect(count)
        if self._block is None or self._block.nbytes < count:
            self._block = self._device.allocate((self._largest,), "uint8")
        return self._block


class TrtEngine:
    """A compiled graph: one engine for all roles, or one for each.

    Attributes:
        inputs: by name, as described.
        outputs: by name, as described.
    """

    def __init__(
        self,
        api: TensorRt,
        device: CudaDevice,
        scratch: Scratch,
        spec: ModelSpec | SamplingSpec,
        opened: Mapping[str, tuple[Any, int]],
    ) -> None:
        self._api, self._device, self._scratch, self._opened = api, device, scratch, opened
        self.inputs: Mapping[str, TensorSpec] = {tensor.name: tensor for tensor in spec.inputs}
        self.outputs: Mapping[str, TensorSpec] = {tensor.name: tensor for tensor in spec.outputs}
        self._roles, self._aliases = role_symbols(spec), aliases_of(spec)
        self._kernels: Any = None  # compiled for one context, used by the next
        for engine, index in opened.values():
            self._check_tensors(engine)
            scratch.expect(self._memory(engine, index))

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> Call:
        """Bind `buffers` by tensor name for `role`."""
        symbols = symbols_of(self._roles, role)
        described = {**self.inputs, **self.outputs}
        found = {name: checked(buffers, spec, symbols, role) for name, spec in described.items()}
        check_aliases(found, self._aliases)
        engine, index = self._opened[role]
        names = set(_tensors(engine))
        placed = {name: self._placed(name, found[name]) for name in found if name in names}
        block = self._scratch.block(self._memory(engine, index))
        try:
            context = self._context(engine, index, block)
            self._set(context, role, placed, symbols)
        except RuntimeError as error:  # of the library's binding
            raise EngineError(f"role {role}: {error}; {self._api.reasons()}") from error
        call = TrtCall(self._api, self._device, context, (engine, block, placed))
        moved = [name for name, buffer in placed.items() if buffer is not found[name]]
        if not moved:
            return call
        before = [(found[name], placed[name]) for name in moved if name in self.inputs]
        after = [(placed[name], found[name]) for name in moved if name in self.outputs]
        return StagedCall(self._device, before, call, after)

    def _placed(self, name: str, buffer: Buffer) -> Buffer:
        """The buffer, or one beside it at an address the library takes."""
        if buffer.address % self._device.alignment == 0:
            return buffer
        if name in self._aliases or name in self._aliases.values():
            raise EngineError(
                f"the cache {name} is not at a multiple of {self._device.alignment} bytes"
            )
        return self._device.allocate(buffer.shape, buffer.dtype)

    def _context(self, engine: Any, index: int, block: Buffer) -> Any:
        """A context on its profile, with memory that is ours."""
        api, module = self._api, self._api.module
        user_managed = module.ExecutionContextAllocationStrategy.USER_MANAGED
        if api.has("runtime_config"):
            config = engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(user_managed)
            if api.has("graph_strategy"):
                config.cuda_graph_strategy = module.CudaGraphStrategy.DISABLED
            if api.has("runtime_cache"):
                self._kernels = self._kernels or config.create_runtime_cache()
                config.set_runtime_cache(self._kernels)
            if api.has("kernel_specialization"):
                eager = module.DynamicShapesKernelSpecializationStrategy.EAGER
                config.dynamic_shapes_kernel_specialization_strategy = eager
            context = engine.create_execution_context(config)
        else:
            context = engine.create_execution_context(user_managed)
        self._require(context is not None, "made no execution context")
        if engine.num_optimization_profiles:
            chosen = context.set_optimization_profile_async(index, self._device.stream)
            self._require(chosen, f"refused profile {index}")
        context.set_device_memory(block.address, block.nbytes)
        return context

    def _set(
        self, context: Any, role: str, placed: Mapping[str, Buffer], symbols: Mapping[str, int]
    ) -> None:
        """Give a context its shapes and addresses."""
        for name, buffer in placed.items():
            if name in self.inputs:
                set_shape = context.set_input_shape(name, buffer.shape)
                self._require(set_shape, f"role {role}: refused {list(buffer.shape)} for {name}")
        unset = context.infer_shapes()
        self._require(not unset, f"role {role}: has no shape for {', '.join(unset)}")
        for name, buffer in placed.items():
            shape = tuple(context.get_tensor_shape(name))
            wanted = shape_of({**self.inputs, **self.outputs}[name], symbols)
            if shape != wanted:
                raise EngineError(
                    f"role {role}: the engine makes {name} {list(shape)}, the manifest says "
                    f"{list(wanted)}"
                )
            taken = context.set_tensor_address(name, buffer.address)
            self._require(taken, f"role {role}: refused the address of {name}")

    def _check_tensors(self, engine: Any) -> None:
        """Hold an engine against its description: names, directions, types, caches."""
        module, described = self._api.module, {**self.inputs, **self.outputs}
        for name in _tensors(engine):
            is_input = engine.get_tensor_mode(name) == module.TensorIOMode.INPUT
            if name not in (self.inputs if is_input else self.outputs):
                kind = "input" if is_input else "output"
                raise EngineError(f"the engine has an {kind} {name} that the manifest has not")
            found = self._api.element_type(engine.get_tensor_dtype(name))
            if found != described[name].dtype:
                raise EngineError(
                    f"the engine's {name} is {found}, the manifest says {described[name].dtype}"
                )
            if engine.get_tensor_location(name) != module.TensorLocation.DEVICE:
                raise EngineError(f"the engine wants {name} on the host; it cannot be captured")
        missing = [name for name in self.outputs if name not in set(_tensors(engine))]
        if missing:
            raise EngineError(f"the engine has no output {', '.join(missing)}")
        for output, source in self._aliases.items():
            found = engine.get_aliased_input_tensor(output)
            if found != source:
                raise EngineError(
                    f"the engine writes {output} in place of {found or 'nothing'}, the manifest "
                    f"says {source}: its cache would not grow"
                )

    def _memory(self, engine: Any, index: int) -> int:
        if self._api.has("profile_memory"):
            return int(engine.get_device_memory_size_for_profile_v2(index))
        return int(engine.device_memory_size_v2)

    def _require(self, is_done: bool, what: str) -> None:
        if not is_done:
            api = self._api
            raise EngineError(f"{api.name} {api.version} {what}: {api.reasons()}")


def open_engine(
    api: TensorRt,
    device: CudaDevice,
    scratch: Scratch,
    spec: ModelSpec | SamplingSpec,
    profiles: Mapping[str, Profile],
) -> TrtEngine:
    """Open a compiled graph.

    Args:
        api: the library it was compiled by.
        device: where it runs.
        scratch: shared by all engines of the device.
        spec: its description, dimensions pinned.
        profiles: where each role is; a sampling graph has the role `run`.

    Raises:
        EngineError: a file is cut or not an engine, is of another version or for another GPU, or
            does not have the tensors of its description.
    """
    missing = [role for role in role_symbols(spec) if role not in profiles]
    if missing:
        raise EngineError(f"nothing is compiled for the role {', '.join(missing)}")
    files = sorted({profile.file for profile in profiles.values()})
    engines = {file: deserialized(api, file) for file in files}
    for profile in profiles.values():
        count = int(engines[profile.file].num_optimization_profiles)
        if profile.index >= max(1, count):  # a graph of fixed shapes may have none
            raise EngineError(
                f"{profile.file.name} has {count} profiles, the manifest names number "
                f"{profile.index}"
            )
    opened = {role: (engines[place.file], place.index) for role, place in profiles.items()}
    return TrtEngine(api, device, scratch, spec, opened)


def deserialized(api: TensorRt, file: Path) -> Any:
    """An engine out of its file.

    Raises:
        EngineError: the library refuses it; says why, and how to get one that it takes.
    """
    api.log.take()
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
            engine = api.runtime().deserialize_cuda_engine(m)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise EngineError(f"{file} cannot be read: {error}") from error
    except Exception as error:
        raise EngineError(_refused(api, file, str(error))) from error
    if engine is None:
        raise EngineError(_refused(api, file, api.reasons()))
    return engine


def _refused(api: TensorRt, file: Path, reasons: str) -> str:
    return (
        f"{api.name} {api.version} cannot open {file.parent.name}/{file.name}: {reasons}; an "
        "engine runs with the library version and on the kind of GPU it was built for. Build the "
        f"bundle anew on this machine: spec-export build EXPORTED -o BUNDLE --backend {api.name}"
    )


def _tensors(engine: Any) -> list[str]:
    return [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]

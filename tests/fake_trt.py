"""A TensorRT without a GPU, for tests of what calls it: engines run on the fake CUDA runtime.

Only what the package calls at run time. An engine is described by its tensors; running it does what
a test gives it to do, late, with the memory at the addresses that were set.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from spec_export.engines.trt_api import FEATURES, TensorRt
from tests.fake_cudart import FakeCudart


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT64 = 2
    BOOL = 3


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64, "BOOL": np.bool_}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Tensor:
    """One input or output; `shapes` by profile."""

    name: str
    dtype: DataType
    mode: TensorIOMode
    shapes: tuple[tuple[int, ...], ...]
    alias: str | None = None
    location: TensorLocation = TensorLocation.DEVICE


@dataclass
class FakeContext:
    """An execution context; `log` has the calls made to it, `fail` what is refused."""

    engine: FakeEngine
    profile: int = -1
    memory: tuple[int, int] = (0, 0)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return "profile" not in self.engine.fail

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % 256 == 0
        assert size >= self.engine.memory[self.profile], "too little scratch memory"
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return tuple(shape) == self.engine.by_name[name].shapes[self.profile]

    def infer_shapes(self) -> list[str]:
        inputs = [t.name for t in self.engine.tensors if t.mode is TensorIOMode.INPUT]
        return [name for name in inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.engine.by_name[name].shapes[self.profile]

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0, name
        self.addresses[name] = address
        return "address" not in self.engine.fail

    def execute_async_v3(self, stream: int) -> bool:
        self.log.append("execute_async_v3")
        if "execute" in self.engine.fail:
            self.engine.said.append("the kernel was refused")
            return False
        engine, cudart, profile = self.engine, self.engine.cudart, self.profile
        addresses, scratch = dict(self.addresses), self.memory[0]

        def run() -> None:
            arrays = {t.name: _array(cudart, t, profile, addresses[t.name]) for t in engine.tensors}
            engine.compute(arrays)

        touched = [(addresses[t.name], _bytes(t, profile)) for t in engine.tensors]
        cudart.launch(stream, run, *touched, (scratch, engine.memory[profile]))
        return True


@dataclass
class FakeEngine:
    """A deserialized engine."""

    cudart: FakeCudart
    tensors: tuple[Tensor, ...]
    memory: tuple[int, ...]
    compute: Callable[[Arrays], None]
    fail: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    made: list[FakeContext] = field(default_factory=list)
    caches: list[object] = field(default_factory=list)

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.memory)

    @property
    def device_memory_size_v2(self) -> int:
        return max(self.memory)

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return self.memory[index]

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index].name

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self.by_name[name].mode

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.by_name[name].dtype

    def get_tensor_location(self, name: str) -> TensorLocation:
        return self.by_name[name].location

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.by_name[name].alias

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(allocation=None)
        config.create_runtime_cache = lambda: object()
        config.set_runtime_cache = lambda cache: self.caches.append(cache)
        config.set_execution_context_allocation_strategy = lambda s: setattr(
            config, "allocation", s
        )
        return config

    def create_execution_context(self, how: Any) -> FakeContext | None:
        chosen = how if isinstance(how, str) else how.allocation
        assert chosen == "user managed", "scratch memory is ours"
        if "context" in self.fail:
            return None
        if "binding" in self.fail:
            raise RuntimeError("the binding gave up")
        self.made.append(FakeContext(self))
        return self.made[-1]


def engine_file(name: str) -> bytes:
    """A file that the fake runtime opens as the engine of that name."""
    return json.dumps({"engine": name}).encode()


def fake_library(
    engines: Mapping[str, FakeEngine],
    features: frozenset[str] = frozenset(FEATURES),
    name: str = "tensorrt-rtx",
) -> TensorRt:
    """The library, with the given engines to be opened."""
    lines: list[str] = []

    def deserialize(content: Any) -> FakeEngine | None:
        try:
            found = json.loads(bytes(content))["engine"]
        except ValueError:
            lines.append("Serialization assertion header.magicTag failed")
            return None
        if found == "other version":
            lines.append("Version tag does not match: 239 expected, 241 found")
            return None
        engines[found].said = lines
        return engines[found]

    module = SimpleNamespace(
        DataType=DataType,
        TensorIOMode=TensorIOMode,
        TensorLocation=TensorLocation,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
        CudaGraphStrategy=SimpleNamespace(DISABLED="disabled"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
        ILogger=_Logger,
        Runtime=lambda _: SimpleNamespace(deserialize_cuda_engine=deserialize),
    )
    log = SimpleNamespace(receiver=None)

    def take() -> list[str]:
        taken = list(lines)
        lines.clear()
        return taken

    log.take = take
    return replace(_PLAIN, name=name, module=module, features=features, log=log)


class _Logger:
    pass


_PLAIN = TensorRt("tensorrt-rtx", None, "1.7.1", frozenset(), SimpleNamespace())  # type: ignore[arg-type]


def _bytes(tensor: Tensor, profile: int) -> int:
    return int(np.prod(tensor.shapes[profile])) * np.dtype(NUMPY[tensor.dtype.name]).itemsize


def _array(cudart: FakeCudart, tensor: Tensor, profile: int, address: int) -> np.ndarray:
    """The memory at an address, which may lie within an allocation."""
    start, block = next(
        (a, block) for a, block in cudart.memory.items() if a <= address < a + block.size
    )
    inside = block[address - start :][: _bytes(tensor, profile)]
    return inside.view(NUMPY[tensor.dtype.name]).reshape(tensor.shapes[profile])

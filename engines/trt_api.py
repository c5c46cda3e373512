"""`tensorrt` and `tensorrt_rtx` as one library: what is there, and what differs.

The two have one Python API but for a few calls. `FEATURES` is the whole list of those calls, and
each is looked for in the installed library: nothing here is concluded from a version number.
Numbers of TensorRT's enumerations differ between versions, so they are only ever used by name.
"""

from __future__ import annotations

import functools
import importlib
import threading
from dataclasses import dataclass
from typing import Any

from spec_export.engines.errors import EngineError
from spec_export.engines.extras import require
from spec_export.engines.graphs import ElementType

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_KEPT_LINES = 200


@dataclass(frozen=True)
class Feature:
    """A call that one of the libraries has and another, or an older one, has not.

    Attributes:
        member: `class.attribute` of the module.
        found_in: the libraries that have it.
        use: what this package does with it, and without it.
        source: where `found_in` is from.
    """

    member: str
    found_in: str
    use: str
    source: str


_RTX = "tensorrt_rtx 1.7.1.116, inspected"
_DOC = "NVIDIA's documentation of TensorRT 10.15 and 11.x"
FEATURES: dict[str, Feature] = {
    "attention": Feature(
        "INetworkDefinition.add_attention",
        "tensorrt 10.14 and later, tensorrt-rtx",
        "needed: the fused attention of every layer",
        f"{_RTX}; {_DOC}",
    ),
    "cache_update": Feature(
        "INetworkDefinition.add_kv_cache_update",
        "tensorrt 10.15 and later, tensorrt-rtx",
        "needed: writes a cache in place",
        f"{_RTX} (its text names 10.15)",
    ),
    "aliases": Feature(
        "ICudaEngine.get_aliased_input_tensor",
        "whatever has cache_update",
        "needed: says which output is which cache",
        f"{_RTX}; {_DOC}",
    ),
    "typed_flag": Feature(
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "tensorrt 10.x, where it must be set; kept without effect in 11.x and tensorrt-rtx",
        "set where it exists",
        f"{_RTX} (deprecated in 11.0, always on)",
    ),
    "compute_capability": Feature(
        "IBuilderConfig.set_compute_capability",
        "tensorrt-rtx",
        "builds for other GPUs than the one at hand, or for none; without it: on the device only",
        f"{_RTX}; {_DOC}",
    ),
    "runtime_cache": Feature(
        "IRuntimeConfig.create_runtime_cache",
        "tensorrt-rtx",
        "kernels are compiled where the engine runs, so the build times none: no timing cache, "
        "workspace or optimization level to choose",
        f"{_RTX} (timing caches: 'no-ops in TensorRT-RTX')",
    ),
    "runtime_config": Feature(
        "ICudaEngine.create_runtime_config",
        "tensorrt-rtx; tensorrt from some 10.x on",
        "execution contexts are made from it where it exists",
        _RTX,
    ),
    "graph_strategy": Feature(
        "IRuntimeConfig.cuda_graph_strategy",
        "tensorrt-rtx",
        "switched off where it exists: rounds are captured by the runtime",
        _RTX,
    ),
    "kernel_specialization": Feature(
        "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
        "tensorrt-rtx",
        "eager where it exists: no kernel may change after a capture",
        _RTX,
    ),
    "engine_validity": Feature(
        "Runtime.get_engine_validity",
        "tensorrt-rtx",
        "says why an engine cannot be opened; without it the log of the attempt does",
        _RTX,
    ),
    "user_allocation": Feature(
        "BuilderFlag.REQUIRE_USER_ALLOCATION",
        "tensorrt-rtx; tensorrt from some version on",
        "set where it exists: nothing is allocated inside a capture",
        _RTX,
    ),
    "profile_memory": Feature(
        "ICudaEngine.get_device_memory_size_for_profile_v2",
        "tensorrt 10.x and later, tensorrt-rtx; the form without _v2 is gone in 11",
        "device memory of one profile",
        f"{_RTX}; {_DOC}",
    ),
}
NEEDED = ("attention", "cache_update", "aliases")
_ELEMENT_TYPES: dict[str, ElementType] = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "UINT8": "uint8",
    "BOOL": "bool",
}


class Log:
    """What the library said, newest last. One for each library: it keeps the first it is given."""

    def __init__(self, module: Any) -> None:
        log = self

        class Receiver(module.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity.name in ("INTERNAL_ERROR", "ERROR"):
                    log.add(str(message))

        self._lock, self._lines = threading.Lock(), list[str]()
        self.receiver = Receiver()

    def add(self, line: str) -> None:
        """Keep a line; the oldest of very many go."""
        with self._lock:
            self._lines = [*self._lines[-_KEPT_LINES:], line]

    def take(self) -> list[str]:
        """The errors since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines


@dataclass(frozen=True)
class TensorRt:
    """An imported library.

    Attributes:
        name: as in `--backend` and the manifest: `tensorrt` or `tensorrt-rtx`.
        module: what was imported.
        version: of the library.
        features: names in `FEATURES` that it has.
        log: what it reports.
    """

    name: str
    module: Any
    version: str
    features: frozenset[str]
    log: Log

    def has(self, feature: str) -> bool:
        """Whether the installed library has a feature of the table."""
        assert feature in FEATURES, feature
        return feature in self.features

    def builder(self) -> Any:
        """A builder; needs no GPU on tensorrt-rtx."""
        return self._made(self.module.Builder(self.log.receiver), "a builder")

    def network(self, builder: Any) -> Any:
        """An empty strongly typed network: the graph says every type."""
        flags = 0
        if self.has("typed_flag"):
            flags |= 1 << int(self.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        return self._made(builder.create_network(flags), "a network")

    def parser(self, network: Any) -> Any:
        """An ONNX parser that fills `network`."""
        return self._made(self.module.OnnxParser(network, self.log.receiver), "a parser")

    def runtime(self) -> Any:
        """What opens engines; needs no GPU until one is opened."""
        return self._made(self.module.Runtime(self.log.receiver), "a runtime")

    def compute_capabilities(self) -> dict[str, Any]:
        """What can be built for ahead of time, such as `8.6`, with the library's value for it."""
        if not self.has("compute_capability"):
            return {}
        names = [name for name in dir(self.module.ComputeCapability) if name[:2] == "SM"]
        found = {f"{name[2:-1]}.{name[-1]}": name for name in names if name[2:].isdigit()}
        ordered = sorted(found, key=lambda text: tuple(map(int, text.split("."))))
        return {key: getattr(self.module.ComputeCapability, found[key]) for key in ordered}

    def element_type(self, data_type: Any) -> str:
        """Our name of a `DataType`; the library's own in lower case where we have none."""
        return _ELEMENT_TYPES.get(data_type.name, str(data_type.name).lower())

    def _made(self, thing: Any, what: str) -> Any:
        if thing is None:
            raise EngineError(f"{self.name} {self.version} made not {what}: {self.reasons()}")
        return thing

    def reasons(self) -> str:
        """The errors since they were last asked for, in one line."""
        lines = dict.fromkeys(" ".join(line.split()) for line in self.log.take())
        return "; ".join(lines) or "it gave no reason"


@functools.cache
def load(name: str) -> TensorRt:
    """Import a library and look at what it can do.

    Args:
        name: `tensorrt` or `tensorrt-rtx`.

    Raises:
        MissingExtra: it is not installed.
        EngineError: it cannot be imported, or is too old.
    """
    require(name, MODULES[name])
    try:
        module = importlib.import_module(MODULES[name])
    except Exception as error:  # of the loader, for a shared library that is not there
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EngineError(
            f"{name} is installed and cannot be imported: {cause}; its shared libraries come with "
            "JetPack, with the CUDA packages of the system, or with `pip install "
            f"'spec-export[{name}]'`"
        ) from error
    return describe(name, module)


def describe(name: str, module: Any) -> TensorRt:
    """Probe an imported library.

    Raises:
        EngineError: it has no attention or no cache update.
    """
    version = str(getattr(module, "__version__", "of unknown version"))
    features = frozenset(key for key, value in FEATURES.items() if _has(module, value.member))
    missing = [FEATURES[key].member for key in NEEDED if key not in features]
    if missing:
        raise EngineError(
            f"{name} {version} is too old: it has no {', '.join(missing)}; tensorrt 10.15 or "
            "later is needed, or tensorrt-rtx 1.7 or later. JetPack 6.2 brings 10.3 and JetPack "
            "7.1 brings 10.13: install a newer JetPack, or run with --backend onnxruntime"
        )
    return TensorRt(name, module, version, features, Log(module))


def _has(module: Any, member: str) -> bool:
    owner, attribute = member.split(".")
    return hasattr(getattr(module, owner, None), attribute)

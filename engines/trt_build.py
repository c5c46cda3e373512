"""Compile graphs with TensorRT: options, profiles, and what the parser made of a graph.

A model becomes one engine with a pinned optimization profile for each shape that its roles have.
An engine for each role would hold the weights once for each (docs/tensorrt.md has the numbers).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.engines.atomic import storage_error, write_whole
from spec_export.engines.errors import BuildError
from spec_export.engines.trt_api import TensorRt
from spec_export.engines.trt_quiet import quiet_stderr

FUSED = ("KV_CACHE_UPDATE", "ATTENTION_INPUT", "ATTENTION_OUTPUT")
_NO_ARITHMETIC = ("HW-specific datatypes", "FP32 GEMM is not supported")
_NO_KERNEL = "not supported by a dedicated kernel"


@dataclass(frozen=True)
class TrtOptions:
    """What is asked of the library.

    Attributes:
        compute_capabilities: GPUs to build for ahead of time, such as `8.9`; empty: all that the
            library and the graph have kernels for.
        workspace_bytes: device memory that a kernel may work in; None: all there is.
        timing_cache: a file with times of earlier builds; read if it is there, then written.
        optimization_level: 0 to 5; None: the library's own.
        single_row: compile steps for one row. Passes of one row want the layers' weights in another
            order, so an engine that has any holds them twice.
    """

    compute_capabilities: tuple[str, ...] = ()
    workspace_bytes: int | None = None
    timing_cache: Path | None = None
    optimization_level: int | None = None
    single_row: bool = True


@dataclass(frozen=True)
class Network:
    """A parsed graph.

    Attributes:
        layers: how many layers of each type it has, by TensorRT's name.
        inputs: `type[dims]` by name; a dimension that profiles pin is -1.
        outputs: likewise.
        aliases: the input that an output of a cache update is written into, by output.
        engine_bytes: of the engine that was written.
    """

    layers: Counter[str]
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]
    engine_bytes: int


class TimingCache:
    """Times of kernels, shared by all engines of a build and, in a file, by later ones.

    Without effect on a library that times nothing.
    """

    def __init__(self, api: TensorRt, file: Path | None = None) -> None:
        self._is_used, self._file, self._content = not api.has("runtime_cache"), file, b""
        if file is not None and file.exists():
            try:
                self._content = file.read_bytes()
            except OSError as error:
                raise storage_error(error, file) from error

    @property
    def sha256(self) -> str | None:
        """Of the times; None where there are none."""
        return hashlib.sha256(self._content).hexdigest() if self._content else None

    def attach(self, config: Any) -> None:
        """Let a build start from them.

        Raises:
            BuildError: they are of another library or GPU.
        """
        if not self._is_used:
            return
        cache = config.create_timing_cache(self._content)
        if cache is None or not config.set_timing_cache(cache, False):
            raise BuildError(
                f"{self._file or 'the timing cache'} is not of this library and GPU; remove it, "
                "or name another --timing-cache"
            )

    def keep(self, config: Any) -> None:
        """Take over what a build added."""
        if self._is_used:
            self._content = bytes(memoryview(config.get_timing_cache().serialize()))

    def save(self) -> None:
        """Write the file, if there is one to write.

        Raises:
            StorageError: it cannot be written.
        """
        if self._file is not None and self._content:
            write_whole(self._file, self._content)


def check_options(api: TensorRt, options: TrtOptions) -> None:
    """Refuse what the library does not know, by the name of the option.

    Raises:
        BuildError: naming the option and what is possible.
    """
    targets = list(api.compute_capabilities())
    if options.compute_capabilities and not targets:
        raise BuildError(
            f"--compute-capability is for --backend tensorrt-rtx: {api.name} builds for the GPU "
            "it runs on. Copy the exported directory to the device and build there"
        )
    unknown = [name for name in options.compute_capabilities if name not in targets]
    if unknown:
        raise BuildError(
            f"--compute-capability {unknown[0]}: {api.name} {api.version} builds for "
            f"{', '.join(targets)}. For a Jetson (8.7, 11.0) or a datacenter GPU (9.0, 10.0) copy "
            "the exported directory to the device and build there with --backend tensorrt"
        )
    if api.has("runtime_cache"):
        chosen = {
            "--workspace": options.workspace_bytes,
            "--timing-cache": options.timing_cache,
            "--builder-optimization-level": options.optimization_level,
        }
        for name, value in chosen.items():
            if value is not None:
                raise BuildError(
                    f"{name} is for --backend tensorrt: {api.name} times no kernels, it compiles "
                    "them where the engine runs. Leave it out"
                )
    level = options.optimization_level
    if level is not None and not 0 <= level <= 5:
        raise BuildError(f"--builder-optimization-level {level} is outside 0 to 5")


def missing_kernel(
    api: TensorRt, model: bytes, options: TrtOptions, capability: str | None
) -> str | None:
    """Why a small graph does not compile for a GPU; None if it does."""
    with quiet_stderr():
        builder = api.builder()
        network, parser = _parsed(api, builder, model, None)
        config = _config(api, builder, options, () if capability is None else (capability,))
        engine = builder.build_serialized_network(network, config)
        reasons = api.reasons()
        del parser
    if engine is not None:
        return None
    if any(words in reasons for words in _NO_ARITHMETIC):
        return "the GPU has no arithmetic of this type"
    return "there is no fused kernel" if _NO_KERNEL in reasons else reasons


def compile_engine(
    api: TensorRt,
    model: bytes,
    source: Path | None,
    profiles: Sequence[Mapping[str, tuple[int, ...]]],
    options: TrtOptions,
    capabilities: tuple[str, ...],
    times: TimingCache,
    out: Path,
) -> Network:
    """Compile a graph and write the engine.

    Args:
        api: the library.
        model: serialized graph.
        source: where its weights lie beside; None if it holds them.
        profiles: shapes of the inputs, one mapping for each profile; none where all are pinned.
        options: what is asked of the library.
        capabilities: GPUs to build for; empty on a library that builds for the one at hand.
        times: what earlier builds timed; added to.
        out: file to write.

    Raises:
        BuildError: the parser or the builder refused the graph.
        StorageError: the file cannot be written.
    """
    builder = api.builder()
    network, parser = _parsed(api, builder, model, source)
    config = _config(api, builder, options, capabilities)
    _add_profiles(api, builder, config, profiles)
    times.attach(config)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError(f"{api.name} {api.version} cannot compile {out.name}: {api.reasons()}")
    times.keep(config)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(memoryview(engine))
    except OSError as error:
        raise storage_error(error, out) from error
    del parser
    return _described(api, network, engine.nbytes)


def _parsed(api: TensorRt, builder: Any, model: bytes, source: Path | None) -> tuple[Any, Any]:
    """A network and the parser that owns its weights."""
    api.log.take()
    network = api.network(builder)
    parser = api.parser(network)
    if not parser.parse(model, path=None if source is None else str(source)):
        found = [parser.get_error(i) for i in range(parser.num_errors)]
        words = [
            f"{error.node_name()} ({error.node_operator()}): {error.desc()}" for error in found
        ]
        reasons = "; ".join(words) or api.reasons()
        raise BuildError(f"{api.name} {api.version} cannot read the graph: {reasons}")
    return network, parser


def _config(api: TensorRt, builder: Any, options: TrtOptions, capabilities: tuple[str, ...]) -> Any:
    module, config = api.module, builder.create_builder_config()
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # `check` reads layer names
    if capabilities:
        targets = api.compute_capabilities()
        config.num_compute_capabilities = len(capabilities)
        for index, name in enumerate(capabilities):
            if not config.set_compute_capability(targets[name], index):
                raise BuildError(f"compute capability {name} was refused: {api.reasons()}")
    if api.has("user_allocation"):
        config.set_flag(module.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    return config


def _add_profiles(
    api: TensorRt, builder: Any, config: Any, profiles: Sequence[Mapping[str, tuple[int, ...]]]
) -> None:
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, shape in shapes.items():
            profile.set_shape(name, shape, shape, shape)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"{api.name} {api.version} refused a profile: {api.reasons()}")


def _described(api: TensorRt, network: Any, engine_bytes: int) -> Network:
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    updates = [layer for layer in layers if layer.type.name == "KV_CACHE_UPDATE"]

    def tensors(count: int, get: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
        found = [get(i) for i in range(count)]
        return {t.name: (api.element_type(t.dtype), tuple(t.shape)) for t in found}

    return Network(
        layers=Counter(layer.type.name for layer in layers),
        inputs=tensors(network.num_inputs, network.get_input),
        outputs=tensors(network.num_outputs, network.get_output),
        aliases={layer.get_output(0).name: layer.get_input(0).name for layer in updates},
        engine_bytes=engine_bytes,
    )

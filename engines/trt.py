"""TensorRT and TensorRT-RTX as engine libraries.

TensorRT-RTX compiles on any x86-64 machine, ahead of time: kernels are finished where the engine
runs. TensorRT compiles for the GPU it finds. Both want every dimension of a pass pinned.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.engines import trt_api
from spec_export.engines.backend import Compiled
from spec_export.engines.errors import BuildError, EngineError, MissingExtra
from spec_export.engines.extras import require
from spec_export.engines.graphs import ModelSpec, SamplingSpec
from spec_export.engines.manifest import CompilerSpec, DeviceSpec, EngineSpec, GpuSpec
from spec_export.engines.processor import processor_name
from spec_export.engines.trt_build import (
    FUSED,
    Network,
    TimingCache,
    TrtOptions,
    check_options,
    compile_engine,
)
from spec_export.engines.trt_engine import Profile, Scratch, TrtEngine, deserialized, open_engine
from spec_export.engines.trt_profiles import profile_shapes, role_profiles

if TYPE_CHECKING:
    import onnx

    from spec_export.engines.cuda import CudaDevice

SUFFIX = ".engine"
_THREADS = 1  # of the host: it only enqueues


class TrtBackend:
    """A TensorRT library.

    Args:
        name: `tensorrt` or `tensorrt-rtx`.
        options: what to ask of it when it builds.

    Raises:
        MissingExtra: the library is not installed.
        EngineError: it cannot be imported, or is too old.
        BuildError: an option is not one of this library.
    """

    suffix = SUFFIX
    threads = _THREADS
    # A list of the largest is no quick way here, and TensorRT's ends at 3840.
    left_out = frozenset({"filter_top", "filter_nucleus"})

    def __init__(self, name: str, options: TrtOptions | None = None) -> None:
        self.name, self.options = name, options or TrtOptions()
        self.api = trt_api.load(name)
        check_options(self.api, self.options)
        self._times = TimingCache(self.api, self.options.timing_cache)
        self._capabilities: tuple[str, ...] | None = None  # of all models; None: none is compiled
        self._bundle: Path | None = None

    # --- where it runs ----------------------------------------------------------------------------

    @cached_property
    def device(self) -> CudaDevice:
        """The GPU.

        Raises:
            MissingExtra: cuda-python is not installed.
            EngineError: there is no GPU or no driver.
        """
        from spec_export.engines.cuda import CudaDevice

        return CudaDevice()

    @cached_property
    def _scratch(self) -> Scratch:
        return Scratch(self.device)

    @cached_property
    def _no_gpu(self) -> str | None:
        """Why there is no GPU to use; None if there is."""
        try:
            self.device  # noqa: B018
        except (EngineError, MissingExtra) as error:
            return str(error)
        return None

    @property
    def cannot_run(self) -> str | None:
        """Why engines cannot run here, those that were compiled if any were; None if they can."""
        if self._no_gpu is not None:
            return self._no_gpu
        found, served = self.device.gpu.compute_capability, self._capabilities
        if served is None:
            served = self.options.compute_capabilities or tuple(self.api.compute_capabilities())
        if served and found not in served:
            return (
                f"the GPU here has compute capability {found}, and what is built is for "
                f"{', '.join(served)}"
            )
        return None

    @property
    def can_run(self) -> bool:
        """Whether this machine runs what is built here."""
        return self.cannot_run is None

    def describe(self) -> DeviceSpec:
        """The library and, where there is one, the GPU."""
        gpu = None
        if self.can_run:
            found = self.device.gpu
            gpu = GpuSpec(found.name, found.compute_capability, found.driver, found.cuda)
        return DeviceSpec(
            self.name, self.api.version, processor_name(), platform.machine(), self.threads, gpu
        )

    # --- building ---------------------------------------------------------------------------------

    def compile_model(
        self, graph: Path, spec: ModelSpec, capacity: int, out: Path, link: bool
    ) -> Compiled:
        """Compile a model for all its roles into one engine; weights are a part of it.

        It is compiled for those GPUs that the bundle's earlier models are for as well.
        """
        require("build", "onnx")
        from spec_export.engines import trt_plan, trt_prepare

        model = trt_prepare.read_pinned(graph, {"C": capacity})
        _check_rounding(model)
        among = self._capabilities if self._bundle == out.parent else None
        plan = trt_plan.plan_roles(self.api, self.options, model, spec, capacity, among)
        spec = replace(spec, roles=plan.roles)
        profiles = profile_shapes(spec, capacity)
        self._capabilities, self._bundle = plan.capabilities, out.parent
        file = out / f"{graph.stem}{SUFFIX}"
        network = self._compile(model.SerializeToString(), graph, profiles, file)
        _check_fused(network, spec, capacity)
        self._times.save()
        weights = trt_prepare.weight_format(model)
        engine = EngineSpec(
            spec.dtype if weights is None else f"{spec.dtype}, weights {weights}",
            weights,
            role_profiles(spec),
            network.layers["ATTENTION_INPUT"],
            network.layers["KV_CACHE_UPDATE"],
        )
        fused = (
            f"ATTENTION: {engine.attentions} of {spec.layers} layers fused",
            f"KV_CACHE_UPDATE: {engine.cache_updates} of {2 * spec.layers} caches in place",
        )
        return Compiled(file.name, (*fused, *plan.notes), plan.roles, engine)

    def compile_sampling(self, graph: Path, pins: Mapping[str, int], out: Path) -> None:
        """Compile a sampling graph, every dimension pinned."""
        require("build", "onnx")
        from spec_export.engines import trt_prepare

        model = trt_prepare.read_pinned(graph, pins)
        trt_prepare.check_sampling(model, graph.stem)
        self._compile(model.SerializeToString(), graph, [], out)

    def _compile(
        self, model: bytes, source: Path, profiles: list[dict[str, tuple[int, ...]]], out: Path
    ) -> Network:
        gpus = self._capabilities or ()
        return compile_engine(
            self.api, model, source, profiles, self.options, gpus, self._times, out
        )

    def compiler(self) -> CompilerSpec:
        """What was asked of the library, as the manifest records it; saves the kernel times.

        Asked after everything was compiled, so what it names is what the file then holds.
        """
        self._times.save()
        options = {
            "workspace": self.options.workspace_bytes,
            "builder-optimization-level": self.options.optimization_level,
            "no-single-row": None if self.options.single_row else "yes",
        }
        given = {name: str(value) for name, value in options.items() if value is not None}
        return CompilerSpec(self._capabilities or (), given, self._times.sha256)

    # --- running ----------------------------------------------------------------------------------

    def open_model(self, file: Path, spec: ModelSpec) -> TrtEngine:
        """Open a compiled model; many sessions share it."""
        profiles = {role: Profile(file, index) for role, index in role_profiles(spec).items()}
        return self._open(spec, profiles)

    def open_sampling(self, file: Path, spec: SamplingSpec) -> TrtEngine:
        """Open a compiled sampling graph; its one role is called `run`."""
        return self._open(spec, {"run": Profile(file)})

    def unfused(self, file: Path) -> tuple[str, ...]:
        """Layers of a compiled model whose attention is spelled out."""
        from spec_export.engines.trt_inspect import unfused_attention

        return unfused_attention(self.api, deserialized(self.api, file))

    def _open(self, spec: ModelSpec | SamplingSpec, profiles: Mapping[str, Profile]) -> TrtEngine:
        if self.cannot_run is not None:
            raise EngineError(
                f"this bundle cannot run here: {self.cannot_run}. It was built for {self.name}; "
                "copy it to a machine with such a GPU, or build one for this machine: "
                "spec-export build EXPORTED --backend onnxruntime -o BUNDLE"
            )
        return open_engine(self.api, self.device, self._scratch, spec, profiles)


def _check_rounding(model: onnx.ModelProto) -> None:
    """Refuse a graph whose rows depend on the rest of their pass."""
    require("build", "onnx_ir")
    import onnx_ir as ir

    from spec_export.engines.activations import check_rounding

    check_rounding(ir.from_proto(model).graph)


def _check_fused(network: Network, spec: ModelSpec, capacity: int) -> None:
    """Hold what the parser made of a graph against its description.

    The importer leaves attention undecomposable, so the builder has either fused it or failed; what
    it cannot see is a graph whose attention is spelled out, or whose cache is copied.

    Raises:
        BuildError: naming the operator and the remedy.
    """
    wanted = dict.fromkeys(FUSED, spec.layers) | {"KV_CACHE_UPDATE": 2 * spec.layers}
    for name, count in wanted.items():
        if network.layers[name] != count:
            raise BuildError(
                f"the graph has {network.layers[name]} {name} for {spec.layers} layers, expected "
                f"were {count}: some attention or cache write is not the operator that TensorRT "
                "fuses (Attention, TensorScatter); export the model again with this version"
            )
    aliases = {state.output: state.input for state in spec.states}
    for output, source in aliases.items():
        if network.aliases.get(output) != source:
            raise BuildError(
                f"{output} is written into {network.aliases.get(output) or 'memory of its own'}, "
                f"expected was {source}; export the model again with this version"
            )
    pins: dict[str, int] = {"C": capacity}
    read = network.inputs | network.outputs
    for tensor in (*spec.inputs, *spec.outputs):
        dims = tuple(pins.get(dim, -1) if isinstance(dim, str) else dim for dim in tensor.dims)
        if read.get(tensor.name) != (tensor.dtype, dims):
            raise BuildError(
                f"TensorRT reads {tensor.name} as {read.get(tensor.name)}, described is "
                f"{(tensor.dtype, dims)}; export the model again with this version"
            )

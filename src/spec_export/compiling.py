"""Which backend builds, with what precision and options; each option belongs to some backends."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from spec_export.console import size
from spec_export.engines.errors import BuildError, RequestError
from spec_export.quantizing import Quantizing

if TYPE_CHECKING:
    from spec_export.engines.backend import Backend
    from spec_export.engines.build import BuildOptions
    from spec_export.engines.graphs import ElementType, GraphsSpec, WeightFormat

TENSORRT = ("tensorrt", "tensorrt-rtx")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def asked_precision(
    dtype: ElementType | None, weights: WeightFormat | Literal["float16", "bfloat16"] | None
) -> tuple[ElementType | None, WeightFormat | None]:
    """`--dtype` and `--weights`, where a type that quantizes nothing was given as either.

    Raises:
        RequestError: the two contradict each other.
    """
    if weights == "float16" or weights == "bfloat16":
        if dtype not in (None, weights):
            raise RequestError(
                f"--weights {weights} is the same as --dtype {weights}, and --dtype {dtype} was "
                "given; leave one of them out"
            )
        return weights, None
    return dtype, weights


_SERVED_BY = {
    "--compute-capability": "tensorrt-rtx",
    "--workspace": "tensorrt",
    "--timing-cache": "tensorrt",
    "--builder-optimization-level": "tensorrt",
}


@dataclass(frozen=True)
class Compiling:
    """What `build` was asked for beside shapes; None: not asked for.

    Attributes:
        backend: engine library.
        threads: of the host, to compute with.
        dtype: of activations, caches and weights.
        quantizing: what is made smaller.
        compute_capability: GPUs to build for, such as `8.6,8.9`.
        workspace: memory of a kernel, such as `2GiB`.
        timing_cache: file with times of kernels.
        optimization_level: of the library's builder.
        single_row: compile steps for one row.
    """

    backend: str = "onnxruntime"
    threads: int | None = None
    dtype: ElementType | None = None
    quantizing: Quantizing = field(default_factory=Quantizing)
    compute_capability: str | None = None
    workspace: str | None = None
    timing_cache: Path | None = None
    optimization_level: int | None = None
    single_row: bool = True

    @property
    def exported_dtype(self) -> ElementType:
        """What to export in when nothing is exported yet: what is retyped later is float32."""
        is_retyped = self.backend in TENSORRT or self.dtype == "bfloat16"
        return "float32" if is_retyped or self.dtype is None else self.dtype

    def computed_dtype(self, graphs: GraphsSpec) -> ElementType | None:
        """What to compute with; None: as exported. TensorRT has fused attention in half only."""
        kinds = {spec.dtype for spec in graphs.models.values()}
        if self.dtype is None and self.backend in TENSORRT and "float32" in kinds:
            return "float16"
        return None if kinds == {self.dtype} else self.dtype


def open_backend(chosen: Compiling) -> Backend:
    """The backend with its options.

    Raises:
        BuildError: an option is of another backend; names it.
        MissingExtra: the library is not installed.
        EngineError: it cannot be used here.
    """
    if chosen.backend in TENSORRT:
        return _tensorrt(chosen)
    _refuse_foreign(chosen)
    if chosen.backend == "onnxruntime" and chosen.dtype == "bfloat16":
        raise BuildError(
            "--dtype bfloat16: onnxruntime has no such kernels on a processor; take float32 or "
            "float16, or another --backend"
        )
    from spec_export.runtime.opened import make_backend

    return make_backend(chosen.backend, chosen.threads)


def _refuse_foreign(chosen: Compiling) -> None:
    given = {
        "--compute-capability": chosen.compute_capability,
        "--workspace": chosen.workspace,
        "--timing-cache": chosen.timing_cache,
        "--builder-optimization-level": chosen.optimization_level,
        "--no-single-row": None if chosen.single_row else True,
    }
    for name, value in given.items():
        if value is not None:
            raise BuildError(
                f"{name} is for --backend {_SERVED_BY.get(name, 'tensorrt or tensorrt-rtx')}; "
                f"{chosen.backend} has no such option. Leave it out, or name that --backend"
            )


def _tensorrt(chosen: Compiling) -> Backend:
    from spec_export.engines.trt import TrtBackend
    from spec_export.engines.trt_build import TrtOptions

    if chosen.threads is not None:
        raise BuildError(
            f"--threads is for --backend onnxruntime: {chosen.backend} computes on the GPU"
        )
    listed = (chosen.compute_capability or "").split(",")
    options = TrtOptions(
        compute_capabilities=tuple(dict.fromkeys(filter(None, (x.strip() for x in listed)))),
        workspace_bytes=None if chosen.workspace is None else parse_bytes(chosen.workspace),
        timing_cache=chosen.timing_cache,
        optimization_level=chosen.optimization_level,
        single_row=chosen.single_row,
    )
    return TrtBackend(chosen.backend, options)


def parse_bytes(text: str) -> int:
    """`2GiB`, `512MiB` or a number of bytes.

    Raises:
        RequestError: something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:iB)?", text.strip())
    if found is None:
        raise RequestError(f"--workspace {text}: a size, such as 2GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def check_device_memory(
    chosen: Compiling, backend: Backend, exported: Path, graphs: GraphsSpec, options: BuildOptions
) -> str | None:
    """Estimate the device memory of a bundle and refuse one that cannot fit; None on a processor.

    Raises:
        BuildError: it does not fit.
    """
    if chosen.backend not in TENSORRT:
        return None
    from spec_export.engines.build import pinned_models
    from spec_export.engines.trt_memory import check_memory, estimate

    models = pinned_models(graphs, options)
    needed = estimate(models, exported, single_row=chosen.single_row)
    free, for_build = _free_memory() if backend.can_run else (None, None)
    workspace = None if chosen.workspace is None else parse_bytes(chosen.workspace)
    check_memory(needed, workspace, free, for_build)
    return (
        f"device memory: about {size(needed.total)} (weights {size(needed.weights)}, one "
        f"session's caches {size(needed.caches)}, scratch {size(needed.scratch)}, kernels "
        f"{size(needed.code)})"
    )


def _free_memory() -> tuple[int, int | None]:
    """Free on the GPU and, where it shares memory with the processor, for the build."""
    from spec_export.engines.cuda_api import find_gpu, load_api
    from spec_export.engines.trt_memory import shared_memory

    api = load_api()
    free, _ = api.call("cudaMemGetInfo")
    if not find_gpu(api).is_integrated:
        return free, None
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        meminfo = ""
    return shared_memory(meminfo, free)

"""Does a bundle fit the machine it is opened on? Compiled engines run where they were built for.

Graphs that the library compiles as it opens (ONNX Runtime) fit everywhere. Engines of a compiler
are held to its version and to the kind of GPU, before the library is asked, whose own words for it
are many and differ between versions.
"""

from __future__ import annotations

from spec_export.engines.errors import BundleError
from spec_export.engines.manifest import CompilerSpec, DeviceSpec, GpuSpec

# Ahead of time for kinds of GPU, not for one: its kernels are finished where it opens.
_PORTABLE = frozenset({"tensorrt-rtx"})
_NO_GPU = "no GPU that it can use (`spec-export doctor` says why)"


def check_fits(built: DeviceSpec, compiler: CompilerSpec | None, found: DeviceSpec) -> None:
    """Refuse to open compiled engines on a machine they were not built for.

    Args:
        built: where the bundle was built, as its manifest says.
        compiler: what the compiler was told; None where the library compiles as it opens.
        found: the machine at hand.

    Raises:
        BundleError: says what was found, what is needed, and the command that rebuilds.
    """
    if compiler is None or not _differs(built, compiler, found):
        return
    raise BundleError(
        f"this bundle needs {_needs(built, compiler)}; found here: {_found(found)}. "
        f"{_remedy(built, found)}"
    )


def _differs(built: DeviceSpec, compiler: CompilerSpec, found: DeviceSpec) -> bool:
    if (built.version, built.machine) != (found.version, found.machine):
        return True
    if found.gpu is None:
        return True
    served = compiler.compute_capabilities or _capability(built.gpu)
    if found.gpu.compute_capability not in served:
        return True
    is_portable = built.backend in _PORTABLE or built.gpu is None
    return not is_portable and _name(built.gpu) != found.gpu.name


def _needs(built: DeviceSpec, compiler: CompilerSpec) -> str:
    library = f"{built.backend} {built.version} on {built.machine}"
    if built.gpu is not None and built.backend not in _PORTABLE:
        return f"{library} and the GPU {_described(built.gpu)}"
    served = compiler.compute_capabilities or _capability(built.gpu)
    return f"{library} and a GPU of compute capability {' or '.join(served)}"


def _found(found: DeviceSpec) -> str:
    library = f"{found.backend} {found.version} on {found.machine}"
    return f"{library}, {_NO_GPU if found.gpu is None else _described(found.gpu)}"


def _remedy(built: DeviceSpec, found: DeviceSpec) -> str:
    build = "spec-export build EXPORTED -o BUNDLE --backend"
    if found.gpu is None:
        return f"Copy it to such a machine, or build one for this one: {build} onnxruntime"
    return f"Build it anew on this machine: {build} {built.backend}"


def _described(gpu: GpuSpec) -> str:
    return f"{gpu.name} (compute capability {gpu.compute_capability})"


def _capability(gpu: GpuSpec | None) -> tuple[str, ...]:
    return () if gpu is None else (gpu.compute_capability,)


def _name(gpu: GpuSpec | None) -> str | None:
    return None if gpu is None else gpu.name

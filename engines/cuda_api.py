"""The CUDA runtime through cuda-python, with every status checked.

`cuda.bindings.runtime` gives each function as one that returns a status and values. Here a status
that is not success becomes one `EngineError` with the name of the call and CUDA's own text.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_export.engines.errors import EngineError, MissingExtra
from spec_export.engines.extras import require

# After these every later call fails too: the context of the process is lost.
_FATAL = frozenset(
    f"cudaError{name}"
    for name in (
        "Assert",
        "ECCUncorrectable",
        "HardwareStackError",
        "IllegalAddress",
        "IllegalInstruction",
        "InvalidAddressSpace",
        "InvalidPc",
        "LaunchFailure",
        "LaunchTimeout",
        "MisalignedAddress",
    )
)


_SEEN = "CUDA_VISIBLE_DEVICES and the permissions of /dev/nvidia* decide what it sees"


@dataclass(frozen=True)
class Gpu:
    """A device as CUDA describes it.

    Attributes:
        name: such as `NVIDIA H200`.
        compute_capability: such as `9.0`.
        driver: newest CUDA version the driver serves, such as `13.0`.
        cuda: version of the CUDA runtime in use.
        memory_bytes: of the device; on a board with shared memory, all of it.
        is_integrated: whether it shares its memory with the processor.
        bandwidth: of its memory in bytes per second by its clocks, or None where CUDA is silent.
    """

    name: str
    compute_capability: str
    driver: str
    cuda: str
    memory_bytes: int
    is_integrated: bool
    bandwidth: float | None


class CudaApi:
    """Checked calls.

    Args:
        runtime: the module `cuda.bindings.runtime`, or one with its functions.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self._success = runtime.cudaError_t.cudaSuccess

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; returns its value, a tuple of several, or None.

        Raises:
            EngineError: CUDA returned anything but success.
        """
        status, *values = getattr(self.runtime, name)(*arguments)
        if status != self._success:
            self.runtime.cudaGetLastError()  # or it is found again by the next one to ask
            raise EngineError(self._text(name, status))
        return values[0] if len(values) == 1 else tuple(values) or None

    def attempt(self, name: str, *arguments: Any) -> Any:
        """Like `call`; returns None where that would raise, for what may fail."""
        status, *values = getattr(self.runtime, name)(*arguments)
        if status != self._success:
            self.runtime.cudaGetLastError()
            return None
        return values[0] if len(values) == 1 else tuple(values) or None

    def _text(self, name: str, status: Any) -> str:
        code = _decoded(self.runtime.cudaGetErrorName(status))
        text = f"{name} failed with {code}: {_decoded(self.runtime.cudaGetErrorString(status))}"
        if code in _FATAL:
            text += "; nothing more can run on this GPU in this process, start it anew"
        return text


def load_api() -> CudaApi:
    """Import cuda-python.

    Raises:
        MissingExtra: it is not installed.
        EngineError: it is installed and cannot be imported.
    """
    require("cuda", "cuda")
    try:
        module = importlib.import_module("cuda.bindings.runtime")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "cuda-bindings is not installed, and a GPU needs the extra [cuda]: "
            "pip install '.[cuda]' in a clone of spec-export"
        ) from error
    except Exception as error:  # of the loader, for a shared library
        raise EngineError(f"cuda-bindings is installed and cannot be imported: {error}") from error
    return CudaApi(module)


def find_gpu(api: CudaApi, index: int = 0) -> Gpu:
    """The device with that index.

    Raises:
        EngineError: no driver, a driver that is too old, or no such device; says which.
    """
    driver = api.attempt("cudaDriverGetVersion") or 0
    cuda = api.attempt("cudaRuntimeGetVersion") or 0
    if not driver:
        raise EngineError(
            "no NVIDIA driver was found, so no GPU can be used; install the driver (on a Jetson "
            "it comes with JetPack), or build with --backend onnxruntime"
        )
    try:
        count = api.call("cudaGetDeviceCount")
    except EngineError as error:
        if driver // 1000 < cuda // 1000:
            raise EngineError(
                f"the NVIDIA driver serves CUDA {_version(driver)}, cuda-bindings is of CUDA "
                f"{_version(cuda)}; update the driver, or pip install 'cuda-bindings<"
                f"{driver // 1000 + 1}'"
            ) from error
        raise EngineError(f"the NVIDIA driver shows no GPU: {error}; {_SEEN}") from error
    if index >= count:
        raise EngineError(f"GPU {index} was asked for and the driver sees {count}; {_SEEN}")
    return _described(api, index, _version(driver), _version(cuda))


def _described(api: CudaApi, index: int, driver: str, cuda: str) -> Gpu:
    properties = api.call("cudaGetDeviceProperties", index)
    kinds = api.runtime.cudaDeviceAttr
    clock, width, integrated = (
        api.attempt("cudaDeviceGetAttribute", getattr(kinds, name), index)
        for name in (
            "cudaDevAttrMemoryClockRate",
            "cudaDevAttrGlobalMemoryBusWidth",
            "cudaDevAttrIntegrated",
        )
    )
    name = properties.name
    return Gpu(
        name=(name.decode() if isinstance(name, bytes) else str(name)).strip("\0 "),
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=driver,
        cuda=cuda,
        memory_bytes=int(properties.totalGlobalMem),
        is_integrated=bool(integrated),
        # kHz, two transfers a clock, bits.
        bandwidth=2e3 * clock * width / 8 if clock and width else None,
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _decoded(answer: Sequence[Any]) -> str:
    text = answer[-1]
    return text.decode() if isinstance(text, bytes) else str(text)

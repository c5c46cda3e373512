"""What is on this machine: devices, drivers, libraries. Looks, and changes nothing.

Everything is asked of a `System`, so that a test can be any machine. Whatever is strange on a real
one (a file that is no text, a program that hangs) is a fact that is not known, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from spec_export.system import Gpu, System

T = TypeVar("T")
_QUERY = "name,compute_cap,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem"
# Distributions of a library: from PyPI, and with JetPack or CUDA.
PACKAGES = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt_rtx"),
    "cuda-python": ("cuda-bindings", "cuda-python"),
    "onnx": ("onnx",),
    "onnx-ir": ("onnx-ir",),
    "onnxscript": ("onnxscript",),
    "torch": ("torch",),
    "transformers": ("transformers",),
}
# The JetPack of a Jetson Linux release, where the package that names it is not installed.
_JETPACKS = {"36.4.3": "6.2", "36.4.4": "6.2.1", "38.2.0": "7.0", "38.4.0": "7.1"}


@dataclass(frozen=True)
class Library:
    """A TensorRT library.

    Attributes:
        version: None where it cannot be used.
        targets: compute capabilities it builds for ahead of time; empty: for the GPU at hand.
        reason: why it cannot be used.
    """

    version: str | None
    targets: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Facts:
    """A machine.

    Attributes:
        machine: instruction set.
        processor: what the operating system calls it.
        threads: processors this process may run on.
        memory: lines of the system's memory by name, in bytes.
        board: of a Jetson, else None.
        jetpack: its version, else None.
        power_mode: of a Jetson, as `nvpmodel` calls it.
        clocks: what can be read of them now, by name.
        driver: version of the NVIDIA driver, where a program tells it.
        gpus: as CUDA or the driver's own program describes them; the first one is used.
        usable_gpu: whether CUDA can be used from here.
        gpu_reason: why it cannot.
        packages: installed version by library.
        providers: of onnxruntime.
        tensorrt: the libraries by name.
        unknown: what could not be asked, with the fault.
    """

    machine: str
    processor: str
    threads: int
    memory: dict[str, int]
    board: str | None
    jetpack: str | None
    power_mode: str | None
    clocks: dict[str, str]
    driver: str | None
    gpus: tuple[Gpu, ...]
    usable_gpu: bool
    gpu_reason: str
    packages: dict[str, str]
    providers: tuple[str, ...]
    tensorrt: dict[str, Library]
    unknown: dict[str, str]

    @property
    def gpu(self) -> Gpu | None:
        """The one that is used."""
        return self.gpus[0] if self.gpus else None


class _Asking:
    """Asks, and keeps what went wrong instead of raising it."""

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def ask(self, what: str, question: Callable[[], T], otherwise: T) -> T:
        """The answer, or what stands in for it."""
        try:
            return question()
        except Exception as error:  # whatever a strange machine raises
            self.unknown[what] = f"{type(error).__name__}: {error}".splitlines()[0]
            return otherwise


def look(system: System) -> Facts:
    """Ask a machine everything; raises nothing."""
    asking = _Asking()
    ask = asking.ask
    packages = {
        name: found
        for name, names in PACKAGES.items()
        if (found := ask(name, partial(_package, system, names), None))
    }
    no_gpu: tuple[list[Gpu], str] = ([], "it could not be asked")
    gpus, reason = ask("gpu", lambda: system.cuda_gpus(), no_gpu)
    untold: tuple[list[Gpu], str | None, dict[str, str]] = ([], None, {})
    told, driver, clocks = ask("nvidia-smi", partial(_nvidia_smi, system), untold)
    clocks |= ask("clocks", partial(_board_clocks, system), dict[str, str]())
    has_ort = "onnxruntime" in packages
    board = ask("board", partial(_board, system), None)
    return Facts(
        machine=ask("machine", lambda: system.machine(), "unknown"),
        processor=ask("processor", lambda: system.processor(), "unknown"),
        threads=ask("threads", lambda: system.threads(), 1),
        memory=ask("memory", partial(_memory, system), dict[str, int]()),
        board=board,
        jetpack=ask("jetpack", partial(_jetpack, system), None),
        power_mode=ask("power mode", partial(_power_mode, system), None),
        clocks=clocks,
        driver=driver,
        gpus=tuple(gpus or told),
        usable_gpu=bool(gpus),
        gpu_reason=reason,
        packages=packages,
        providers=tuple(
            ask("providers", lambda: system.providers(), list[str]()) if has_ort else ()
        ),
        tensorrt={
            name: ask(name, partial(_library, system, name), Library(None))
            for name in ("tensorrt", "tensorrt-rtx")
        },
        unknown=asking.unknown,
    )


def _package(system: System, names: tuple[str, ...]) -> str | None:
    return system.package(*names)


def _library(system: System, name: str) -> Library:
    found, targets, reason = system.tensorrt(name)
    return Library(found, tuple(targets), reason)


def _memory(system: System) -> dict[str, int]:
    """Bytes in all, available and of swap."""
    names = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap"}
    found = {}
    for line in (system.read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if name in names and number and number[0].isdigit():
            found[names[name]] = int(number[0]) * 1024
    return found


def _board(system: System) -> str | None:
    model = system.read("/proc/device-tree/model")
    if model and ("Jetson" in model or "Orin" in model or "Thor" in model):
        return model
    return "Jetson" if system.read("/etc/nv_tegra_release") else None


def _jetpack(system: System) -> str | None:
    """From the package that is JetPack, else from the release of Jetson Linux."""
    release = system.read("/etc/nv_tegra_release")
    if release is None:
        return None
    package = system.run("dpkg-query", "--show", "--showformat=${Version}", "nvidia-jetpack")
    if package and (found := re.match(r"\d+(\.\d+)*", package)):
        return found.group()
    found = re.search(r"R(\d+).*?REVISION:\s*([\d.]+)", release)
    if found is None:
        return None
    linux = f"{found.group(1)}.{found.group(2)}"
    return _JETPACKS.get(linux, f"of Jetson Linux {linux}")


def _power_mode(system: System) -> str | None:
    told = system.run("nvpmodel", "-q") or ""
    found = re.search(r"NV Power Mode:\s*(\S+)", told)
    return found.group(1) if found else None


def _board_clocks(system: System) -> dict[str, str]:
    """Of the first processor and, on a Jetson, the GPU and memory, in MHz now and at most."""
    places = {
        "processor": ("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", 1e3),
        "gpu": ("/sys/class/devfreq/17000000.gpu/cur_freq", 1e6),
        "memory": ("/sys/kernel/debug/bpmp/debug/clk/emc/rate", 1e6),
    }
    found = {}
    for name, (path, unit) in places.items():
        text = system.read(path) or ""
        if text.isdigit():
            found[name] = f"{int(text) / unit:.0f} MHz"
    return found


def _nvidia_smi(system: System) -> tuple[list[Gpu], str | None, dict[str, str]]:
    """The GPUs, the driver and the first one's clocks, as the driver's own program tells them."""
    told = system.run("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    lines = [[field.strip() for field in line.split(",")] for line in (told or "").splitlines()]
    lines = [fields for fields in lines if len(fields) == len(_QUERY.split(","))]
    gpus = []
    for name, capability, _, memory, *_ in lines:
        count = int(memory) * 1024 * 1024 if memory.isdigit() else 0  # none where it is shared
        gpus.append(Gpu(name, capability, "", count))
    if not lines:
        return [], None, {}
    _, _, driver, _, clock, highest, memory_clock = lines[0]
    clocks = {}
    if clock.isdigit():
        clocks["gpu"] = f"{clock} MHz" + (f" of {highest}" if highest.isdigit() else "")
    if memory_clock.isdigit():
        clocks["gpu memory"] = f"{memory_clock} MHz"
    return gpus, driver, clocks


def at_least(found: str, wanted: Sequence[int]) -> bool:
    """Whether a version is no older; False where it is no number."""
    numbers = [int(part) for part in re.findall(r"\d+", found.split("+")[0])[: len(wanted)]]
    return bool(re.match(r"\d", found)) and numbers >= list(wanted)

"""The machine, as it answers: files, programs, packages and devices. Changes nothing."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spec_export.engines.errors import SpecExportError

_SECONDS = 10  # a program that takes longer is not waited for


@dataclass(frozen=True)
class Gpu:
    """A GPU; `driver` is the newest CUDA version it serves, `memory_bytes` all of its memory."""

    name: str
    compute_capability: str
    driver: str
    memory_bytes: int


class System:
    """The machine, as it answers."""

    def read(self, path: str) -> str | None:
        """A file; None where it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").strip("\0\n ")
        except OSError:
            return None

    def run(self, *command: str) -> str | None:
        """What a program prints; None where there is none, it fails, or it hangs."""
        from spec_export.calibration.asking import told

        return told(*command, seconds=_SECONDS).strip() or None

    def package(self, *names: str) -> str | None:
        """The version of the first of these distributions that is installed."""
        for name in names:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    def cuda_gpus(self) -> tuple[list[Gpu], str]:
        """The GPUs as CUDA sees them, or why there is none."""
        from spec_export.engines.cuda_api import find_gpu, load_api

        gpus: list[Gpu] = []
        try:
            api = load_api()
            while True:
                found = find_gpu(api, len(gpus))
                gpu = Gpu(found.name, found.compute_capability, found.driver, found.memory_bytes)
                gpus.append(gpu)
        except SpecExportError as error:  # after the last one as well
            return gpus, "" if gpus else str(error)

    def providers(self) -> list[str]:
        """Execution providers of the installed onnxruntime."""
        import onnxruntime

        return list(onnxruntime.get_available_providers())

    def tensorrt(self, name: str) -> tuple[str | None, list[str], str]:
        """Version of a TensorRT library and the GPUs it builds for, or why it cannot be used."""
        from spec_export.engines.trt_api import load

        try:
            api = load(name)
        except SpecExportError as error:
            return None, [], str(error)
        return api.version, list(api.compute_capabilities()), ""

    def machine(self) -> str:
        """Instruction set."""
        return platform.machine()

    def processor(self) -> str:
        """Name of the processor."""
        from spec_export.engines.processor import processor_name

        return processor_name()

    def threads(self) -> int:
        """Processors this process may run on."""
        import os

        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

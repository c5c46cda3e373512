"""A device in words, two different ones in different words."""

from __future__ import annotations

from spec_export.engines.manifest import DeviceSpec, GpuSpec

_LONGEST_NAME = 99


def described(device: DeviceSpec) -> str:
    """Such as `AMD EPYC 9654 with onnxruntime 1.32.0, 2 threads`, after its GPU where it has one.

    What it is made of may come from a file.
    """
    place = printable(device.processor)
    if device.gpu is not None:
        place = f"{_gpu(device.gpu)}, {place}"
    threads = f"{device.threads} thread{'' if device.threads == 1 else 's'}"
    library = f"{printable(device.backend)} {printable(device.version)}"
    return f"{place} with {library}, {threads}"


def printable(text: str) -> str:
    """Text of a file, with what would steer a terminal, or forge a line, written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_LONGEST_NAME])


def _gpu(gpu: GpuSpec) -> str:
    name, capability, driver, cuda = map(
        printable, (gpu.name, gpu.compute_capability, gpu.driver, gpu.cuda)
    )
    return f"{name} (compute capability {capability}, CUDA {cuda}, driver for {driver})"

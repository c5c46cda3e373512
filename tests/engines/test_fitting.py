"""A bundle of compiled engines on another machine: one message, with what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_export.engines.errors import BundleError
from spec_export.engines.fitting import check_fits
from spec_export.engines.manifest import CompilerSpec, DeviceSpec, GpuSpec

ORIN = GpuSpec("Orin", "8.7", "13.0", "13.0")
L4, A10 = GpuSpec("NVIDIA L4", "8.9", "13.0", "13.0"), GpuSpec("NVIDIA A10", "8.6", "13.0", "13.0")
RTX_4090 = replace(L4, name="NVIDIA GeForce RTX 4090")
TENSORRT = DeviceSpec("tensorrt", "11.4.1", "Cortex", "aarch64", 1, ORIN)
AHEAD = DeviceSpec("tensorrt-rtx", "1.7.1", "AMD", "x86_64", 1, None)
HERE, FOR_ADA = CompilerSpec((), {}, None), CompilerSpec(("8.6", "8.9"), {}, None)


def test_the_machine_it_was_built_on_fits():
    check_fits(TENSORRT, HERE, TENSORRT)


def test_another_driver_fits():
    """Engines depend on the library; whether the bits are the same is probed, and another state."""
    gpu = replace(ORIN, driver="13.2")
    check_fits(TENSORRT, HERE, replace(TENSORRT, gpu=gpu))


@pytest.mark.parametrize("gpu", [L4, A10, RTX_4090])
def test_an_engine_built_ahead_of_time_fits_the_gpus_it_is_for(gpu):
    check_fits(AHEAD, FOR_ADA, replace(AHEAD, gpu=gpu, processor="another"))


def test_onnxruntime_fits_everywhere():
    built = DeviceSpec("onnxruntime", "1.32.0", "AMD", "x86_64", 2)
    check_fits(built, None, replace(built, version="1.25.0", machine="aarch64", threads=8))


@pytest.mark.parametrize(
    ("built", "compiler", "found", "message"),
    [
        (
            TENSORRT,
            HERE,
            replace(TENSORRT, version="11.2"),
            r"needs tensorrt 11.4.1 on aarch64 and the GPU Orin \(compute capability 8.7\); found "
            r"here: tensorrt 11.2 on aarch64, Orin \(compute capability 8.7\). Build it anew on "
            "this machine: spec-export build EXPORTED -o BUNDLE --backend tensorrt$",
        ),
        (TENSORRT, HERE, replace(TENSORRT, gpu=L4), r"the GPU Orin .* found here: .* NVIDIA L4"),
        (
            TENSORRT,
            HERE,
            replace(TENSORRT, gpu=None),
            "found here: .*, no GPU .* Copy it to such a machine, .* --backend onnxruntime$",
        ),
        (TENSORRT, HERE, replace(TENSORRT, machine="x86_64"), "on aarch64 .* on x86_64"),
        (
            replace(TENSORRT, gpu=L4),
            HERE,
            replace(TENSORRT, gpu=RTX_4090),
            "the GPU NVIDIA L4 .* found here: .* RTX 4090",
        ),
        (
            AHEAD,
            FOR_ADA,
            replace(AHEAD, gpu=ORIN),
            "a GPU of compute capability 8.6 or 8.9; found here: .* Orin",
        ),
        (AHEAD, FOR_ADA, replace(AHEAD, gpu=L4, version="1.8.0"), "tensorrt-rtx 1.7.1 .* 1.8.0"),
    ],
)
def test_another_machine_is_named(built, compiler, found, message):
    with pytest.raises(BundleError, match=message):
        check_fits(built, compiler, found)

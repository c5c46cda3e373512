"""What the tests on a GPU share; each is skipped, by name, where what it needs is not there."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.cuda import CudaDevice
from spec_export.engines.errors import SpecExportError
from spec_export.runtime.opened import make_backend
from tests.gpu_check_script import load_gpu_check
from tests.tiny_models import TINY

BACKENDS = ("tensorrt", "tensorrt-rtx", "onnxruntime-cuda")


@pytest.fixture(scope="session")
def gpu() -> CudaDevice:
    """The GPU of this machine."""
    try:
        return CudaDevice()
    except SpecExportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def steps() -> ModuleType:
    """The steps of `bench/gpu_check.py`, which these tests take in small."""
    return load_gpu_check()


@pytest.fixture(scope="session")
def half_exported(export_pair, tmp_path_factory) -> Path:
    """The tiny pair in float16."""
    out = tmp_path_factory.mktemp("gpu") / "exported"
    return export_pair(str(TINY / "target"), str(TINY / "draft"), out, dtype="float16").path


@pytest.fixture(scope="session", params=BACKENDS)
def gpu_bundle(request, gpu, half_exported, tmp_path_factory) -> Path:
    """The tiny pair, built on this GPU; building compares and probes it."""
    try:
        backend = make_backend(request.param)
    except SpecExportError as error:
        pytest.skip(str(error))
    reason = getattr(backend, "cannot_run", None)
    if reason is not None:
        pytest.skip(reason)
    out = tmp_path_factory.mktemp(request.param) / "bundle"
    return build_bundle(half_exported, out, backend, BuildOptions(gamma=4, max_len=256)).path

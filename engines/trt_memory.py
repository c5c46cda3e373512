"""Device memory of a bundle, estimated before anything is compiled.

The largest parts are counted: weights as the engine holds them, one session's caches, and the
scratch memory of the widest pass. A build takes more for a while, several times the weights: most
of it the host's, which counts where the GPU has no memory of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import onnx

from spec_export.engines.errors import BuildError
from spec_export.engines.graphs import JUNK_ROLES, ModelSpec
from spec_export.engines.passes import cache_bytes

_LIVE_ROWS = 4  # activations of the widest layer that live at once
_BUILD_FACTOR = 3  # the least that a build takes, of the weights as they are stored
_CODE_BYTES = 8 << 20  # of a profile; 7.4 MB for 30 layers, 3.2 MB for 4, tensorrt-rtx 1.7.1


@dataclass(frozen=True)
class DeviceMemory:
    """An estimate in bytes.

    Attributes:
        weights: with the second copy of the layers that passes of one row want.
        caches: of one session.
        scratch: of the widest pass.
        code: of kernels.
        building: the least that the build takes at its peak, the host's part included; models are
            built one after another.
    """

    weights: int
    caches: int
    scratch: int
    code: int
    building: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.caches + self.scratch + self.code


def estimate(
    models: dict[str, ModelSpec], exported: Path, *, single_row: bool = True
) -> DeviceMemory:
    """Estimate for models with pinned roles and capacity.

    Args:
        models: descriptions.
        exported: directory of their graphs.
        single_row: whether steps are compiled for one row.
    """
    parts = [_estimate(spec, exported / spec.file, single_row) for spec in models.values()]
    return DeviceMemory(
        weights=sum(part.weights for part in parts),
        caches=sum(part.caches for part in parts),
        scratch=max(part.scratch for part in parts),
        code=sum(part.code for part in parts),
        building=max(part.building for part in parts),
    )


def _estimate(spec: ModelSpec, graph: Path, single_row: bool) -> DeviceMemory:
    model = onnx.load(str(graph), load_external_data=False)
    matrices = [t for t in model.graph.initializer if len(t.dims) == 2]
    heads = {spec.vocabulary}
    inside = [t for t in matrices if not heads & set(t.dims)]
    floats = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT)
    plain = sum(t.dims[0] * t.dims[1] for t in inside if t.data_type in floats)
    is_quantized = any(node.op_type == "DequantizeLinear" for node in model.graph.node)
    one_row = single_row and any(role.rows == 1 and role.name in JUNK_ROLES for role in spec.roles)
    copies = 2 * plain if one_row and not is_quantized else 0
    widest = max((max(t.dims) for t in inside), default=1)
    capacity = max(int(dim) for state in spec.states for dim in state.dims[2:3])
    scratch = max(
        int(role.rows) * (2 * _LIVE_ROWS * widest + capacity)
        + int(role.logit_rows) * spec.vocabulary * 6  # half, then float32
        for role in spec.roles
    )
    return DeviceMemory(
        spec.parameters_bytes + copies,
        cache_bytes(spec),
        scratch,
        len(spec.roles) * _CODE_BYTES,
        _BUILD_FACTOR * spec.parameters_bytes,
    )


def shared_memory(meminfo: str, device_bytes: int) -> tuple[int, int]:
    """What a GPU can take of memory that it shares with the processor.

    CUDA calls free what nothing uses; what files are cached in is given back when it is asked for.

    Args:
        meminfo: text of `/proc/meminfo`.
        device_bytes: free on the GPU by its own account.

    Returns:
        Bytes without swap, which serves the host alone, and with what is free of it.
    """
    lines = re.findall(r"^(MemAvailable|SwapFree):\s+(\d+) kB", meminfo, re.MULTILINE)
    found = {name: int(number) << 10 for name, number in lines}
    available = max(device_bytes, found.get("MemAvailable", 0))
    return available, available + found.get("SwapFree", 0)


def check_memory(
    needed: DeviceMemory,
    workspace_bytes: int | None,
    device_bytes: int | None,
    build_bytes: int | None = None,
) -> None:
    """Refuse a build that cannot fit, before it starts.

    Args:
        needed: the estimate.
        workspace_bytes: what kernels may work in; None: no limit of ours.
        device_bytes: free on the GPU; None where there is none to look at.
        build_bytes: free for the build where GPU and processor share their memory; None where each
            has its own.

    Raises:
        BuildError: with the numbers and what makes them smaller.
    """
    smaller = "build with a smaller --max-len or --chunk, --weights int8, or a smaller model"
    if device_bytes is not None and needed.total > device_bytes:
        raise BuildError(
            f"the engines need about {_size(needed.total)} of device memory (weights "
            f"{_size(needed.weights)}, caches {_size(needed.caches)}) and {_size(device_bytes)} "
            f"are free; {smaller}"
        )
    if build_bytes is not None and needed.building > build_bytes:
        raise BuildError(
            f"the build takes at least {_size(needed.building)} for a while, and "
            f"{_size(build_bytes)} of the memory that the GPU shares with the processor are free, "
            "swap included; close other programs, add swap, or build a smaller model"
        )
    if workspace_bytes is not None and needed.scratch > workspace_bytes:
        raise BuildError(
            f"--workspace {_size(workspace_bytes)}: the widest pass works in about "
            f"{_size(needed.scratch)}; allow more, or build with a smaller --chunk"
        )


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"

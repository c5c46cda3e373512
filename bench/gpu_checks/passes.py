"""Times of target passes, by the bytes they read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gpu_checks.device import bandwidth, clock
from gpu_checks.report import megabytes
from gpu_checks.texts import decode

VERIFY_BY_DECODE, TIME_BY_FLOOR = 1.15, 1.25


def pass_times(session: Any, graph: Path) -> tuple[str, dict[str, Any]]:
    """Verify by decode, and decode by the time that what it reads takes at the bandwidth.

    It reads its weights, and its caches at full capacity: a mask hides what is past the text.
    """
    import numpy as np

    from spec_export.engines.passes import cache_bytes

    device, spec, found = session._device, session._spec, {}
    decode(session, 8)
    for name, role in session._roles.items():
        if name == "prefill":
            continue
        device.upload(role.buffers["kv_len"], np.array([64], np.int64))
        call = device.record(role.call.enqueue)
        found[name] = clock(device, call.enqueue, 20)
    session.rewind(0)
    verify = max((name for name in found if name.startswith("verify")), key=len, default=None)
    ratio = found[verify] / found["decode"] if verify else float("nan")
    per_s = bandwidth(device)
    weights, aside = read_bytes(graph)
    caches = cache_bytes(spec)
    floor = 1e3 * (weights + caches) / per_s
    by_floor = found["decode"] / floor
    times = ", ".join(f"{name} {ms:.3f}" for name, ms in found.items())
    shown = (
        f"{times} ms; verify/decode {ratio:.2f}; decode {by_floor:.2f} of the time of its bytes ("
        f"weights {megabytes(weights)} and caches at full capacity {megabytes(caches)}; "
        f"{megabytes(aside)} that is only looked up in does not count)"
    )
    missed = device.is_deferred and (ratio > VERIFY_BY_DECODE or by_floor > TIME_BY_FLOOR)
    values = {"ms": found, "ratio": ratio, "by_floor": by_floor, "floor_ms": floor}
    counted = {"weights_bytes": weights, "caches_bytes": caches, "looked_up_bytes": aside}
    return shown, {**values, **counted, "missed": missed}


def read_bytes(graph: Path) -> tuple[int, int]:
    """Weights that a pass reads whole, and those it only looks rows up in."""
    import numpy as np
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    looked_up, multiplied = set[str](), set[str]()
    for node in model.graph.node:
        rows = node.input[:1] if node.op_type == "Gather" else []
        looked_up.update(rows)
        multiplied.update(node.input[len(rows) :])
    whole = aside = 0
    for tensor in model.graph.initializer:
        is_half_byte = tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        size = math.prod(tensor.dims) * (0.5 if is_half_byte else np.dtype(kind).itemsize)
        if tensor.name in looked_up - multiplied:
            aside += int(size)
        else:
            whole += int(size)
    return whole, aside

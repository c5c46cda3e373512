"""The exactness probe: what it says of a real engine, and that it sees what an engine might do.

An engine that disturbs its results is put in front of the real one: by the number of rows, by the
index of a row, by what the other rows hold, by how many tokens are cached; in logits or in caches;
by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spec_export.engines.backend import Buffer
from spec_export.engines.bundle import open_bundle
from spec_export.engines.ort import OrtBackend
from spec_export.engines.probe import probe_exactness

Disturb = Callable[[Mapping[str, np.ndarray], int], None]
CACHE = "past_key_values.1.value"


@dataclass
class DisturbedCall:
    """Runs the real call, then lets `disturb` at the buffers."""

    inner: Any
    buffers: Mapping[str, np.ndarray]
    rows: int
    disturb: Disturb

    def enqueue(self) -> None:
        self.inner.enqueue()
        self.disturb(self.buffers, self.rows)


class DisturbedEngine:
    """The real engine behind a disturbance."""

    def __init__(self, engine: Any, spec: Any, disturb: Disturb) -> None:
        self._engine, self._spec, self._disturb = engine, spec, disturb
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def bind(self, role: str, buffers: Mapping[str, Buffer]) -> DisturbedCall:
        hosts = {name: buffer.host for name, buffer in buffers.items()}
        rows = int(self._spec.role(role).rows)
        return DisturbedCall(self._engine.bind(role, buffers), hosts, rows, self._disturb)


def next_up(values: np.ndarray) -> None:
    values[...] = np.nextafter(values, np.float32(np.inf))


def probed(bundle_path, disturb: Disturb | None):
    """Probe the tiny target behind a disturbance."""
    bundle, backend = open_bundle(bundle_path), OrtBackend()
    manifest = bundle.manifest
    spec = manifest.models["target"]
    engine: Any = backend.open_model(bundle.file(spec.file), spec)
    if disturb is not None:
        engine = DisturbedEngine(engine, spec, disturb)
    return probe_exactness(backend.device, engine, spec, manifest.capacity, manifest.max_len)


def test_the_tiny_target_is_width_invariant(tiny_bundle):
    """On the CPUs these tests run on: every width, every row of narrow ones, to the end."""
    found = probed(tiny_bundle, None)
    assert found.kind == "width_invariant", found.reason
    assert found.widths == (2, 5, 32)
    assert found.lengths == (0, 5, 64, 127)
    # Each length: at least each row of T=2 and T=5 once, with true and with junk neighbours.
    assert found.rows > 4 * (2 + 5) * 2


def test_the_manifest_records_it(tiny_bundle):
    assert open_bundle(tiny_bundle).manifest.exactness == probed(tiny_bundle, None)


def by_width(buffers, rows) -> None:
    if rows == 5:
        next_up(buffers["logits"])


def by_width_in_the_cache(buffers, rows) -> None:
    if rows == 5:
        kv_len = int(buffers["kv_len"][0])
        next_up(buffers[CACHE][:, :, kv_len : kv_len + rows])


def by_row(buffers, rows) -> None:
    asked = buffers["logit_rows"]
    for at, row in enumerate(asked):
        if row == 3:
            next_up(buffers["logits"][0, at])


def by_row_in_the_cache(buffers, rows) -> None:
    kv_len = int(buffers["kv_len"][0])
    next_up(buffers[CACHE][:, :, kv_len + 1])


def by_neighbours(buffers, rows) -> None:
    """The row before the last changes with the token of the last: as a batched kernel might."""
    if buffers["input_ids"][0, -1] % 2:
        next_up(buffers["logits"])


def by_length(buffers, rows) -> None:
    """Another kernel from some length on: the same position is then reached from two lengths."""
    if buffers["kv_len"][0] >= 62:
        next_up(buffers["logits"])


def one_logit_of_one_row(buffers, rows) -> None:
    if rows == 5 and buffers["logit_rows"][-1] == 4:
        next_up(buffers["logits"][0, -1, 1030:])


@pytest.mark.parametrize(
    ("disturb", "kind"),
    [
        (by_width, "row_invariant"),
        (by_width_in_the_cache, "row_invariant"),
        (by_row, "none"),
        (by_row_in_the_cache, "none"),
        (by_neighbours, "none"),
        (by_length, "none"),
        (one_logit_of_one_row, "none"),
    ],
)
def test_a_disturbance_of_one_bit_is_seen(disturb, kind, tiny_bundle):
    found = probed(tiny_bundle, disturb)
    assert found.kind == kind
    assert "has other bits than" in found.reason
    assert "T=" in found.reason and "kv_len=" in found.reason


def test_a_disturbance_that_is_the_same_everywhere_is_none(tiny_bundle):
    """Negative control: wrong results may well be exact; that they are wrong is found elsewhere."""

    def always(buffers, rows) -> None:
        buffers["logits"] += 1

    assert probed(tiny_bundle, always).kind == "width_invariant"

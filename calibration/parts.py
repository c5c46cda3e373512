"""Time the parts of a round by themselves: passes of both models, propose, confidence, accept.

They take turns, one of each in every turn, so that a machine that gets slower does so for all. They
run over caches of their own, which hold zeros: what a pass costs does not depend on what it reads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from spec_export.calibration import evidence
from spec_export.engines.backend import Buffer, Call, Device, Engine, FreeRows
from spec_export.engines.graphs import ModelSpec, RoleSpec, SamplingSpec
from spec_export.engines.passes import allocate_caches, bind_role
from spec_export.runtime import OpenedBundle

_WARM_UP = 2


class PartsTimer:
    """Every part of a round of an opened bundle, bound once.

    Args:
        opened: the bundle.
        kv_len: cached tokens at which passes are timed.
        greedy: tokens are the most probable ones; else the graphs that draw them depend on the
            request, and choosing is left in what remains of a round.
    """

    def __init__(self, opened: OpenedBundle, kv_len: int, *, greedy: bool) -> None:
        self._device = opened.device
        self._flag = opened.device.allocate((1,), np.int64)
        self._read = np.zeros(1, np.int64)
        self._calls = _target_calls(opened, kv_len) | _draft_calls(opened, kv_len)
        if greedy:
            self._calls |= _sampling_calls(opened)
        if opened.draft is not None:
            self._calls |= _named_calls(opened, {"confidence": evidence.CONFIDENCE})
        self.turn(_WARM_UP)

    @property
    def names(self) -> list[str]:
        """Names of the parts, as in `evidence`."""
        return list(self._calls)

    def turn(self, count: int) -> dict[str, tuple[float, ...]]:
        """Time every part `count` times; milliseconds by name."""
        found: dict[str, list[float]] = {name: [] for name in self._calls}
        for _ in range(count):
            for name, call in self._calls.items():
                self._settle()
                started = time.perf_counter()
                call.enqueue()
                self._settle()
                found[name].append((time.perf_counter() - started) * 1e3)
        return {name: tuple(values) for name, values in found.items()}

    def _settle(self) -> None:
        """Return when everything that was enqueued has run."""
        self._device.download(self._flag, self._read)


def _target_calls(opened: OpenedBundle, kv_len: int) -> dict[str, Call]:
    most = opened.manifest.gammas[-1] + 1
    engine, spec = every_width(opened.target, opened.manifest.models["target"], most)
    roles = {
        role.name: evidence.target_pass(int(role.rows))
        for role in spec.roles
        if role.name != "prefill"
    }
    return _pass_calls(opened.device, engine, spec, roles, kv_len)


def every_width(engine: Engine, spec: ModelSpec, most: int) -> tuple[Engine, ModelSpec]:
    """An engine with a role for every number of rows up to `most`, where it has such passes."""
    if not isinstance(engine, FreeRows):
        return engine, spec
    built = {int(role.rows) for role in spec.roles if role.name != "prefill"}
    more = [RoleSpec(f"rows_{m}", m, m, "chain") for m in range(1, most + 1) if m not in built]
    wider = replace(spec, roles=(*spec.roles, *more))
    return engine.with_roles(wider), wider


def _draft_calls(opened: OpenedBundle, kv_len: int) -> dict[str, Call]:
    if opened.draft is None:
        return {}
    spec = opened.manifest.models["draft"]
    roles = {"catch_up": evidence.CATCH_UP, "step": evidence.STEP}
    return _pass_calls(opened.device, opened.draft, spec, roles, min(kv_len, spec.max_position - 2))


def _pass_calls(
    device: Device, engine: Engine, spec: ModelSpec, roles: Mapping[str, str], kv_len: int
) -> dict[str, Call]:
    """A call for each role, under its new name; of several with as many rows the first."""
    caches = allocate_caches(device, spec)
    calls: dict[str, Call] = {}
    for role, name in roles.items():
        bound = bind_role(device, engine, spec, role, caches)
        device.upload(bound.buffers["kv_len"], np.array([kv_len], np.int64))
        calls.setdefault(name, bound.call)
    return calls


def _sampling_calls(opened: OpenedBundle) -> dict[str, Call]:
    manifest, wanted = opened.manifest, {"propose_greedy": evidence.PROPOSE}
    for gamma in manifest.gammas:
        wanted[f"accept_greedy.{gamma + 1}"] = evidence.accept(gamma + 1)
    return _named_calls(opened, wanted)


def _named_calls(opened: OpenedBundle, wanted: Mapping[str, str]) -> dict[str, Call]:
    """Sampling graphs that the bundle has, under other names."""
    described = opened.manifest.sampling
    return {
        name: _sampling_call(opened.device, opened.sampling[graph], described[graph])
        for graph, name in wanted.items()
        if graph in described
    }


def _sampling_call(device: Device, engine: Engine, spec: SamplingSpec) -> Call:
    """Bound to zeros: the largest of a row is found in the same time whatever is in it."""
    buffers: dict[str, Buffer] = {}
    for tensor in (*spec.inputs, *spec.outputs):
        shape = tuple(int(dim) for dim in tensor.dims)
        buffers[tensor.name] = device.allocate(shape, tensor.dtype)
    return engine.bind("run", buffers)

"""The sampling graphs of a bundle: which rows each is compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spec_export.engines.backend import Backend
from spec_export.engines.bundle import Progress
from spec_export.engines.graphs import GraphsSpec, SamplingSpec


def compile_sampling(
    backend: Backend,
    exported: Path,
    graphs: GraphsSpec,
    capacity: int,
    gammas: tuple[int, ...],
    work: Path,
    progress: Progress,
) -> dict[str, SamplingSpec]:
    """Compile every sampling graph that a backend has a use for.

    Args:
        backend: the engine library.
        exported: directory of the graphs.
        graphs: their description.
        capacity: rows of a cache.
        gammas: drafts that rounds are built for, ascending; none without a draft.
        work: directory of the bundle.
        progress: called with (step, done, total).

    Returns:
        Descriptions by name, such as `accept_greedy.5` for rounds of 5 rows.
    """
    wanted = [
        (f"{name}.{rows}" if rows else name, spec, pins | {"C": capacity})
        for name, spec in graphs.sampling.items()
        if name not in backend.left_out
        for rows, pins in _pins(name, spec, gammas)
    ]
    compiled = {}
    for done, (label, spec, pins) in enumerate(wanted):
        progress("compiling sampling graphs", done, len(wanted))
        file = f"sampling/{label}{backend.suffix}"
        backend.compile_sampling(exported / spec.file, pins, work / file)
        compiled[label] = SamplingSpec(
            file,
            tuple(tensor.pinned(pins) for tensor in spec.inputs),
            tuple(tensor.pinned(pins) for tensor in spec.outputs),
        )
    progress("compiling sampling graphs", len(wanted), len(wanted))
    return compiled


def _pins(
    name: str, spec: SamplingSpec, gammas: tuple[int, ...]
) -> Iterator[tuple[int, dict[str, int]]]:
    """Rows a graph is built for, with its symbols; 0 where nothing in it varies with them.

    A graph that judges has one form for each round width. One that reads rows of a pass has one for
    a single row as well, and where it reads drafts, those of the widest round.
    """
    dims = {dim for tensor in spec.inputs for dim in tensor.dims}
    widest = max(gammas, default=0)
    # An empty tensor is not for every engine: there is one draft and one pass even where none is.
    pins = {"D": max(1, widest), "G": max(1, widest), "M": widest + 1, "W": 2 * (widest + 1)}
    if "M" in dims:
        yield from ((gamma + 1, pins | {"G": gamma, "M": gamma + 1}) for gamma in gammas)
        return
    if "R" not in dims:
        yield 0, pins
        return
    widths = set() if name.startswith("draft_") else {gamma + 1 for gamma in gammas}
    yield from ((rows, pins | {"R": rows}) for rows in sorted({1} | widths))

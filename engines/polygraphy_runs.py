"""What two engines made of the same passes, as Polygraphy keeps and compares it.

Polygraphy's own runners allocate every output, and a cache output has to be its input's memory. So
passes are run by `compare`, and Polygraphy gets what came out: to judge it, and to be looked into
with its tools (`polygraphy inspect data FILE`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np

from spec_export.engines.atomic import storage_error
from spec_export.engines.extras import require

Outputs = Mapping[str, np.ndarray]


class PolygraphyRuns:
    """Outputs of an engine and of its standard graph, pass by pass.

    Args:
        engine: what the first one is called.
        standard: what the second one is called.

    Raises:
        MissingExtra: polygraphy is not installed.
    """

    def __init__(self, engine: str, standard: str) -> None:
        require("tensorrt-rtx", "polygraphy")
        self._names = engine, standard
        self._passes: tuple[list[Any], list[Any]] = ([], [])

    def add(self, ours: Outputs, theirs: Outputs) -> None:
        """Keep the outputs of a pass, float32, by name."""
        from polygraphy.comparator import IterationResult

        for kept, name, outputs in zip(self._passes, self._names, (ours, theirs), strict=True):
            whole = {key: np.ascontiguousarray(value) for key, value in outputs.items()}
            kept.append(IterationResult(whole, runner_name=name))

    def disagreements(self, logits: float, caches: float) -> list[str]:
        """Outputs that Polygraphy finds further apart than allowed, with the pass they are of.

        Args:
            logits: largest absolute difference of a logit.
            caches: of a cache entry.
        """
        from polygraphy.comparator import Comparator, SimpleCompareFunc

        allowed = {"logits": logits, "": caches}
        judge = SimpleCompareFunc(atol=allowed, rtol=0.0, check_error_stat="max")
        with _silenced():
            found = Comparator.compare_accuracy(self._results(), compare_func=judge)
        (result,) = found  # one for each function that compares
        (passes,) = result.values()  # and in it one for each pair of runs
        return [
            f"{name} in pass {number}"
            for number, outputs in enumerate(passes)
            for name, verdict in outputs.items()
            if not verdict
        ]

    @property
    def outputs(self) -> int:
        """How many outputs were compared."""
        return sum(len(outputs) for outputs in self._passes[0])

    def save(self, file: Path) -> None:
        """Write both runs as Polygraphy's JSON.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with _silenced():
                self._results().save(str(file))
        except OSError as error:
            raise storage_error(error, file) from error

    def _results(self) -> Any:
        from polygraphy.comparator import RunResults

        return RunResults(list(zip(self._names, self._passes, strict=True)))


def _silenced() -> AbstractContextManager[Any]:
    """Polygraphy writes a report of every output to stdout; what it found is returned instead."""
    from polygraphy.logger import G_LOGGER

    return cast(AbstractContextManager[Any], G_LOGGER.verbosity(G_LOGGER.CRITICAL))

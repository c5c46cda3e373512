"""The table of steps: what was found, missed, skipped or wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
import traceback
from collections.abc import Callable
from typing import Any


class Skip(Exception):
    """A step cannot be done here; says why."""


@dataclasses.dataclass
class Step:
    """A line of the table."""

    name: str
    status: str
    detail: str
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class Report:
    """Runs steps, keeps what they found, and never lets one stop the others."""

    def __init__(self, seconds: float, only: list[str]) -> None:
        self.steps: list[Step] = []
        self._until, self._only = time.monotonic() + seconds, only

    def run(self, name: str, step: Callable[[], tuple[str, dict[str, Any]]]) -> bool:
        """Run a step; whether it was done and right."""
        if self._only and not any(part in name for part in self._only):
            return True
        started = time.monotonic()
        if started > self._until:
            return self._add(Step(name, "skipped", "no time left"))
        try:
            detail, values = step()
            status = "missed" if values.get("missed") else "ok"
            found = Step(name, status, detail, values)
        except Skip as reason:
            found = Step(name, "skipped", str(reason))
        except Exception as error:
            traceback.print_exc()
            found = Step(name, "FAILED", f"{type(error).__name__}: {error}".splitlines()[0][:300])
        found.seconds = round(time.monotonic() - started, 2)
        return self._add(found)

    def _add(self, step: Step) -> bool:
        self.steps.append(step)
        print(f"{step.status:8} {step.name:44} {step.detail}  [{step.seconds} s]", flush=True)
        return step.status in ("ok", "missed")

    def finish(self) -> int:
        """Print the table and the JSON line."""
        print("\n" + "-" * 100)
        for step in self.steps:
            print(f"{step.status:8} {step.name:44} {step.detail}")
        counts = {s: sum(x.status == s for x in self.steps) for s in ("ok", "missed", "skipped")}
        failed = [step.name for step in self.steps if step.status == "FAILED"]
        print(
            f"{counts['ok']} ok, {counts['missed']} targets missed, {counts['skipped']} skipped, "
            f"{len(failed)} failed\n"
        )
        shown = [dataclasses.asdict(step) for step in self.steps]
        print(json.dumps({"steps": shown, **counts, "failed": failed}), flush=True)
        return 1 if failed else 0


def need(module: str, why: str) -> None:
    """Skip where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Skip(f"{module} is not installed, {why}")


def megabytes(count: int) -> str:
    """A size."""
    return f"{count / 1e6:.1f} MB"

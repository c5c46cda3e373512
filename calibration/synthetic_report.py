"""Speed at set acceptances as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spec_export.calibration.device_text import described
from spec_export.calibration.measure import Task
from spec_export.calibration.synthetic_result import Best, SyntheticResult, SyntheticSpeed
from spec_export.engines.manifest import DeviceSpec

_HEAD = ("alpha", "accepted", "gamma", "tokens", "   E", "measured         ", "predicted")
_WITH_DRAFT = "computed"
_PASSES_HEAD = ("gamma", "rows", "T(rows) ms", "    v", "round cost")


def verdict(result: SyntheticResult) -> str:
    """From which acceptance on speculation pays, in one sentence."""
    ratio, least = result.cost_ratio, result.break_even_alpha
    draft = (
        "a draft that costs nothing" if ratio is None else f"a draft step of {ratio:g} target steps"
    )
    if least is None:
        return f"no acceptance makes speculation pay here, with {draft}"
    return f"speculation is predicted to pay here above alpha {least:.2f}, with {draft}"


def terminal_lines(result: SyntheticResult, device: DeviceSpec, task: Task) -> list[str]:
    """The verdict, speeds and costs, within 80 columns but for sentences."""
    has_draft = result.cost_ratio is not None
    head = (*_HEAD, _WITH_DRAFT) if has_draft else _HEAD
    chosen = {found.alpha: found.measured_gamma for found in result.best}
    lines = [verdict(result), "", "  " + "  ".join(head)]
    for speed in result.speeds:
        mark = "->" if chosen[speed.alpha] == speed.gamma else "  "
        lines.append(mark + _row(_cells(speed), head))
    lines += ["", "  " + "  ".join(_PASSES_HEAD)]
    for cost in result.passes:
        cells = (
            f"{cost.gamma}",
            f"{cost.rows}",
            f"{cost.target_ms:.2f}",
            f"{cost.verify_cost:.2f}",
            f"{cost.round_cost:.2f}",
        )
        lines.append("  " + _row(cells, _PASSES_HEAD))
    return [*lines, "", *(f"- {line}" for line in remarks(result, device, task))]


def remarks(result: SyntheticResult, device: DeviceSpec, task: Task) -> list[str]:
    """The choice at every alpha, and what the numbers are."""
    rule = "" if task.rule is None else f", rule {task.rule}"
    said = [
        *map(_choice, result.best),
        "alpha was set, and the drafts were made up: right as often as that, at no cost; accepted "
        "is what became of them. Rounds, passes and times are real, and so is the text",
        "tokens a target pass, and E by Equation 1; measured over the fastest plain decoding, at "
        "95 % over texts; predicted: E / (gamma c + v(gamma+1) + overhead)",
        "v is T(rows) over that of a plain step; a round cost is of all that belongs to a round, "
        f"over a plain step of {result.plain_ms:.2f} ms",
    ]
    if result.cost_ratio is None:
        said.append("the time of a real draft comes on top: give --cost-ratio")
    else:
        said.append(
            f"computed, not measured: {result.cost_ratio:g} x {result.target_ms:.2f} ms are added "
            "for every draft; by this gammas are compared"
        )
    if result.departed:
        said.append(
            f"{result.departed} of {result.texts} texts took another turn than plain decoding (the "
            "bits of this engine depend on the width of a pass) and were timed up to there"
        )
    said.append(
        f"{described(device)}, {len(task.prompts)} prompts, "
        f"{task.tokens} tokens after each, temperature {task.sampling.temperature:g}{rule}; no "
        "profile is written"
    )
    return said


def as_json(result: SyntheticResult, device: DeviceSpec, task: Task) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "verdict": verdict(result),
        **asdict(result),
        "device": asdict(device),
        "prompts": len(task.prompts),
        "prompts_sha256": task.sha256,
        "tokens": task.tokens,
        "temperature": task.sampling.temperature,
        "seed": task.sampling.seed or 0,
        "rule": task.rule,
    }


def _choice(best: Best) -> str:
    measured, predicted = map(_advice, (best.measured_gamma, best.predicted_gamma))
    if measured == predicted:
        return f"at alpha {best.alpha:.3g}: {measured}, as predicted"
    return f"at alpha {best.alpha:.3g}: {measured}; predicted: {predicted}"


def _advice(gamma: int) -> str:
    return f"gamma {gamma}" if gamma else "do not speculate"


def _cells(speed: SyntheticSpeed) -> tuple[str, ...]:
    measured, accepted = speed.measured, speed.accepted
    cells = (
        f"{speed.alpha:.3g}",
        "-" if accepted is None else f"{accepted.value:.3f}",
        f"{speed.gamma}",
        f"{speed.tokens_a_pass:.2f}",
        f"{speed.expected_tokens:.2f}",
        f"{measured.value:.2f}x ({measured.low:.2f}-{measured.high:.2f})",
        f"{speed.predicted:.2f}x",
    )
    return cells if speed.computed is None else (*cells, f"{speed.computed:.2f}x")


def _row(cells: Sequence[str], head: Sequence[str]) -> str:
    return "  ".join(f"{cell:>{len(name)}}" for cell, name in zip(cells, head, strict=True))

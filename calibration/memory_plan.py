"""Which context fits a device, with and without the draft: `spec-export plan --memory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_export.calibration import html_report
from spec_export.calibration.memory import (
    Described,
    MemoryUse,
    cache_row_bytes,
    largest_context,
    memory_use,
)
from spec_export.engines.byte_counts import size

_SHORTEST_SHOWN = 512
_BAR = 30
HEAD = ("context", "caches", "all, with drafts", "without drafts")


@dataclass(frozen=True)
class Limit:
    """What a process may take, and whose limit it is."""

    bytes: int
    name: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory at the context asked for and at others, and the longest that fit.

    Attributes:
        use: at the context asked for.
        plain: the same without the draft.
        contexts: with and without the draft, by context.
        token_bytes: of the caches, a token.
        limit: of the device, if one was named.
        largest: longest context that fits; None where none does, and where there is no limit.
        largest_plain: the same without the draft.
        positions: the longest context the target was made for.
        may_widen: half-precision weights that an engine for a CPU would keep in float32.
    """

    use: MemoryUse
    plain: MemoryUse
    contexts: tuple[tuple[MemoryUse, MemoryUse], ...]
    token_bytes: int
    limit: Limit | None
    largest: int | None
    largest_plain: int | None
    positions: int
    may_widen: bool

    @property
    def fits(self) -> bool:
        """Whether the context asked for fits."""
        return self.limit is None or self.use.total <= self.limit.bytes


def plan_memory(described: Described, limit: Limit | None) -> MemoryPlan:
    """Lay out the memory of a bundle or of what an exported directory would become."""
    plain, shown = described.plain(), {described.max_len, described.positions}
    context = _SHORTEST_SHOWN
    while context < described.positions:
        shown.add(context)
        context *= 2
    return MemoryPlan(
        use=memory_use(described),
        plain=memory_use(plain),
        contexts=tuple((memory_use(described, n), memory_use(plain, n)) for n in sorted(shown)),
        token_bytes=sum(cache_row_bytes(spec) for spec in described.models.values()),
        limit=limit,
        largest=None if limit is None else largest_context(described, limit.bytes),
        largest_plain=None if limit is None else largest_context(plain, limit.bytes),
        positions=described.positions,
        may_widen=described.is_half and not described.widens,
    )


def verdict(plan: MemoryPlan) -> str:
    """The plan in one sentence."""
    use, limit = plan.use, plan.limit
    needed = f"{size(use.total)} for a context of {use.max_len} tokens"
    if limit is None:
        return f"{needed}; name a --device or a --memory-limit to see what fits"
    room = f"{limit.name} has {size(limit.bytes)}"
    if plan.fits:
        return f"fits: {needed}, and {room}; {_longest(plan)}"
    return f"does not fit: {needed}, but {room}; {_longest(plan)}"


def terminal_lines(plan: MemoryPlan) -> list[str]:
    """The verdict, the parts and the contexts, within 80 columns."""
    lines = [verdict(plan), ""]
    parts = plan.use.parts()
    width, most = max(len(name) for name, _ in parts), max(count for _, count in parts)
    for name, count in [*parts, ("in all", plan.use.total)]:
        bar = "#" * round(_BAR * count / most) if name != "in all" else ""
        lines.append(f"  {name:<{width}}  {size(count):>8}  {bar}".rstrip())
    lines += ["", "  " + "  ".join(HEAD)]
    for row in _rows(plan):
        cells = (f"{cell:>{len(name)}}" for cell, name in zip(row, HEAD, strict=True))
        mark = "->" if row[0] == str(plan.use.max_len) else "  "
        lines.append(mark + "  ".join(cells))
    return [*lines, "", *(f"- {line}" for line in remarks(plan))]


def html(plan: MemoryPlan) -> str:
    """The page."""
    rows = tuple(_rows(plan))
    best = next(n for n, row in enumerate(rows) if row[0] == str(plan.use.max_len))
    bars = [html_report.Bar(name, count, size(count)) for name, count in plan.use.parts()]
    said = verdict(plan)
    return html_report.page(
        "spec-export plan --memory",
        said[0].upper() + said[1:] + ".",
        [
            (f"{size(plan.use.total)} at {plan.use.max_len} tokens", html_report.bars(bars)),
            ("By context", html_report.table(html_report.Table(HEAD, rows, best))),
            ("What this rests on", html_report.remarks(remarks(plan))),
        ],
    )


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """What `--json` prints."""
    limit = plan.limit
    return {
        "verdict": verdict(plan),
        "fits": None if limit is None else plan.fits,
        "max_len": plan.use.max_len,
        "total_bytes": plan.use.total,
        "plain_total_bytes": plan.plain.total,
        "parts_bytes": dict(plan.use.parts()),
        "cache_bytes_per_token": plan.token_bytes,
        "limit_bytes": None if limit is None else limit.bytes,
        "largest_max_len": plan.largest,
        "largest_max_len_without_draft": plan.largest_plain,
        "by_context": [
            {"max_len": use.max_len, "total_bytes": use.total, "plain_total_bytes": plain.total}
            for use, plain in plan.contexts
        ],
    }


def remarks(plan: MemoryPlan) -> list[str]:
    """What the numbers rest on."""
    said = [
        f"caches take {size(plan.token_bytes)} a token, and rows beyond the context for a padded "
        "chunk and for drafts",
        "weights and caches are counted, the rest is estimated (docs/calibration.md); what a GPU "
        "library keeps for itself is not in it, and building takes more, up to four times the "
        "weights",
    ]
    if plan.may_widen:
        said.append("on a CPU onnxruntime keeps half-precision weights in float32: twice as large")
    if plan.limit is not None and plan.limit.name != "the limit":
        said.append(
            f"what {plan.limit.name} leaves to a program is an assumption: nine tenths of its "
            "memory less 1.5 GiB; give --memory-limit where you know better"
        )
    return said


def _longest(plan: MemoryPlan) -> str:
    if plan.largest_plain is None:
        return "no context fits: use a smaller model or fewer bits a weight"
    without = _tokens(plan, plan.largest_plain)
    if plan.largest is None:
        return f"with drafts none fits, without them up to {without}"
    if plan.largest == plan.largest_plain:
        return f"up to {_tokens(plan, plan.largest)} fit, with drafts or without"
    return f"up to {_tokens(plan, plan.largest)} fit, without drafts {without}"


def _tokens(plan: MemoryPlan, count: int) -> str:
    every = " (all the target has positions for)" if count == plan.positions else ""
    return f"{count} tokens{every}"


def _rows(plan: MemoryPlan) -> list[tuple[str, ...]]:
    return [
        (f"{u.max_len}", size(sum(u.caches.values())), _mark(plan, u), _mark(plan, p))
        for u, p in plan.contexts
    ]


def _mark(plan: MemoryPlan, use: MemoryUse) -> str:
    over = plan.limit is not None and use.total > plan.limit.bytes
    return f"{'over ' if over else ''}{size(use.total)}"

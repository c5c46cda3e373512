"""A comparison of precisions in words, in a table for a terminal and on a page."""

from __future__ import annotations

from collections.abc import Sequence

from spec_export.calibration.html_report import Table
from spec_export.calibration.precision_names import AS_BUILT, flags
from spec_export.calibration.precision_result import Pairing, Precisions, TargetPrecision
from spec_export.engines.byte_counts import size

TARGET_HEAD = ("target", "weights", "perplexity", "same token", "divergence")
PAIRING_HEAD = ("target", "draft", "alpha", "gamma", "predicted", "measured", "no drafts")


def sentence(found: Precisions) -> str:
    """What fewer bits would bring, such as `int8+head target 1.95x predicted, 1.92x measured`.

    Of a target each with its fastest draft, where that is faster than the target as it was built;
    and a draft of fewer bits for the latter.
    """
    best = {pairing.target: pairing for pairing in _best_of_each(found)}
    built = best.pop(AS_BUILT)
    said = []
    if built.draft not in (None, AS_BUILT) and built.gamma:
        said.append(f"{built.draft} draft, same texts, {_speeds(built)}")
    for pairing in best.values():
        if pairing.speedup > built.speedup:
            said.append(f"{pairing.target} target {_speeds(pairing)}")
    return "; ".join(said) or "fewer bits are not faster here"


def _named(pairing: Pairing) -> str:
    draft = "" if pairing.draft is None else f" with the {pairing.draft} draft"
    return f"the {pairing.target} target{draft}"


def _speeds(pairing: Pairing) -> str:
    how = f"gamma {pairing.gamma}" if pairing.gamma else "no drafts"
    measured = "" if pairing.measured is None else f", {pairing.measured:.2f}x measured"
    return f"{pairing.speedup:.2f}x predicted{measured} with {how}"


def remarks(found: Precisions) -> list[str]:
    """What has to be known before one is chosen."""
    said = [
        "speed-ups are over the fastest plain decoding of the target as it was built",
        "a quantized target is another target: what is emitted follows it, exactly, and not the "
        "one in float32",
    ]
    if found.drafts:
        said.append("a draft's precision changes no text, only how often it is right")
    for target in found.targets:
        for rows in target.cliffs:
            before = target.rows[target.rows.index(rows) - 1]
            ratio = _at(target, rows) / _at(target, before)
            said.append(
                f"{target.name}: a pass of {rows} rows takes {ratio:.2f} times one of {before}, "
                "which the choice of gamma goes by"
            )
    for pairing in _best_of_each(found):
        options = flags(pairing.target, pairing.draft)
        if options and pairing.is_best:
            said.append(f"to have {_named(pairing)}: spec-export build EXPORTED {options} -o OUT")
    return said


def target_table(found: Precisions) -> Table:
    """Every target: size, quality, times."""
    rows = tuple(
        (
            target.name,
            size(target.weights_bytes),
            f"{target.quality.perplexity:.2f}",
            f"{target.quality.agreement:.1%}",
            f"{target.quality.divergence:.4f}",
            f"{target.rows_ms[0]:.1f}",
            f"{target.rows_ms[-1]:.1f}",
        )
        for target in found.targets
    )
    widest = max(target.rows[-1] for target in found.targets)
    return Table((*TARGET_HEAD, "ms: 1", f"{widest} rows"), rows, None)


def draft_table(found: Precisions) -> Table:
    """Every draft: size and times of its passes."""
    rows = tuple(
        (d.name, size(d.weights_bytes), f"{d.catch_up_ms:.1f} ms", f"{d.step_ms:.1f} ms")
        for d in found.drafts
    )
    return Table(("draft", "weights", "first pass", "further"), rows, None)


def pairing_table(found: Precisions) -> Table:
    """Every target with every draft; those that nothing beats have a star."""
    rows = tuple(
        (
            pairing.target + (" *" if pairing.is_best else ""),
            pairing.draft or "look-up",
            "-" if pairing.alpha is None else f"{pairing.alpha:.2f}",
            f"{pairing.gamma}",
            f"{pairing.speedup:.2f}x",
            "" if pairing.measured is None else f"{pairing.measured:.2f}x",
            f"{pairing.plain_speedup:.2f}x",
        )
        for pairing in found.pairings
    )
    fastest = max(range(len(rows)), key=lambda n: found.pairings[n].speedup)
    return Table(PAIRING_HEAD, rows, fastest)


def terminal_lines(found: Precisions) -> list[str]:
    """Both tables and the remarks."""
    return [
        "",
        *_aligned(target_table(found)),
        *([] if not found.drafts else ["", *_aligned(draft_table(found))]),
        "",
        *_aligned(pairing_table(found)),
        "",
        *(f"- {line}" for line in remarks(found)),
    ]


def _aligned(table: Table) -> list[str]:
    cells = [table.head, *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.head))]
    return [
        ("  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]


def _best_of_each(found: Precisions) -> Sequence[Pairing]:
    best: dict[str, Pairing] = {}
    for pairing in found.pairings:
        if pairing.target not in best or pairing.speedup > best[pairing.target].speedup:
            best[pairing.target] = pairing
    return list(best.values())


def _at(target: TargetPrecision, rows: int) -> float:
    return target.rows_ms[target.rows.index(rows)]

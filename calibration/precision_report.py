"""A comparison of precisions in words, in a table for a terminal and on a page."""

from __future__ import annotations

from collections.abc import Sequence

from spec_export.calibration.html_report import Table
from spec_export.calibration.precision_names import AS_BUILT, flags, parse_precisions
from spec_export.calibration.precision_result import Pairing, Precisions, TargetPrecision
from spec_export.engines.byte_counts import size
from spec_export.engines.graphs import QuantizationSpec

TARGET_HEAD = ("target", "weights", "perplexity", "same token", "divergence", "ms by rows")
PAIRING_HEAD = ("target", "draft", "alpha", "gamma", "speed-up", "without drafts")


def sentence(found: Precisions) -> str:
    """What other targets would bring, such as `int8+head target 1.95x`.

    Those that nothing beats; each with its best draft.
    """
    said = []
    for pairing in _best_of_each(found):
        if pairing.target != AS_BUILT and pairing.is_best:
            how = f"gamma {pairing.gamma}" if pairing.gamma else "no drafts"
            said.append(f"{pairing.target} target {pairing.speedup:.2f}x with {how}")
    return ", ".join(said) or "no other precision of the target is faster"


def remarks(found: Precisions) -> list[str]:
    """What has to be known before one is chosen."""
    said = [
        "speed-ups are predicted, over the fastest plain decoding of the target as it was built",
        "a quantized target is another target: what is emitted follows it, exactly, and not the "
        "one in float32",
    ]
    if found.drafts:
        said.append("a draft's precision changes no text, only how often it is right")
    for target in found.targets:
        if target.cliff is not None:
            before = target.rows[target.rows.index(target.cliff) - 1]
            ratio = _at(target, target.cliff) / _at(target, before)
            said.append(
                f"{target.name}: a pass of {target.cliff} rows takes {ratio:.2f} times one of "
                f"{before}, which the choice of gamma goes by"
            )
    for name in dict.fromkeys(p.target for p in found.pairings if p.is_best):
        if name != AS_BUILT:
            said.append(f"to have {name}: spec-export build EXPORTED {flags(_spec(name))} -o OUT")
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
            " ".join(f"{m}:{ms:.1f}" for m, ms in zip(target.rows, target.rows_ms, strict=True)),
        )
        for target in found.targets
    )
    return Table(TARGET_HEAD, rows, None)


def pairing_table(found: Precisions) -> Table:
    """Every target with every draft; those that nothing beats have a star."""
    rows = tuple(
        (
            pairing.target + (" *" if pairing.is_best else ""),
            pairing.draft or "look-up",
            "-" if pairing.alpha is None else f"{pairing.alpha:.2f}",
            f"{pairing.gamma}",
            f"{pairing.speedup:.2f}x",
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


def _spec(name: str) -> QuantizationSpec:
    return parse_precisions(name)[name]

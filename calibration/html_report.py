"""One page in one file: a verdict, charts and tables, without scripts and without the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Nothing is fetched and nothing runs, whatever a name in a bundle says; the style is the page's.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --first: #0757b8; --second: #b35900; --third: #1a7f37; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --line: #30363d;
  --first: #6cb0ff; --second: #f0a35e; --third: #56d364; --back: #0d1117; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; line-height: 1.35; } h2 { font-size: 1.05rem; margin-top: 2rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
svg text.strong { font-size: 13px; font-weight: 600; fill: var(--ink); }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); fill: none; }
.level { stroke: var(--soft); stroke-dasharray: 5 4; }
polyline { fill: none; stroke-width: 2; } polyline.first { stroke: var(--first); }
polyline.second { stroke: var(--second); } polyline.third { stroke: var(--third); }
circle.first { fill: var(--first); } circle.second { fill: var(--second); }
circle.third { fill: var(--third); }
circle.marked { fill: none; stroke: var(--second); stroke-width: 2.5; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }
table.bars { width: 100%; } .bars th { font-weight: 400; } .bars td.bar { width: 60%; }
.bar div { background: var(--first); height: .8rem; }
tr.best { font-weight: 600; } .scroll { overflow-x: auto; } .remarks { color: var(--soft); }
"""


@dataclass(frozen=True)
class Table:
    """Rows under a head; the row `best` stands out."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None


def page(title: str, verdict: str, sections: Sequence[tuple[str, str]]) -> str:
    """The document.

    Args:
        title: of the window.
        verdict: the sentence on top.
        sections: heads, as text, and what stands below, as HTML.
    """
    body = "\n".join(f"<h2>{escape(head)}</h2>\n{content}" for head, content in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(verdict)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table(content: Table) -> str:
    """A table as HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in content.head)
    rows = []
    for number, row in enumerate(content.rows):
        mark = ' class="best"' if number == content.best else ""
        rows.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody>\n</table></div>"
    )


@dataclass(frozen=True)
class Bar:
    """A name, a length, and what stands at its end."""

    name: str
    value: float
    text: str


def bars(content: Sequence[Bar]) -> str:
    """Horizontal bars on a common scale that begins at 0."""
    most = max((bar.value for bar in content), default=0.0) or 1.0
    rows = []
    for bar in content:
        width = 100 * max(0.0, bar.value) / most
        rows.append(
            f"<tr><th>{escape(bar.name)}</th><td>{escape(bar.text)}</td>"
            f'<td class="bar"><div style="width:{width:.2f}%"></div></td></tr>'
        )
    return '<table class="bars">\n' + "\n".join(rows) + "\n</table>"


def remarks(lines: Sequence[str]) -> str:
    """What to keep in mind, as a list."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="remarks">{items}</ul>'

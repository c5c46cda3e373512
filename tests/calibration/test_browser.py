"""The pages in a real browser: nothing is complained of, nothing is fetched, something is drawn."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.calibration import memory_plan, plan_report, profile_report
from spec_export.calibration.memory import read_described
from spec_export.calibration.picture import draw, find_browser, write_picture
from spec_export.calibration.plan import plan_speculation
from spec_export.calibration.precision_result import (
    Pairing,
    Precisions,
    Quality,
    TargetPrecision,
)
from spec_export.engines.errors import StorageError
from tests.calibration.test_profile import FAST, profile_of

EXACT, NEAR = Quality(53.6, 1.0, 0.0, 600), Quality(53.6, 0.97, 0.005, 600)
COMPARED = Precisions(
    targets=(
        TargetPrecision("float32", 538_000_000, EXACT, (1, 2, 5), (14.0, 15.0, 18.0), ()),
        TargetPrecision("int8", 265_000_000, NEAR, (1, 2, 5), (7.0, 9.0, 14.0), (2,)),
    ),
    drafts=(),
    pairings=(
        Pairing("float32", None, 0.5, 2, 1.1, 1.0, True),
        Pairing("int8", None, 0.45, 0, 1.9, 1.9, True),
    ),
)
BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")

WIDTH, HEIGHT = 700, 500
Look = Callable[[str], tuple[str, bytes]]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Show a page; returns what the browser logged and its picture, a PNG."""

    def shown(text: str) -> tuple[str, bytes]:
        assert BROWSER is not None
        picture, log = draw(BROWSER, text, tmp_path, WIDTH, HEIGHT)
        assert picture is not None, log
        return log, picture.read_bytes()

    return shown


def pixels(png: bytes) -> bytes:
    """RGB of a PNG of 8 bits a channel."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (width, height, depth) == (WIDTH, HEIGHT, 8)
    channels, at, packed = {2: 3, 6: 4}[kind], 8, b""
    while at < len(png):
        (length,), name = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        packed += png[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += 12 + length
    raw, stride = zlib.decompress(packed), channels * width
    above, rows = bytearray(stride), []
    for row in range(height):
        line = bytearray(raw[row * (stride + 1) + 1 : (row + 1) * (stride + 1)])
        unfilter(raw[row * (stride + 1)], line, above, channels)
        above = line
        rows.append(bytes(b for n, b in enumerate(line) if n % channels < 3))
    return b"".join(rows)


def unfilter(kind: int, line: bytearray, above: bytearray, channels: int) -> None:
    """Undo a filter of PNG (RFC 2083, section 6) in place."""
    for n in range(len(line)):
        left = line[n - channels] if n >= channels else 0
        corner = above[n - channels] if n >= channels else 0
        guess = left + above[n] - corner
        nearest = min((left, above[n], corner), key=lambda value: abs(guess - value))
        add = (0, left, above[n], (left + above[n]) // 2, nearest)[kind]
        line[n] = (line[n] + add) & 255


def colours(rgb: bytes) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for at in range(0, len(rgb), 3):
        found[rgb[at : at + 3]] = found.get(rgb[at : at + 3], 0) + 1
    return found


def complaints(log: str) -> list[str]:
    """What a page did wrong; the browser's own troubles with a machine are not the page's."""
    return [line for line in log.splitlines() if "CONSOLE" in line]


BLUE = bytes.fromhex("0757b8")  # of lines and bars, in a light page


def test_the_pages_are_drawn_without_complaints(look, tiny_bundle):
    pages = [
        plan_report.html(plan_speculation(0.8, 0.05)),
        memory_plan.html(memory_plan.plan_memory(read_described(tiny_bundle), None)),
        profile_report.html(profile_of(FAST)),
        profile_report.html(
            replace(profile_of(FAST), memory={"weights, target": 500_000_000}, precisions=COMPARED)
        ),
    ]
    for page in pages:
        log, picture = look(page)
        assert not complaints(log)
        drawn = colours(pixels(picture))
        assert drawn.get(BLUE, 0) > 500, "lines or bars"
        assert drawn.get(b"\xff\xff\xff", 0) > WIDTH * HEIGHT // 2, "on a white page"


def test_the_whole_page_is_drawn_and_not_its_top_alone(look):
    """What comes before a section is left out, so that its bars are in the window."""
    memory = {"weights, target": 500_000_000, "caches, target": 50_000_000}
    page = profile_report.html(
        replace(profile_of(FAST), memory=memory, precisions=COMPARED, reason="such")
    )
    starts = [page.index(f"<h2>{head}") for head in ("Memory of a process", "Speed-up predicted")]
    head = page[: page.index("<h2>")]
    for start in starts:
        log, picture = look(head + page[start:])
        assert not complaints(log)
        drawn = colours(pixels(picture))
        assert drawn.get(BLUE, 0) > 500, page[start : start + 40]


def test_a_page_that_is_wrong_is_seen(look):
    """Negative controls: a script and a picture from elsewhere are refused and logged."""
    page = plan_report.html(plan_speculation(0.8, 0.05))
    for wrong in ("<script>1</script>", '<img src="https://example.com/x.png">'):
        log, _ = look(page.replace("</body>", wrong + "</body>"))
        assert complaints(log)


def test_a_report_is_written_as_a_picture(tmp_path):
    page = plan_report.html(plan_speculation(0.8, 0.05))
    write_picture(tmp_path / "plan.png", page, 400)
    assert struct.unpack(">II", (tmp_path / "plan.png").read_bytes()[16:24]) == (900, 400)
    with pytest.raises(StorageError, match="could not be written"):
        write_picture(tmp_path / "no" / "plan.png", page, 400)

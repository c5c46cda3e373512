"""Every test and benchmark that the documentation rests a statement on exists under that name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@cache
def texts() -> dict[str, str]:
    """Texts by name of the file; two folders may have a file of one name."""
    found: dict[str, str] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        found[path.stem] = found.get(path.stem, "") + path.read_text(encoding="utf-8")
    return found


def named_tests(page: str) -> list[tuple[str, str]]:
    """`test_x::test_y` as (file, test); `::test_y` is of the file named last."""
    named, file = [], ""
    for stem, test in re.findall(r"`(?:(test_\w+)(?:\.py)?)?(?:::(test_\w+))?`", page):
        file = stem or file
        if stem or test:
            named.append((file, test))
    return named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_named_tests_exist(path: Path) -> None:
    for file, test in named_tests(path.read_text(encoding="utf-8")):
        assert file in texts(), file
        assert not test or f"def {test}(" in texts()[file], f"{file}::{test}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_named_benchmarks_exist(path: Path) -> None:
    for name in re.findall(r"\bbench/\w+\.py\b", path.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_number_is_still_to_be_filled_in(path: Path) -> None:
    assert placeholders(path.read_text(encoding="utf-8")) == []


def placeholders(page: str) -> list[str]:
    """Lines that hold one, such as `@@TABLE@@`."""
    return [line for line in page.splitlines() if "@@" in line]


def test_the_page_on_sampling_rests_on_tests_and_benchmarks() -> None:
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    assert len(named_tests(page)) > 25
    assert len(set(re.findall(r"`(bench/\w+\.py)`", page))) == 3


def test_a_placeholder_is_seen() -> None:
    """Negative control."""
    assert placeholders("a | b\n@@TABLE@@\nwrite to a@b.c, @ 3 % and `@x`\n| @@MS@@ |") == [
        "@@TABLE@@",
        "| @@MS@@ |",
    ]


def test_a_name_that_is_wrong_is_seen() -> None:
    """Negative control."""
    assert named_tests("a `test_noise` b `::test_x` c `test_y::test_z`, `::test_z`, `test`") == [
        ("test_noise", ""),
        ("test_noise", "test_x"),
        ("test_y", "test_z"),
        ("test_y", "test_z"),
    ]

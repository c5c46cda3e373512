"""Every test and benchmark that docs/sampling.md rests a statement on exists under that name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")


def test_named_tests_exist() -> None:
    files: dict[str, str] = {}
    for path in ROOT.glob("tests/**/test_*.py"):  # two folders may have a file of one name
        files[path.stem] = files.get(path.stem, "") + path.read_text(encoding="utf-8")
    named = re.findall(r"`(?:(test_\w+))?(?:::(test_\w+))?`", PAGE)
    file, found = "", 0
    for stem, name in named:
        file = stem or file
        if stem or name:
            assert file in files, file
            assert not name or f"def {name}(" in files[file], f"{file}::{name}"
            found += 1
    assert found > 15


def test_named_benchmarks_exist() -> None:
    named = set(re.findall(r"`(bench/\w+\.py)`", PAGE))
    assert len(named) == 3
    assert all((ROOT / path).is_file() for path in named)

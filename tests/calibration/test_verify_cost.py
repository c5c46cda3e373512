"""v(m) from a file that may hold anything."""

from __future__ import annotations

import json

import pytest

from spec_export.calibration.theory import Costs, best_gamma, speedup
from spec_export.calibration.verify_cost import MeasuredVerifyCost, read_verify_cost
from spec_export.engines.errors import BundleError, RequestError

# float32 on a two-core CPU, milliseconds.
ROWS, MS = (1, 2, 3, 5, 9), (22.0, 23.8, 24.3, 25.5, 30.0)


def test_measured_rows_are_exact_and_the_rest_a_straight_line():
    v = MeasuredVerifyCost(ROWS, MS)
    assert [v(rows) for rows in ROWS] == pytest.approx([ms / 22 for ms in MS])
    assert v(4) == pytest.approx((24.3 + 25.5) / 2 / 22)
    assert v(7) == pytest.approx((25.5 + 30) / 2 / 22)
    assert v.is_measured(5) and not v.is_measured(4)


@pytest.mark.parametrize("rows", [0, 10, -1])
def test_what_was_not_measured_is_not_made_up(rows):
    with pytest.raises(RequestError, match="outside what was measured"):
        MeasuredVerifyCost(ROWS, MS)(rows)
    with pytest.raises(RequestError, match="outside what was measured"):
        best_gamma(0.8, Costs(0.1, MeasuredVerifyCost(ROWS, MS)), 9)


def test_a_file(tmp_path):
    file = tmp_path / "v.json"
    file.write_text(json.dumps({"schema": 1, "rows": ROWS, "ms": MS}))
    assert speedup(0.8, 4, Costs(0.1, read_verify_cost(file))) == pytest.approx(
        3.3616 / (0.4 + 25.5 / 22)
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1, 2]",
        "{}",
        '{"schema": 2, "rows": [1, 2], "ms": [1, 2]}',
        '{"schema": 1, "rows": [1, 2], "ms": [1]}',
        '{"schema": 1, "rows": [1], "ms": [1]}',
        '{"schema": 1, "rows": [2, 3], "ms": [1, 2]}',
        '{"schema": 1, "rows": [1, 3, 2], "ms": [1, 2, 3]}',
        '{"schema": 1, "rows": [1, 1], "ms": [1, 2]}',
        '{"schema": 1, "rows": [1, 2.5], "ms": [1, 2]}',
        '{"schema": 1, "rows": [1, 2], "ms": [0, 2]}',
        '{"schema": 1, "rows": [1, 2], "ms": [1, -2]}',
        '{"schema": 1, "rows": [1, 2], "ms": [1e8, 1e-300]}',
        '{"schema": 1, "rows": [1, 2], "ms": [1, NaN]}',
        '{"schema": 1, "rows": [1, 2], "ms": [1, 1e400]}',
        '{"schema": 1, "rows": [1, 2], "ms": [1, "2"]}',
        '{"schema": 1, "rows": [1, 99999999999], "ms": [1, 2]}',
        '{"schema": 1, "rows": [1, 2], "ms": [1, 2], "more": 0}',
        json.dumps({"schema": 1, "rows": list(range(1, 2000)), "ms": [1.0] * 1999}),
        " " * (1 << 20) + "{}",
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content):
    file = tmp_path / "v.json"
    file.write_text(content)
    with pytest.raises(BundleError, match=r"v\.json"):
        read_verify_cost(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(BundleError):
            read_verify_cost(path)
    (tmp_path / "latin.json").write_bytes(b'{"schema": "\xff"}')
    with pytest.raises(BundleError, match=r"latin\.json"):
        read_verify_cost(tmp_path / "latin.json")

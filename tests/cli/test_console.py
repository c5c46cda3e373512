"""Progress: a line per step off a terminal, bars on one, silence when asked."""

from __future__ import annotations

import pytest

from spec_export.console import Steps, size
from spec_export.run_report import verdict
from spec_export.runtime.compare import DecodingComparison, Timing, first_difference


def lines(capsys):
    return [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]


def test_a_finished_step_is_one_line(capsys):
    """Its last callback may come twice, and it may end because the next one begins."""
    with Steps() as steps:
        steps("writing", 0, 10)
        steps("writing", 10, 10)
        steps("writing", 10, 10)
        steps("compiling", 0, 1)
        steps("checking", 0, 1)
        steps("checking", 1, 1)
    assert lines(capsys) == ["writing", "compiling", "checking"]


def test_files_being_verified_are_one_step(capsys):
    with Steps() as steps:
        for name in ("a", "b"):
            steps(f"verifying {name}", 5, 10)
            steps(f"verifying {name}", 10, 10)
    assert lines(capsys) == ["verifying files"]


def test_an_unfinished_step_is_not_told_as_finished(capsys):
    def fail():
        with Steps() as steps:
            steps("compiling", 0, 1)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert lines(capsys) == []


def test_quiet_and_no_lines_are_silent(capsys):
    for options in ({"quiet": True}, {"lines": False}):
        with Steps(**options) as steps:
            steps("compiling", 0, 1)
            steps("compiling", 1, 1)
    assert lines(capsys) == []


def test_a_terminal_sees_a_bar_and_no_markup_is_lost(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Steps() as steps:
        steps("reading [build]", 1, 2)
        steps("reading [build]", 2, 2)
    shown = capsys.readouterr().err
    assert "reading [build]" in shown and "100%" in shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (53_084_160, "53.1 MB"),
        (999_600, "1 MB"),
        (6_200_000_000, "6.2 GB"),
    ],
)
def test_sizes(count, text):
    assert size(count) == text


# --- the verdict of a comparison ------------------------------------------------------------------


def compared(ours, plain, exact=(1, 2, 3), fast=(1, 2, 3)):
    return DecodingComparison(
        speculative=Timing((1, 2, 3), tuple(ours)),
        exact_plain=None if exact is None else Timing(exact, tuple(plain)),
        fast_plain=Timing(fast, tuple(plain)),
        is_exact_promised=True,
    )


def test_a_speed_up_is_the_median_of_repeats_against_the_fastest_plain_decoding():
    found = compared([30, 36, 20], [20, 18, 20])
    assert found.speedups == (1.5, 2.0, 1.0)
    assert found.speedup == 1.5


@pytest.mark.parametrize(
    ("ours", "gamma", "words"),
    [
        ([30, 36, 34], 4, "speculation pays here: 1.70x"),
        ([15, 18, 18], 4, "speculation does not pay here: 0.90x; run with --gamma 0"),
        ([15, 18, 22], 4, "does not pay here: 0.90x (repeats 0.75 to 1.10)"),
        ([20.2, 19.9, 20], 4, "makes no difference here: 1.00x"),
        ([20, 20, 20], 0, "speculation was off"),
    ],
)
def test_the_verdict(ours, gamma, words):
    assert words in verdict(compared(ours, [20, 20, 20]), gamma)


def test_a_broken_promise_is_seen():
    assert not compared([1], [1]).is_broken
    assert not compared([1], [1], fast=(1, 2, 4)).is_broken, "one row may have other bits"
    assert compared([1], [1], fast=(1, 2, 4)).fast_departs_at == 2
    assert compared([1], [1], exact=(1, 9, 3)).is_broken
    assert not compared([1], [1], exact=None).is_broken


def test_a_shorter_text_differs_where_it_ends():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2

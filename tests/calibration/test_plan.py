"""The plan, its table and its charts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from spec_export.calibration import theory
from spec_export.calibration.html_report import Table, page, table
from spec_export.calibration.plan import plan_speculation, remarks, verdict
from spec_export.calibration.plan_report import as_json, html, terminal_lines
from spec_export.calibration.svg_chart import Chart, Line, draw
from spec_export.calibration.text_chart import text_chart
from spec_export.calibration.theory import Costs
from spec_export.calibration.verify_cost import MeasuredVerifyCost
from spec_export.engines.errors import RequestError

MEASURED = MeasuredVerifyCost((1, 2, 3, 5, 9), (22.0, 23.8, 24.3, 25.5, 30.0))


def test_a_plan_is_the_theory_for_every_gamma():
    plan = plan_speculation(0.8, 0.1, MEASURED)
    costs = Costs(0.1, MEASURED)
    assert [row.gamma for row in plan.rows] == list(range(9))
    for row in plan.rows:
        assert row.speedup == theory.speedup(0.8, row.gamma, costs)
        assert row.expected_tokens == theory.expected_tokens(0.8, row.gamma)
    assert plan.gamma == theory.best_gamma(0.8, costs, 8)
    assert plan.best is plan.best_round
    assert [row.is_measured for row in plan.rows] == [g + 1 in (1, 2, 3, 5, 9) for g in range(9)]


def test_the_verdict_says_which_gamma_and_where_it_ends():
    said = verdict(plan_speculation(0.8, 0.1))
    assert "gamma 6: 2.47x" in said
    assert "below alpha 0.10" in said and "above 0.80 of a target step" in said


def test_the_verdict_advises_against_it():
    """A draft half as slow as its target, right half of the time, gains nothing."""
    plan = plan_speculation(0.4, 0.5)
    assert plan.gamma == 0
    said = verdict(plan)
    assert said.startswith("do not speculate: the best round, gamma 1, runs at 0.93x")
    assert "above alpha 0.50" in said and "below 0.40 of a target step" in said
    hopeless = plan_speculation(0.1, 2.0, MeasuredVerifyCost((1, 2, 3), (1.0, 3.0, 4.0)))
    assert "no alpha and no draft make it pay" in verdict(hopeless)
    assert hopeless.break_even_alpha is None and hopeless.break_even_cost_ratio is None


def test_remarks_say_what_was_not_measured():
    assert any("v = 1" in line for line in remarks(plan_speculation(0.8, 0.1)))
    between = plan_speculation(0.65, 0.1, MEASURED, 3)
    assert between.gamma == 3
    assert any("straight line" in line for line in remarks(between))
    assert any("largest that was weighed" in line for line in remarks(between))


def test_gammas_past_the_measured_rows_are_refused():
    with pytest.raises(RequestError, match="at most 8"):
        plan_speculation(0.8, 0.1, MEASURED, 9)
    for gamma_max in (0, -1, 10**9):
        with pytest.raises(RequestError, match="gamma_max"):
            plan_speculation(0.8, 0.1, gamma_max=gamma_max)


@pytest.mark.parametrize(("alpha", "ratio"), [(0.8, 0.05), (0.0, 0.0), (1.0, 0.0), (0.3, 0.9)])
@pytest.mark.parametrize("gamma_max", [1, 2, 32, 200])
def test_it_fits_a_terminal_of_80_columns(alpha, ratio, gamma_max):
    plan = plan_speculation(alpha, ratio, gamma_max=gamma_max)
    lines = terminal_lines(plan)
    start = next(n for n, line in enumerate(lines) if line.startswith("  gamma"))
    drawn = lines[start : next(n for n, line in enumerate(lines) if line.startswith("- "))]
    assert max(map(len, drawn)) < 80
    assert len(drawn) < 60
    assert sum(line.startswith("->") for line in drawn) == 1
    assert "\n".join(drawn).count("O") == 1


def test_a_chart_puts_a_mark_where_the_value_is():
    lines = text_chart([1.0, 2.0, 3.0], level=1.0, marked=2, width=21, height=5)
    assert lines[0] == " 3.00x |" + " " * 20 + "O"
    assert lines[2] == "       |" + " " * 10 + "*"
    assert lines[4] == " 1.00x |" + "*" + "-" * 20
    assert lines[6].split() == ["0", "1", "2"]
    assert lines[6].index("1") == 8 + 10


class _Page(HTMLParser):
    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("alpha", [0.8, 0.2])
def test_the_page_is_one_file_without_scripts(alpha):
    plan = plan_speculation(alpha, 0.3, MEASURED)
    text = html(plan)
    found = _Page()
    found.feed(text)
    assert not found.open, "every element is closed"
    assert "script" not in found.seen and not found.links
    assert "http" not in text.replace("http-equiv", "")
    assert found.seen.count("svg") == found.seen.count("table") == found.seen.count("h1") == 1
    assert verdict(plan)[1:] in text


def test_a_chart_is_well_formed_and_its_points_are_where_they_belong():
    line = Line("S", ((0, 1.0), (1, 2.0), (2, 3.0)))
    chart = Chart("t<i>tle", (line, Line("b", ((0, 0.5),), joined=False)), "x", "y", 1.0)
    root = ElementTree.fromstring(draw(chart))
    circles = [c for c in root.iter("circle") if c.get("class") == "first"]
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in circles[:3]]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02) and x1 > x0
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.02) and y1 < y0, "up is more"
    level = next(p for p in root.iter("path") if p.get("class") == "level")
    assert f" {y0:g}H" in level.get("d", "").replace(".0H", "H"), "the level is at 1"


def test_names_from_a_bundle_cannot_become_markup():
    nasty = '<img src=x onerror=alert(1)>&"'
    text = page(nasty, nasty, [(nasty, table(Table((nasty,), ((nasty,),))))])
    text += draw(Chart(nasty, (Line(nasty, ((0, 1.0), (1, 1.0))),), nasty, nasty, 1.0))
    assert "<img" not in text


def test_json_has_the_numbers_of_the_choice():
    plan = plan_speculation(0.8, 0.1)
    found = as_json(plan)
    assert (found["gamma"], round(found["speedup"], 3)) == (6, 2.470)
    assert found["expected_tokens"] == theory.expected_tokens(0.8, 6)
    assert found["break_even_cost_ratio"] == pytest.approx(0.8)
    assert [row["gamma"] for row in found["by_gamma"]] == list(range(17))
    assert re.fullmatch(r"gamma 6: .*", found["verdict"])

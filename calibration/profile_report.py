"""A profile for a terminal and as a page: the advice, and every number it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from spec_export.calibration import html_report, precision_report, svg_chart
from spec_export.calibration.conditions import Conditions
from spec_export.calibration.device_text import described
from spec_export.calibration.early_exit import EarlyForecast
from spec_export.calibration.estimate import Interval
from spec_export.calibration.evidence import Times
from spec_export.calibration.html_report import Bar, Table
from spec_export.calibration.precision_result import Precisions
from spec_export.calibration.profile import Profile
from spec_export.calibration.svg_chart import Chart, Line
from spec_export.engines.byte_counts import size

_BAR = 24
_HEAD = ("gamma", "tokens a pass", "ms a pass", "speed-up", "95 % interval")


def terminal_lines(profile: Profile) -> list[str]:
    """The advice, acceptance, times and forecasts, within 80 columns but for sentences."""
    lines = [profile.reason, "", "  " + "  ".join(_HEAD)]
    for row in _forecast_rows(profile):
        cells = (f"{cell:>{len(name)}}" for cell, name in zip(row, _HEAD, strict=True))
        lines.append(("->" if row[0] == str(profile.gamma) else "  ") + "  ".join(cells))
    for title, bars in (
        ("share of tested drafts accepted", _acceptance_bars(profile)),
        ("milliseconds: median (quartiles)", _time_bars(profile)),
    ):
        lines += ["", f"  {title}", *_text_bars(bars)]
    if profile.precisions is not None:
        lines += precision_report.terminal_lines(profile.precisions)
    return [*lines, "", *(f"- {line}" for line in remarks(profile))]


def html(profile: Profile) -> str:
    """The page."""
    rows = tuple(_forecast_rows(profile))
    best = next((n for n, row in enumerate(rows) if row[0] == str(profile.gamma)), None)
    return html_report.page(
        "spec-export calibrate",
        profile.reason[0].upper() + profile.reason[1:] + ".",
        [
            ("Speed-up over the fastest plain decoding", svg_chart.draw(_speedup_chart(profile))),
            ("By gamma", html_report.table(Table(_HEAD, rows, best))),
            ("Rounds that accept at least so many drafts", _positions(profile)),
            (
                "Share of tested drafts that were accepted",
                html_report.bars(_acceptance_bars(profile)),
            ),
            ("Time of a target pass by its rows", svg_chart.draw(_width_chart(profile))),
            ("Milliseconds, median (quartiles)", html_report.bars(_time_bars(profile))),
            ("Memory of a process that decodes one text, planned", _memory(profile)),
            *([] if profile.precisions is None else _precisions(profile.precisions)),
            ("What this rests on", html_report.remarks(remarks(profile))),
        ],
    )


def remarks(profile: Profile) -> list[str]:
    """Where and on what it was measured, and what does not add up."""
    setting, found = profile.setting, profile.acceptance
    rule = "" if setting.rule is None else f", rule {setting.rule}"
    said = [
        ", ".join([described(profile.device), *_state(profile.after)]),
        f"{setting.prompts} prompts, {setting.tokens} tokens after each, temperature "
        f"{setting.temperature:g}{rule}; passes timed at {setting.kv_len} cached tokens",
        f"{found.passes_with_drafts} of {found.passes} passes had drafts; {found.accepted} drafts "
        f"accepted, {found.rejected} rejected",
        "intervals are at 95 %, over texts: other texts can differ by more",
    ]
    if found.beta is not None:
        said.append(
            "beta is what a draft drawn at any token of these texts would be accepted with, from "
            "both models reading them; alpha comes from rounds"
        )
    if profile.early is not None:
        said.append(_early(profile, profile.early))
    predicted = next(f for f in profile.forecasts if f.gamma == profile.measured_gamma).speedup
    apart = predicted.value / profile.measured.value - 1
    if abs(apart) > 0.1:
        said.append(
            f"the prediction is {apart:+.0%} off the measurement; the machine may have been busy"
        )
    return said


def _state(state: Conditions) -> list[str]:
    """What is known of it."""
    gpu = [
        f"{state.gpu_clock_mhz:.0f} MHz" if state.gpu_clock_mhz is not None else "",
        f"{state.gpu_temperature_c:.0f} degrees C" if state.gpu_temperature_c is not None else "",
        f"{state.gpu_power_w:.0f} W" if state.gpu_power_w is not None else "",
    ]
    said = [
        f"{state.clock_mhz:.0f} MHz" if state.clock_mhz is not None else "",
        f"governor {state.governor}" if state.governor else "",
        f"{state.temperature_c:.0f} degrees C" if state.temperature_c is not None else "",
        f"power mode {state.power_mode}" if state.power_mode else "",
        f"GPU at {', '.join(filter(None, gpu))}" if any(gpu) else "",
    ]
    return [text for text in said if text]


def _memory(profile: Profile) -> str:
    total = sum(profile.memory.values())
    parts = [("total", total), *sorted(profile.memory.items(), key=lambda part: -part[1])]
    return html_report.bars([Bar(name, count / 1e6, size(count)) for name, count in parts])


def _precisions(found: Precisions) -> list[tuple[str, str]]:
    """Sections of the page on other precisions."""
    speeds = [
        Bar(f"{p.target}, draft {p.draft or 'look-up'}", p.speedup, f"{p.speedup:.2f}x")
        for p in found.pairings
    ]
    pairings = html_report.table(precision_report.pairing_table(found))
    return [
        ("Precisions of the target", html_report.table(precision_report.target_table(found))),
        *(
            [("Precisions of the draft", html_report.table(precision_report.draft_table(found)))]
            if found.drafts
            else []
        ),
        ("Target and draft (* nothing is faster, nearer to float32 and smaller)", pairings),
        ("Speed-up predicted over the plain decoding of this bundle", html_report.bars(speeds)),
        ("About precisions", html_report.remarks(precision_report.remarks(found))),
    ]


def _early(profile: Profile, early: EarlyForecast) -> str:
    """What stopping early would bring, in a sentence."""
    gain, found = early.gain, f"below a draft confidence of {early.confidence:.2f}"
    by = f"{gain.value - 1:+.1%} ({gain.low - 1:+.1%} to {gain.high - 1:+.1%}) predicted"
    if not profile.draft_confidence:
        return f"rounds need not stop drafting early: at best, {found}, {by}"
    return (
        f"rounds of up to {_count(early.gamma, 'draft')} that stop {found}: "
        f"{early.speedup.value:.2f}x, {by} over the best without; `run --gamma auto` does so"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _forecast_rows(profile: Profile) -> list[tuple[str, ...]]:
    plain = profile.times.plain.median
    rows: list[tuple[str, ...]] = [("0", "1.00", f"{plain:.2f}", "1.00x", "-")]
    for found in profile.forecasts:
        speed = found.speedup
        rows.append(
            (
                f"{found.gamma}",
                f"{found.tokens_a_pass:.2f}",
                f"{found.pass_ms:.2f}",
                f"{speed.value:.2f}x",
                f"{speed.low:.2f}-{speed.high:.2f}",
            )
        )
    return rows


def _acceptance_bars(profile: Profile) -> list[Bar]:
    found = profile.acceptance
    named: list[tuple[str, Interval | None]] = [("all", found.alpha)]
    named.append(("beta", found.beta))
    named += [(f"position {n}", share) for n, share in enumerate(found.positions, start=1)]
    named += list(found.categories.items())
    return [
        Bar(name, share.value, f"{share.value:.2f} ({share.low:.2f}-{share.high:.2f})")
        for name, share in named
        if share is not None
    ]


def _time_bars(profile: Profile) -> list[Bar]:
    times = profile.times
    named: list[tuple[str, Times | None]] = [("plain step", times.plain)]
    named += [(f"target, {_count(found.rows, 'row')}", found.ms) for found in times.target]
    named += [("draft, first pass", times.catch_up), ("draft, further step", times.step)]
    named += [("propose", times.propose), ("draft confidence", times.confidence)]
    named += [("accept", times.accept), ("rest of a round", times.host)]
    named += [(f"round, {_count(r.n_draft, 'draft')}", r.ms) for r in times.rounds]
    return [
        Bar(name, found.median, f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})")
        for name, found in named
        if found is not None
    ]


def _text_bars(bars: Sequence[Bar]) -> list[str]:
    if not bars:
        return ["  none was tested"]
    width, text = max(len(bar.name) for bar in bars), max(len(bar.text) for bar in bars)
    most = max(bar.value for bar in bars) or 1.0
    return [
        f"  {b.name:<{width}}  {b.text:<{text}}  {'#' * round(_BAR * b.value / most)}".rstrip()
        for b in bars
    ]


def _speedup_chart(profile: Profile) -> Chart:
    """As Figure 3 of arXiv 2211.17192, with what was measured."""
    curve = [(0.0, 1.0), *((float(f.gamma), f.speedup.value) for f in profile.forecasts)]
    measured = ((float(profile.measured_gamma), profile.measured.value),)
    best = next(f for f in profile.forecasts if f.gamma == profile.measured_gamma).speedup
    return Chart(
        title=f"Predicted and measured speed-up by gamma: {profile.reason}",
        lines=(
            Line("predicted", tuple(curve)),
            Line("measured", measured, "second", joined=False),
        ),
        x_label="gamma: drafts a round",
        y_label="speed-up",
        level=1.0,
        marked=(
            float(profile.measured_gamma),
            best.value,
            f"gamma {profile.measured_gamma}: {best.value:.2f}x",
        ),
    )


def _positions(profile: Profile) -> str:
    """Chances that a draft is accepted with all before it, beside the geometric law."""
    found = profile.acceptance
    if found.alpha is None:
        return html_report.remarks(["no draft was tested"])
    reached, measured = 1.0, [(0.0, 1.0)]
    for position, share in enumerate(found.positions, start=1):
        if share is None:
            break
        reached *= share.value
        measured.append((float(position), reached))
    law = [(float(k), found.alpha.value**k) for k in range(len(found.positions) + 1)]
    chart = Chart(
        title="Share of rounds that accept at least so many drafts",
        lines=(Line("measured", tuple(measured)), Line("alpha^k", tuple(law), "second")),
        x_label="k: drafts accepted at least",
        y_label="share of rounds with drafts",
    )
    return svg_chart.draw(chart)


def _width_chart(profile: Profile) -> Chart:
    first = profile.times.target[0].ms.median or 1.0
    points = tuple((float(f.rows), f.ms.median / first) for f in profile.times.target)
    return Chart(
        title="Time of a target pass by its rows, over that of the narrowest",
        lines=(Line("rows", points),),
        x_label="rows of a pass",
        y_label="v(m) = T(m)/T(1)",
        level=1.0,
    )

"""What speculation gains here at a set acceptance, with a draft that costs nothing.

Every prompt is decoded plainly, then with synthetic drafts (`runtime.synthetic`) at every alpha and
every gamma the bundle was built for. Only the acceptance is made up: passes, rounds and times are
those of this device. What it says is in `synthetic_result`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spec_export.calibration.calibrate import widths_of
from spec_export.calibration.estimate import Trials
from spec_export.calibration.forecast import Widths
from spec_export.calibration.measure import Race, Task, decode
from spec_export.calibration.parts import PartsTimer
from spec_export.calibration.ranges import check_alpha, check_cost
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.errors import RequestError
from spec_export.runtime import OpenedBundle, Request, Session, Stats, generate
from spec_export.runtime.synthetic import SyntheticDraft, record_text, synthetic_session

MOST_ALPHAS = 20
_TURNS = 4  # of all parts after each text
_STEP = "decoding with synthetic drafts"


@dataclass(frozen=True)
class Lap:
    """A text decoded with synthetic drafts, and what as many tokens take plainly.

    Attributes:
        alpha: that was set.
        gamma: drafts a round.
        race: both times.
        passes: target passes.
        drafted: drafts made.
        trials: drafts tested.
        has_departed: the text turned out another than the recorded one, and ends there.
    """

    alpha: float
    gamma: int
    race: Race
    passes: int
    drafted: int
    trials: Trials
    has_departed: bool


@dataclass(frozen=True)
class SyntheticEvidence:
    """What was measured.

    Attributes:
        laps: of every text, alpha and gamma.
        parts_ms: median times of parts by themselves, as named in `evidence`.
        gammas: that the bundle was built for.
        widths: which of its passes rounds take.
    """

    laps: tuple[Lap, ...]
    parts_ms: dict[str, float]
    gammas: tuple[int, ...]
    widths: Widths


def parse_alphas(text: str) -> tuple[float, ...]:
    """Shares as typed, with commas between; ascending.

    Raises:
        RequestError: one is none, stands twice, or there are too many.
    """
    try:
        alphas = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(
            f"--synthetic {text:.60}: shares of accepted drafts with commas between, such as "
            "0.2,0.5,0.8"
        ) from error
    for alpha in alphas:
        check_alpha(alpha)
    if len(set(alphas)) < len(alphas) or len(alphas) > MOST_ALPHAS:
        raise RequestError(f"--synthetic {text:.60}: up to {MOST_ALPHAS} shares, each once")
    return tuple(sorted(alphas))


def check_cost_ratio(cost_ratio: float | None) -> None:
    """Refuse what is no cost of a draft; None is one that costs nothing."""
    if cost_ratio is not None:
        check_cost(cost_ratio)


def check_task(task: Task) -> None:
    """Refuse before any work what cannot be measured with drafts that know the text.

    Raises:
        RequestError: a text would depend on its drafts.
    """
    if task.rule not in (None, "invariant"):
        raise RequestError(
            f"--synthetic needs texts that do not depend on their drafts, and under rule "
            f"{task.rule} they do: use temperature 0, or --rule invariant"
        )


def measure_synthetic(
    opened: OpenedBundle, task: Task, alphas: Sequence[float], progress: Progress = no_progress
) -> SyntheticEvidence:
    """Decode every prompt at every alpha and built gamma, and plainly in between.

    End tokens do not end a text, so that all are of one length.

    Args:
        opened: the bundle, with verify passes; its own draft plays no part.
        task: prompts, tokens and sampling.
        alphas: to set.
        progress: called with (step, done, total).
    """
    session, source = synthetic_session(opened)
    gammas, total = opened.manifest.gammas, len(task.ids)
    kv_len = min(task.kv_len, opened.manifest.max_len - gammas[-1] - 2)
    timer = PartsTimer(opened, kv_len, greedy=task.sampling.temperature == 0)
    parts: dict[str, list[float]] = {name: [] for name in timer.names}
    laps: list[Lap] = []
    request = Request(task.tokens, task.sampling, ignore_end=True)
    for number, ids in enumerate(task.ids):
        progress(_STEP, number, total)
        text = record_text(session, ids, request)
        seed = (task.sampling.seed or 0, number)
        for i, alpha in enumerate((alphas[0], *alphas) if number == 0 else alphas):
            source.follow(text, alpha, seed)
            found = _laps(session, source, ids, request, alpha)
            if number or i:  # whatever is done for the first time is done in the very first
                laps += found
        for name, times in timer.turn(_TURNS).items():
            parts[name] += times
    progress(_STEP, total, total)
    medians = {name: statistics.median(times) for name, times in parts.items()}
    return SyntheticEvidence(tuple(laps), medians, gammas, _widths(opened))


def _widths(opened: OpenedBundle) -> Widths:
    """Where rows have the same bits at one width alone, all rounds take that one."""
    widths = widths_of(opened)
    is_one = opened.manifest.exactness.kind == "row_invariant"
    return replace(widths, gammas=widths.gammas[-1:]) if is_one else widths


def _laps(
    session: Session,
    source: SyntheticDraft,
    ids: Sequence[int],
    request: Request,
    alpha: float,
) -> list[Lap]:
    """The text that is followed, with every gamma and then plainly, within the same seconds."""
    found: list[tuple[int, Stats, bool]] = []
    for gamma in session.opened.manifest.gammas:
        stats = Stats(gamma=gamma)
        for piece in generate(session, ids, replace(request, gamma=gamma)):
            stats = piece.stats
            if source.departed_at is not None:
                break
        found.append((gamma, stats, source.departed_at is not None))
    alone = decode(session, ids, replace(request, gamma=0, fast_plain=True))
    if alone.emitted < 2:
        return []
    step_ms = alone.decode_ms / (alone.emitted - 1)
    return [_lap(alpha, *lap, step_ms) for lap in found if lap[1].emitted > 1]


def _lap(alpha: float, gamma: int, stats: Stats, has_departed: bool, step_ms: float) -> Lap:
    tokens = stats.emitted - 1
    return Lap(
        alpha=alpha,
        gamma=gamma,
        race=Race(tokens, stats.decode_ms, tokens * step_ms),
        passes=stats.rounds + stats.plain_steps,
        drafted=stats.drafted,
        trials=Trials(stats.accepted, stats.rejections),
        has_departed=has_departed,
    )

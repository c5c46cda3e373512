"""What to expect of speculation before there is a bundle: `spec-export plan`.

From an acceptance and costs that someone measured, read or supposes, the gain of every gamma, the
best, and the acceptance and draft cost at which it turns into a loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_export.calibration import theory
from spec_export.calibration.ranges import check_alpha, check_gamma
from spec_export.calibration.spread import latency_spread
from spec_export.calibration.theory import Costs
from spec_export.calibration.verify_cost import MeasuredVerifyCost
from spec_export.engines.errors import RequestError

DEFAULT_GAMMA_MAX = 16  # what a bundle is built for at most
TEXT_TOKENS = 128  # a paragraph or two: for how much the time of a text varies


@dataclass(frozen=True)
class GammaRow:
    """What a gamma promises.

    Attributes:
        gamma: drafts a round; 0 is plain decoding.
        expected_tokens: E, tokens a round.
        round_cost: time of a round, in plain target steps.
        speedup: S, over plain decoding.
        break_even_cost_ratio: the draft cost below which this gamma gains; None where even a free
            draft does not, and for gamma 0.
        deviation: standard deviation of the time of a text of `TEXT_TOKENS`, over its mean, as far
            as it comes from acceptance.
        is_measured: v(gamma+1) was given, and does not lie between two that were.
    """

    gamma: int
    expected_tokens: float
    round_cost: float
    speedup: float
    break_even_cost_ratio: float | None
    deviation: float
    is_measured: bool


@dataclass(frozen=True)
class SpeculationPlan:
    """The gain of every gamma, and the choice.

    Attributes:
        alpha: acceptance it was made for.
        cost_ratio: draft step over target step it was made for.
        rows: by gamma, from 0 on.
        gamma: the best; 0: do not speculate.
        break_even_cost_ratio: at this alpha, the draft cost below which some gamma gains; None
            where none does with a free draft.
        break_even_alpha: at this cost, the acceptance above which some gamma gains; None where none
            is enough.
        is_verify_measured: v came from measurements; else a pass over many rows is taken to cost
            what one over a single row does.
        sources: where the numbers it was made for are from, in words, as far as that is known.
    """

    alpha: float
    cost_ratio: float
    rows: tuple[GammaRow, ...]
    gamma: int
    break_even_cost_ratio: float | None
    break_even_alpha: float | None
    is_verify_measured: bool
    sources: tuple[str, ...] = ()

    @property
    def best(self) -> GammaRow:
        """The row of the chosen gamma."""
        return self.rows[self.gamma]

    @property
    def best_round(self) -> GammaRow:
        """The row with the largest speed-up that does speculate."""
        return max(self.rows[1:], key=lambda row: row.speedup)


def plan_speculation(
    alpha: float,
    cost_ratio: float,
    verify_cost: MeasuredVerifyCost | None = None,
    gamma_max: int | None = None,
    sources: tuple[str, ...] = (),
) -> SpeculationPlan:
    """Weigh every gamma.

    Args:
        alpha: share of tested drafts that are accepted.
        cost_ratio: c, time of a draft step over that of a plain target step.
        verify_cost: v(m); None: 1, as in Theorem 3.8 of arXiv 2211.17192.
        gamma_max: the largest gamma to weigh; None: 16, or as many as `verify_cost` reaches.
        sources: where these are from, in words.

    Raises:
        RequestError: a number means nothing, or v was not measured as far as `gamma_max`.
    """
    check_alpha(alpha)
    costs = Costs(cost_ratio, verify_cost or theory.free_verify)
    largest = _gamma_max(gamma_max, verify_cost)
    rows = tuple(_row(alpha, gamma, costs, verify_cost) for gamma in range(largest + 1))
    ratio = theory.break_even_over_gammas(alpha, costs, largest)
    return SpeculationPlan(
        alpha=alpha,
        cost_ratio=cost_ratio,
        rows=rows,
        gamma=theory.best_gamma(alpha, costs, largest),
        break_even_cost_ratio=ratio if ratio > 0 else None,
        break_even_alpha=theory.break_even_alpha(costs, largest),
        is_verify_measured=verify_cost is not None,
        sources=sources,
    )


def verdict(plan: SpeculationPlan) -> str:
    """The plan in one sentence."""
    alpha, ratio = plan.break_even_alpha, plan.break_even_cost_ratio
    if plan.gamma:
        assert alpha is not None and ratio is not None  # something gains, so both exist
        return (
            f"gamma {plan.gamma}: {plan.best.speedup:.2f}x expected over plain decoding; do not "
            f"speculate below alpha {alpha:.2f}, or with a draft step above {ratio:.2f} of a "
            "target step"
        )
    best = plan.best_round
    ways = [] if alpha is None else [f"above alpha {alpha:.2f}"]
    ways += [] if ratio is None else [f"with a draft step below {ratio:.2f} of a target step"]
    hope = f"it would pay {' or '.join(ways)}" if ways else "no alpha and no draft make it pay"
    return (
        f"do not speculate: the best round, gamma {best.gamma}, runs at {best.speedup:.2f}x plain "
        f"decoding; {hope}"
    )


def remarks(plan: SpeculationPlan) -> list[str]:
    """What the numbers rest on, and how far they reach."""
    said = [
        f"expected, not measured: alpha {plan.alpha:g}, a draft step takes {plan.cost_ratio:g} of "
        "a target step, drafts are accepted independently of one another",
        *plan.sources,
    ]
    if not plan.is_verify_measured:
        said.append(
            "verifying gamma+1 rows is taken to cost a plain step (v = 1), which is seldom true on "
            "a CPU and never for large batches; give measured times with --verify-cost"
        )
    elif not plan.best.is_measured:
        said.append(
            f"v({plan.gamma + 1}) lies on a straight line between two measured row counts; measure "
            "it before relying on it"
        )
    if plan.gamma == len(plan.rows) - 1 and plan.gamma:
        said.append(
            f"gamma {plan.gamma} is the largest that was weighed; a larger one may gain more"
        )
    return said


def _gamma_max(asked: int | None, verify_cost: MeasuredVerifyCost | None) -> int:
    reach = None if verify_cost is None else verify_cost.most_rows - 1
    if asked is None:
        return min(DEFAULT_GAMMA_MAX, reach or DEFAULT_GAMMA_MAX)
    check_gamma(asked, low=1, name="gamma_max")
    if reach is not None and asked > reach:
        raise RequestError(
            f"gamma_max={asked} needs the time of a pass over {asked + 1} rows, but the verify "
            f"costs end at {reach + 1}; measure further, or ask for at most {reach}"
        )
    return asked


def _row(
    alpha: float, gamma: int, costs: Costs, verify_cost: MeasuredVerifyCost | None
) -> GammaRow:
    ratio = theory.break_even_cost_ratio(alpha, gamma, costs) if gamma else -1.0
    time = latency_spread(alpha, gamma, costs, TEXT_TOKENS)
    return GammaRow(
        gamma=gamma,
        expected_tokens=theory.expected_tokens(alpha, gamma),
        round_cost=costs.round_cost(gamma),
        speedup=theory.speedup(alpha, gamma, costs),
        break_even_cost_ratio=ratio if ratio > 0 else None,
        deviation=time.deviation / time.mean,
        is_measured=verify_cost is not None and verify_cost.is_measured(gamma + 1),
    )

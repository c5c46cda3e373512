"""What speculation gains, from acceptance and costs.

Notation of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192): `alpha` is the chance that a draft which is reached is accepted, `gamma` drafts
make a round, `cost_ratio` (c) is the time of a draft step over that of a plain target step. The
paper lets verifying cost no more than a plain step. On a real device it does: `verify_cost` (v) is
T(m)/T(1), the time of a target pass over m rows by that of a plain step, and `overhead` what else a
round takes beyond a plain step, in the same unit.

    E = (1 - alpha^(gamma+1)) / (1 - alpha)                            Equation 1
    S = E / (gamma c + v(gamma+1) + overhead)                          Theorem 3.8 where v = 1

Knows nothing of devices, models and files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from spec_export.calibration.ranges import check_alpha, check_cost, check_gamma

VerifyCost = Callable[[int], float]
_TIE = 1e-12  # gains smaller than rounding are none: of equal gammas the smallest is taken
_BISECTIONS = 60


def free_verify(rows: int) -> float:
    """v(m) = 1: verifying costs what a plain step costs, as in Theorem 3.8."""
    return 1.0


@dataclass(frozen=True)
class Costs:
    """What a round takes, in units of a plain target step.

    Attributes:
        cost_ratio: c, of a draft step.
        verify_cost: v, of a target pass by its rows.
        overhead: of whatever a round does besides, beyond what a plain step does besides.
    """

    cost_ratio: float
    verify_cost: VerifyCost = free_verify
    overhead: float = 0.0

    def __post_init__(self) -> None:
        check_cost(self.cost_ratio)
        check_cost(self.overhead, "overhead")

    def round_cost(self, gamma: int) -> float:
        """Time of a round of `gamma` drafts over that of a plain step; 1 without drafts."""
        check_gamma(gamma)
        if gamma == 0:
            return 1.0
        return gamma * self.cost_ratio + self.verify_cost(gamma + 1) + self.overhead


def expected_tokens(alpha: float, gamma: int) -> float:
    """E: tokens a round emits on average, the drafts it accepts and one more.

    Source: arXiv 2211.17192, Equation 1, summed term by term so that alpha = 1 is no exception.
    """
    check_alpha(alpha)
    check_gamma(gamma)
    return math.fsum(alpha**k for k in range(gamma + 1))


def speedup(alpha: float, gamma: int, costs: Costs) -> float:
    """S: how many times faster than plain decoding.

    Source: arXiv 2211.17192, Theorem 3.8, with the measured cost of verifying in place of 1.
    """
    return expected_tokens(alpha, gamma) / costs.round_cost(gamma)


def speedup_of_one_draft(alpha: float, cost_ratio: float) -> float:
    """(1 + alpha) / (1 + c): what one draft gains; more than 1 exactly where alpha > c.

    Source: arXiv 2211.17192, Corollary 3.9. Verifying is taken to be free.
    """
    check_alpha(alpha)
    check_cost(cost_ratio)
    return (1 + alpha) / (1 + cost_ratio)


def operations(alpha: float, gamma: int, operations_ratio: float) -> float:
    """Arithmetic operations per token, over those of plain decoding.

    Args:
        alpha: acceptance of a draft that is reached.
        gamma: drafts a round.
        operations_ratio: operations of the draft per token over those of the target (c-hat).

    Source: arXiv 2211.17192, Theorem 3.11.
    """
    check_cost(operations_ratio, "operations_ratio")
    return (gamma * operations_ratio + gamma + 1) / expected_tokens(alpha, gamma)


def memory_reads(alpha: float, gamma: int) -> float:
    """Reads of the target's weights and caches per token, over those of plain decoding: 1/E.

    Source: arXiv 2211.17192, section 3.4.
    """
    return 1 / expected_tokens(alpha, gamma)


def most_tokens(alpha: float) -> float:
    """1/(1 - alpha): tokens a round would emit if it always stopped drafting just in time.

    What no fixed gamma reaches. Infinite for alpha = 1. Source: arXiv 2211.17192, section 3.5.
    """
    check_alpha(alpha)
    return math.inf if alpha == 1 else 1 / (1 - alpha)


def best_gamma(alpha: float, costs: Costs, gamma_max: int) -> int:
    """The number of drafts with the largest speed-up; 0: do not speculate.

    Source: arXiv 2211.17192, section 3.5 (Figure 3), by search over whole numbers. No convexity is
    assumed: a measured v may have cliffs.
    """
    check_gamma(gamma_max, name="gamma_max")
    best, best_speedup = 0, 1.0
    for gamma in range(1, gamma_max + 1):
        found = speedup(alpha, gamma, costs)
        if found > best_speedup * (1 + _TIE):
            best, best_speedup = gamma, found
    return best


def break_even_cost_ratio(alpha: float, gamma: int, costs: Costs) -> float:
    """The draft cost below which `gamma` drafts a round gain: S = 1 solved for c.

    Negative where they cannot gain even with free drafts. `costs.cost_ratio` plays no part. With
    v = 1 and gamma = 1 it is alpha (arXiv 2211.17192, Corollary 3.9).
    """
    check_gamma(gamma, low=1)
    rest = costs.verify_cost(gamma + 1) + costs.overhead
    return (expected_tokens(alpha, gamma) - rest) / gamma


def break_even_over_gammas(alpha: float, costs: Costs, gamma_max: int) -> float:
    """The draft cost below which some gamma from 1 to `gamma_max` gains."""
    check_gamma(gamma_max, low=1, name="gamma_max")
    return max(break_even_cost_ratio(alpha, gamma, costs) for gamma in range(1, gamma_max + 1))


def break_even_alpha(costs: Costs, gamma_max: int) -> float | None:
    """The acceptance above which some gamma gains; None where even alpha = 1 does not.

    E grows with alpha and the costs do not depend on it, so that the gain of the best gamma crosses
    1 once, and bisection finds where. With v = 1 it is c (arXiv 2211.17192, Corollary 3.9).
    """
    if best_gamma(1.0, costs, gamma_max) == 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if best_gamma(middle, costs, gamma_max):
            high = middle
        else:
            low = middle
    return high


def batched(verify_cost: VerifyCost, batch: int) -> VerifyCost:
    """What v is for a batch: v(m B)/v(B); B sequences verify m rows each in a pass of m B rows.

    Speculation lives on rows that cost next to nothing; a large batch has used them up. Use it with
    the cost ratio that was measured at the same batch.
    """
    check_gamma(batch, low=1, name="batch")
    return lambda rows: verify_cost(rows * batch) / verify_cost(batch)

"""What a comparison of precisions found: a part of `profile.json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    """How near a target is to the one in float32.

    Attributes:
        perplexity: of the prompts.
        agreement: share of tokens of the continued texts with the same most probable one.
        divergence: mean of the sum of p log(p / p'), p the float32 one, over the same tokens.
        tokens: of the continued texts.
    """

    perplexity: float
    agreement: float
    divergence: float
    tokens: int


@dataclass(frozen=True)
class TargetPrecision:
    """A target in a precision.

    Attributes:
        name: of the precision.
        weights_bytes: of its weights.
        quality: against float32.
        rows: of passes, ascending: every number up to the widest where the engine has them, else
            those it was built for.
        rows_ms: of a pass over each of them.
        cliffs: rows at which each further one takes a quarter of the pass before, or more.
    """

    name: str
    weights_bytes: int
    quality: Quality
    rows: tuple[int, ...]
    rows_ms: tuple[float, ...]
    cliffs: tuple[int, ...]


@dataclass(frozen=True)
class DraftPrecision:
    """A draft in a precision: its weights, and times of its passes."""

    name: str
    weights_bytes: int
    catch_up_ms: float
    step_ms: float


@dataclass(frozen=True)
class Pairing:
    """A target and a draft together.

    Attributes:
        target: name of its precision.
        draft: name of its precision; None: look-up.
        alpha: share of reached drafts that are accepted; None where none was reached.
        gamma: drafts a round that are best; 0: none.
        speedup: predicted over the fastest plain decoding of the bundle as it was built.
        plain_speedup: of this target without drafts.
        is_best: no other is as fast, as near to float32 and as small, and better in one of these.
        measured: the speed-up as it was decoded; None: it was not, since another draft is faster.
    """

    target: str
    draft: str | None
    alpha: float | None
    gamma: int
    speedup: float
    plain_speedup: float
    is_best: bool
    measured: float | None = None


@dataclass(frozen=True)
class Precisions:
    """What a comparison of precisions found; the first of each is the bundle as it was built."""

    targets: tuple[TargetPrecision, ...]
    drafts: tuple[DraftPrecision, ...]
    pairings: tuple[Pairing, ...]

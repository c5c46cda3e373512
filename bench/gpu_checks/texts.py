"""What a bundle writes: the same text with drafts and without, of the right law, and how fast."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu_checks.report import Skip

PROMPT = "One two three four five six seven, one two three four five six seven, one two three"


def identity(session: Any) -> tuple[str, dict[str, Any]]:
    """The greedy text with drafts and without."""
    from spec_export.runtime.compare import check_session

    found = check_session(session, tokens=64)
    exactness = session.opened.exactness
    assert not (found.is_promised and found.departs_at is not None), (
        f"token {found.departs_at} differs though exactness is {exactness}"
    )
    same = "equal" if found.departs_at is None else f"differs at token {found.departs_at}"
    shown = f"{found.tokens} tokens {same}, {found.accepted} drafts accepted, {exactness}"
    return shown, dataclasses.asdict(found)


def law(opened: Any, texts: int) -> tuple[str, dict[str, Any]]:
    """Chi-square of what the bundle's own sampling engines emit."""
    from spec_export.runtime.law import check_law

    found = check_law(opened, texts=texts)
    assert all(one.holds for one in found), "; ".join(
        f"rule {one.rule}: {one.statistic:.0f} over {one.limit:.0f}" for one in found
    )
    rules = ", ".join(f"{one.rule} {one.statistic:.0f}/{one.limit:.0f}" for one in found)
    return f"{rules} ({texts} texts each)", {one.rule: one.statistic for one in found}


def session_law(
    session: Any, rule: str, texts: int = 400, temperature: float = 1.0
) -> tuple[str, dict[str, Any]]:
    """Chi-square of the first three tokens of texts, through rounds as they are served.

    Every text is begun, prefilled and drawn under a seed of its own, two drafts a round, the next
    round begun before the last was read where the device lets it. The law they are held against is
    computed from the target's logits. At most once in a million an exact sampler fails.
    """
    from spec_export.runtime import Sampling

    if session.gamma < 2:
        raise Skip("rounds of this bundle hold less than two drafts")
    prompt = session.opened.text.encode(PROMPT)
    cells, counts = exact_law(session.opened, prompt), Counter[tuple[int, ...]]()
    ahead = 0
    for seed in range(texts):
        session.begin(Sampling(temperature, seed, rule=rule))
        session.prefill(prompt)
        while len(session.history) < len(prompt) + 3:
            ahead += session._pipeline._ahead is not None
            session.round(2, then=2)
        counts[cell_of(cells, session.history[len(prompt) : len(prompt) + 3])] += 1
    assert ahead or not session._pipeline.is_on, "no round was begun before the last was read"
    statistic, limit = chi_square(
        [texts * cells[cell] for cell in cells], [counts[c] for c in cells]
    )
    assert statistic <= limit, f"rule {rule}: {statistic:.0f} over {limit:.0f}"
    shown = f"{statistic:.0f}/{limit:.0f} ({texts} texts, {ahead} rounds begun ahead)"
    return shown, {"statistic": statistic, "limit": limit, "ahead": ahead}


def exact_law(opened: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probabilities of what a text begins with at temperature 1; -1 is any token not named."""
    import numpy as np

    from spec_export.engines.passes import PassRunner

    runner = PassRunner(opened.device, opened.target, opened.manifest.models["target"])
    runner.prefill(np.array(prompt))

    def following(*tokens: int) -> Any:
        passed, row = np.array([prompt[-1], *tokens]), np.array([len(tokens)])
        logits = runner.run("verify", passed, len(prompt) - 1, row)[0].astype(np.float64)
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def spread(tokens: tuple[int, ...], mass: float) -> None:
        if len(tokens) == 3:
            cells[tokens] = mass
            return
        law = following(*tokens)
        named = [int(token) for token in np.argsort(-law)[: (6, 3, 2)[len(tokens)]]]
        for token in named:
            spread((*tokens, token), mass * float(law[token]))
        cells[(*tokens, -1)] = mass * (1 - float(law[named].sum()))

    cells: dict[tuple[int, ...], float] = {}
    spread((), 1.0)
    return cells


def cell_of(cells: dict[tuple[int, ...], float], tokens: Sequence[int]) -> tuple[int, ...]:
    """The cell that names most of the tokens."""
    names = [tuple(tokens), *((*tokens[:known], -1) for known in (2, 1, 0))]
    return next(name for name in names if name in cells)


def chi_square(expected: list[float], observed: list[int]) -> tuple[float, float]:
    """Pearson's statistic and its limit; cells that expect less than 5 are one cell."""
    from spec_export.runtime.law import chi_square_limit

    pairs = sorted(zip(expected, observed, strict=True), reverse=True)
    while len(pairs) > 1 and pairs[-1][0] < 5:
        (a, i), (b, j) = pairs.pop(), pairs.pop()
        pairs = sorted([*pairs, (a + b, i + j)], reverse=True)
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in pairs)
    return float(statistic), chi_square_limit(len(pairs) - 1)


def decode(session: Any, tokens: int) -> Any:
    """Generate greedily; the statistics."""
    from spec_export.runtime import Request, generate

    prompt = session.opened.text.encode(PROMPT)
    request = Request(max_tokens=tokens, ignore_end=True)
    return [piece.stats for piece in generate(session, prompt, request)][-1]


def speed_up(session: Any, tokens: int) -> tuple[str, dict[str, Any]]:
    """Against plain decoding, the ways taking turns."""
    from spec_export.runtime import Request
    from spec_export.runtime.compare import compare_decoding

    prompt = session.opened.text.encode(PROMPT)
    found = compare_decoding(session, prompt, Request(ignore_end=True), tokens)
    assert not found.is_broken, f"token {found.exact_departs_at} differs from exact plain decoding"
    ours, plain = found.speculative.median, found.fast_plain.median
    shown = f"{found.speedup:.2f}x ({ours:.0f} tokens/s against {plain:.0f}, one row a step)"
    return shown, {"speedup": found.speedup, "tokens_per_s": ours, "plain": plain}

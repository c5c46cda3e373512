"""Decode speed of a bundle on Spec-Bench prompts: fast plain, exact plain and speculative.

    python bench/decode.py BUNDLE [--per-category 2] [--tokens 96] [--temperature 0]

The modes take turns on every prompt, so that a drifting machine slows all of them. Greedy unless a
temperature is given. `tokens_per_s` is tokens after the first by the time after the first, summed
over prompts: prefill is left out. Prompts longer than the context are cut from the front. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from prompts import QUESTIONS, chatml_prompts

from spec_export.runtime import Request, Sampling, Session, Stats, generate, open_runtime

MODES = {
    "fast_plain": {"gamma": 0, "fast_plain": True},
    "exact_plain": {"gamma": 0, "fast_plain": False},
    "speculative": {"gamma": None, "fast_plain": False},
}


@dataclass
class Total:
    """Sums over prompts of one mode."""

    tokens: int = 0
    ms: float = 0.0
    passes: int = 0
    accepted: int = 0
    rejections: int = 0
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, stats: Stats, tokens: tuple[int, ...]) -> None:
        """Add one generation."""
        self.tokens += stats.emitted - 1
        self.ms += stats.decode_ms
        self.passes += stats.rounds + stats.plain_steps
        self.accepted += stats.accepted
        self.rejections += stats.rejections
        self.texts.append(tokens)

    def summary(self) -> dict[str, float | None]:
        """Figures of the mode."""
        tested = self.accepted + self.rejections
        return {
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / self.ms * 1e3, 2) if self.ms else None,
            "tokens_per_pass": round(self.tokens / self.passes, 3) if self.passes else None,
            "alpha": round(self.accepted / tested, 3) if tested else None,
        }


def run_one(session: Session, ids: list[int], request: Request) -> tuple[Stats, tuple[int, ...]]:
    """Generate to the end; returns the counts and the ids."""
    tokens: list[int] = []
    for piece in generate(session, ids, request):
        tokens += piece.tokens
    return piece.stats, tuple(tokens)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-chars", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    opened = open_runtime(arguments.bundle, threads=arguments.threads)
    session = Session(opened)
    prompts = chatml_prompts(arguments.questions, arguments.per_category, arguments.max_chars)
    totals = {mode: Total() for mode in MODES}
    by_category: dict[str, dict[str, Total]] = defaultdict(lambda: {m: Total() for m in MODES})
    longest = opened.manifest.max_len - arguments.tokens
    warm_up = Request(max_tokens=8)
    run_one(session, opened.text.encode(prompts[0][1]), warm_up)
    for category, prompt in prompts:
        ids = opened.text.encode(prompt)[-longest:]
        for mode, options in MODES.items():
            sampling = Sampling(arguments.temperature, 0)
            request = Request(max_tokens=arguments.tokens, sampling=sampling, **options)  # type: ignore[arg-type]
            stats, tokens = run_one(session, ids, request)
            totals[mode].add(stats, tokens)
            by_category[category][mode].add(stats, tokens)

    print(f"{'category':>16} {'fast':>8} {'exact':>8} {'spec':>8}  spec/fast  tokens/pass")
    for category, modes in [*by_category.items(), ("all", totals)]:
        speeds = [modes[m].summary()["tokens_per_s"] or 0.0 for m in MODES]
        passes = modes["speculative"].summary()["tokens_per_pass"]
        print(
            f"{category:>16} {speeds[0]:>8.2f} {speeds[1]:>8.2f} {speeds[2]:>8.2f} "
            f"{speeds[2] / speeds[0]:>9.2f}x {passes:>11}"
        )
    same = totals["exact_plain"].texts == totals["speculative"].texts
    result = {
        "bundle": arguments.bundle.name,
        "method": opened.manifest.method,
        "gamma": opened.manifest.gamma,
        "exactness": opened.exactness,
        "identical_to_exact_plain": same if arguments.temperature == 0 else None,
        **{mode: total.summary() for mode, total in totals.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""How many drafts stay in a round, by rule and draft sampling, on a bundle.

    python bench/acceptance.py BUNDLE [--texts 40] [--tokens 100] [--temperature 0.6 1.0]

Every way decodes the same prompts under the same seeds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from spec_export.runtime import Request, Sampling, Session, generate, open_runtime
from spec_export.runtime.sampling import plan_for

PROMPTS = ("In the beginning", "And it came to pass", "Once upon a time", "def main():")
WAYS: tuple[dict[str, Any], ...] = (
    {"rule": "reject"},
    {"rule": "block"},
    {"rule": "invariant"},
    {"rule": "reject", "draft": "greedy"},
    {"rule": "invariant", "draft": "greedy"},
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.6, 1.0])
    arguments = parser.parse_args()

    opened = open_runtime(arguments.bundle)
    session, found, seen = Session(opened), [], set()
    for temperature in arguments.temperature:
        for way in WAYS:
            plan = plan_for(Sampling(temperature, 0, **way), opened.manifest)
            if (temperature, plan) in seen:
                continue  # without a drafting model several are the same
            seen.add((temperature, plan))
            accepted = rounds = 0
            for seed in range(arguments.texts):
                sampling = Sampling(temperature, seed, **way)
                request = Request(arguments.tokens, sampling, ignore_end=True)
                prompt = opened.text.encode(PROMPTS[seed % len(PROMPTS)])
                stats = [piece.stats for piece in generate(session, prompt, request)][-1]
                accepted, rounds = accepted + stats.accepted, rounds + stats.rounds
            mean = accepted / rounds if rounds else 0.0
            name = ", ".join(str(value) for value in way.values())
            print(f"T={temperature:<4} {name:<20} {mean:.3f} drafts a round, {rounds} rounds")
            found.append({"temperature": temperature, **way, "accepted_per_round": round(mean, 4)})
    print(json.dumps({"bundle": arguments.bundle.name, "gamma": session.gamma, "results": found}))


if __name__ == "__main__":
    main()

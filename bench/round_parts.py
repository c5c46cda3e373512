"""Where the time of a round goes: target, draft, propose, accept, host.

    python bench/round_parts.py BUNDLE [--rounds 100] [--temperature 0.8] [--rule block]
        [--top-k 50] [--top-p 0.95] [--min-p 0.02]

Every engine call is timed from outside; what is left of a round is the host's, noise included.
`sampling` is the share of accept, every propose and the host. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from prompts import chatml_prompts

from spec_export.engines.backend import Call
from spec_export.runtime import Sampling, Session, open_runtime
from spec_export.runtime.drafts import ModelDraft


class Timed:
    """A call that adds its time to a part."""

    def __init__(self, call: Call, part: str, spent: dict[str, float]) -> None:
        self._call, self._part, self._spent = call, part, spent

    def enqueue(self) -> None:
        """Run and account."""
        started = time.perf_counter()
        self._call.enqueue()
        self._spent[self._part] += time.perf_counter() - started


def instrument(session: Session, spent: dict[str, float]) -> None:
    """Put a clock around every engine call of a session."""

    def timed_role(bound: Any, part: str) -> Any:
        return type(bound)(Timed(bound.call, part, spent), bound.buffers, bound.rows)

    session._roles.update({n: timed_role(role, "target") for n, role in session._roles.items()})
    calls = session._rounds.sampling
    calls.accept = {name: Timed(call, "accept", spent) for name, call in calls.accept.items()}
    calls.races = Timed(calls.races, "accept", spent) if calls.races else None
    calls.sample = {name: Timed(call, "accept", spent) for name, call in calls.sample.items()}
    calls.propose = [Timed(call, "propose", spent) for call in calls.propose]
    if isinstance(session.draft, ModelDraft):
        session.draft._passes[:] = [timed_role(p, "draft") for p in session.draft._passes]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rule", choices=("reject", "block", "invariant"), default=None)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    opened = open_runtime(arguments.bundle, threads=arguments.threads)
    session = Session(opened)
    sampling = Sampling(
        arguments.temperature,
        1,
        arguments.rule,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
    )
    session.begin(sampling)
    spent: dict[str, float] = defaultdict(float)
    instrument(session, spent)
    shares: dict[str, list[float]] = defaultdict(list)
    accepted: list[int] = []
    ids = opened.text.encode(chatml_prompts()[6][1])[:256]
    while len(shares["round_ms"]) < arguments.rounds:
        session.rewind(0)
        session.prefill(ids)
        session.first()
        for _ in range(min(32, session.room // (session.gamma + 1))):
            spent.clear()
            started = time.perf_counter()
            result = session.round(session.gamma)
            total = time.perf_counter() - started
            if result.n_draft:
                shares["round_ms"].append(total * 1e3)
                accepted.append(result.n_accepted)
                shares["host"].append(total - sum(spent.values()))
                for part in ("target", "draft", "propose", "accept"):
                    shares[part].append(spent.get(part, 0.0))
    medians = {p: statistics.median(v) * 1e3 for p, v in shares.items() if p != "round_ms"}
    whole = statistics.median(shares["round_ms"])
    outside = medians["propose"] + medians["accept"] + medians["host"]
    print(f"{len(shares['round_ms'])} rounds with drafts, median {whole:.2f} ms")
    for part, ms in medians.items():
        print(f"{part:>8} {ms:8.3f} ms {ms / whole:7.2%}")
    result = {
        "bundle": arguments.bundle.name,
        "temperature": sampling.temperature,
        "rule": sampling.rule,
        "filters": [sampling.top_k, sampling.top_p, sampling.min_p],
        "accepted_per_round": round(statistics.mean(accepted), 3),
        "round_ms": round(whole, 3),
        **{f"{part}_ms": round(ms, 4) for part, ms in medians.items()},
        "sampling": round(outside / whole, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

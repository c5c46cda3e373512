"""What sampling adds to a round: accept and every propose, by variant and vocabulary, no model.

    python bench/sampling_cost.py [--vocabulary 49152 151936] [--gamma 4] [--rounds 40]

The calls of a session run on rows of logits as a language model leaves them: Zipf's law with noise,
sharpened so that 95 % of a row lie on some hundred tokens. Host work is in: noise, and for `edits`
the counts of the text. `draft confidence` is what an early exit adds to a draft, read by the host.
`share` holds the best round of a variant against `--round-ms`, where given.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.engines.backend import Buffer
from spec_export.engines.graphs import SamplingSpec, TensorSpec
from spec_export.engines.ort import OrtBackend
from spec_export.export.sampling_graphs import sampling_graphs
from spec_export.runtime.buffers import HostMirror, Report, allocate_round
from spec_export.runtime.confidence import DraftConfidence
from spec_export.runtime.sampling import Sampling, plan_for
from spec_export.runtime.sampling_calls import SamplingCalls

CAPACITY, TEXT = 1152, 400
THREE = {"top_k": 50, "top_p": 0.95, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "no_repeat_ngram": 3}
VARIANTS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(**PENALTIES),
    "greedy, mask": Sampling(banned_tokens=(1, 2, 3)),
    "reject": Sampling(0.8, rule="reject"),
    "reject, greedy draft": Sampling(0.8, rule="reject", draft="greedy"),
    "block": Sampling(0.8, rule="block"),
    "invariant": Sampling(0.8, 1),
    "reject, top-k top-p min-p": Sampling(0.8, rule="reject", **THREE),
    "invariant, top-k top-p min-p": Sampling(0.8, 1, **THREE),
    "reject, top-p alone": Sampling(1.0, rule="reject", top_p=0.95),
    "reject, top-k 1000": Sampling(1.0, rule="reject", top_k=1000),
    "reject, typical": Sampling(1.0, rule="reject", typical_p=0.9),
    "reject, penalties": Sampling(0.8, rule="reject", **PENALTIES),
    "reject, mask": Sampling(0.8, rule="reject", banned_tokens=(1, 2, 3)),
    "reject, everything": Sampling(
        0.8, rule="reject", banned_tokens=(1, 2, 3), **THREE, **PENALTIES
    ),
}


class Stub:
    """As much of an opened bundle as sampling sees: graphs of one vocabulary, pinned and open."""

    def __init__(self, backend: OrtBackend, vocabulary: int, gamma: int, folder: Path) -> None:
        self.device = backend.device
        self.sampling: dict[str, Any] = {}
        for name, graph in sampling_graphs(vocabulary, vocabulary).items():
            ir.save(graph, folder / f"{name}.onnx")
            dims = {str(dim) for value in graph.graph.inputs for dim in value.shape or ()}
            for rows in (gamma + 1,) if "M" in dims else (1, gamma + 1) if "R" in dims else (0,):
                pins = {"C": CAPACITY, "G": gamma, "D": gamma, "M": gamma + 1, "R": rows}
                pins["W"] = 2 * (gamma + 1)
                label = f"{name}.{rows}" if rows else name
                backend.compile_sampling(folder / f"{name}.onnx", pins, folder / f"{label}.pinned")
                values = (graph.graph.inputs, graph.graph.outputs)
                spec = SamplingSpec("", *(tuple(tensor(v, pins) for v in side) for side in values))
                self.sampling[label] = backend.open_sampling(folder / f"{label}.pinned", spec)
        model = SimpleNamespace(vocabulary=vocabulary)
        self.manifest = SimpleNamespace(
            models={"target": model, "draft": model},
            method="model",
            gammas=(gamma,),
            capacity=CAPACITY,
            sampling=self.sampling,
            text=SimpleNamespace(end_ids=(2,)),
        )


def tensor(value: ir.Value, pins: dict[str, int]) -> TensorSpec:
    """The description of an input or output."""
    assert value.name is not None and value.shape is not None and value.dtype is not None
    dims = tuple(d if isinstance(d, int) else pins[str(d.value)] for d in value.shape)
    return TensorSpec(value.name, str(value.dtype.numpy()), dims)  # type: ignore[arg-type]


def rows_like_a_model(rng: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """`[1, rows, V]` logits; ids are ordered by frequency, as those of a tokenizer nearly are."""
    rank = np.arange(1, vocabulary + 1)
    logits = -1.2 * np.log(rank) + rng.normal(size=(1, rows, vocabulary)) * 1.5
    return logits.astype(np.float32)


def measure(stub: Any, sampling: Sampling, vocabulary: int, gamma: int, rounds: int) -> list[float]:
    """Milliseconds of each round's sampling."""
    rng, device = np.random.default_rng(0), stub.device
    buffers = allocate_round(device, gamma)
    host, report = HostMirror(device, buffers), Report(device, buffers)
    logits = device.allocate((1, gamma + 1, vocabulary), np.float32)
    draft_logits = [device.allocate((1, 1, vocabulary), np.float32) for _ in range(gamma)]
    role = SimpleNamespace(buffers={"logits": logits}, rows=gamma + 1)
    calls = SamplingCalls(
        stub,
        plan_for(sampling, stub.manifest),
        buffers,
        {"verify": role},
        draft_logits,  # type: ignore[dict-item]
    )
    calls.begin(sampling)
    calls.grow(rng.integers(vocabulary, size=TEXT).tolist(), is_prompt=True)
    host.set_n_draft(gamma)
    spent, committed = [], TEXT
    for place in range(rounds):
        fill(logits, draft_logits, rows_like_a_model(rng, gamma + 1, vocabulary), rng)
        host.set_place(committed, 0, 0)
        started = time.perf_counter()
        calls.draw(place, committed, committed + gamma + 1, gamma)
        if calls.races is not None:
            calls.races.enqueue()
        for i in range(gamma):
            calls.propose[i].enqueue()
        calls.accept["verify"].enqueue()
        report.start()
        report.wait()
        emitted = list(report.tokens[: report.n_accepted[0] + 1])
        calls.grow(emitted)
        committed += len(emitted)
        spent.append((time.perf_counter() - started) * 1e3)
    return spent[rounds // 5 :]


def measure_confidence(stub: Any, vocabulary: int, times: int) -> list[float]:
    """Milliseconds of looking how sure a draft is, as a round does before each draw."""
    rng, logits = np.random.default_rng(0), stub.device.allocate((1, 1, vocabulary), np.float32)
    confidence, spent = DraftConfidence(stub, [logits]), []
    for _ in range(times):
        logits.host[...] = rows_like_a_model(rng, 1, vocabulary)
        started = time.perf_counter()
        confidence.read(0)
        spent.append((time.perf_counter() - started) * 1e3)
    return spent[times // 5 :]


def fill(logits: Buffer, drafts: list[Buffer], rows: np.ndarray, rng: np.random.Generator) -> None:
    """Put the target's rows in place, and on the draft's side the same with some noise."""
    assert logits.host is not None
    logits.host[...] = rows
    for i, draft in enumerate(drafts):
        assert draft.host is not None
        draft.host[0, 0] = rows[0, i] + rng.normal(size=rows.shape[2]) * 0.3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151_936])
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--round-ms", type=float, default=None)
    arguments = parser.parse_args()
    backend, found = OrtBackend(), []
    for vocabulary in arguments.vocabulary:
        with tempfile.TemporaryDirectory() as folder:
            stub = Stub(backend, vocabulary, arguments.gamma, Path(folder))
            for name, sampling in (("draft confidence", None), *VARIANTS.items()):
                if sampling is None:
                    spent = measure_confidence(stub, vocabulary, arguments.rounds)
                else:
                    spent = measure(stub, sampling, vocabulary, arguments.gamma, arguments.rounds)
                result: dict[str, Any] = {
                    "vocabulary": vocabulary,
                    "variant": name,
                    "median_ms": round(statistics.median(spent), 3),
                    "best_ms": round(min(spent), 3),
                }
                share = ""
                if arguments.round_ms:
                    result["share"] = round(min(spent) / arguments.round_ms, 4)
                    share = f"{result['share']:8.2%}"
                found.append(result)
                median, best = result["median_ms"], result["best_ms"]
                print(f"V={vocabulary:<7} {name:<30} {median:8.3f} ms, best {best:8.3f} ms{share}")
    print(json.dumps({"gamma": arguments.gamma, "rounds": arguments.rounds, "results": found}))


if __name__ == "__main__":
    main()

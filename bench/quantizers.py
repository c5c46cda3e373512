"""How far each quantizer takes a target from float32, and what it takes to quantize, on a text.

    python bench/quantizers.py EXPORTED [--text FILE] [--tokens 600] [--weights int4]
        [--quantizers rtn awq ...] [--bundle-less]

EXPORTED is in float32. Of each quantizer: mean Kullback-Leibler divergence of its target from the
float32 one, share of tokens with the same most probable next one, the seconds of quantizing the
target, calibration texts included, and its weights. All have the format and options that `build
--weights` gives them on a processor; int8, to nearest, comes as a last row. The text is read by the
passes of a bundle, products by few bits in 8 bits; with `--bundle-less` by a single pass of the
exported graph, nothing lowered or fused, so that only the rounding of weights is left.

The default text is this package's prompts. Quantizers calibrate on other texts of the package, and
a text they calibrated on would favour those that do. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

from spec_export.calibration.prompts import default_prompts
from spec_export.calibration.teacher import logits_along
from spec_export.console import Steps
from spec_export.engines.build import BuildOptions, capacity_for, pinned_models, read_exported
from spec_export.engines.ort import OrtBackend, default_threads, open_session
from spec_export.engines.passes import PassRunner, whole_pass
from spec_export.quantizing import Quantizing, quantize_into

QUANTIZERS = ("rtn", "k-quant", "hqq", "gptq", "awq")
GAMMA = 4


def read_by_passes(exported: Path, ids: np.ndarray, folder: Path) -> np.ndarray:
    """Logits of every token after the first, by passes as a bundle has them."""
    graphs, backend = read_exported(exported), OrtBackend()
    positions = graphs.models["target"].max_position
    options = BuildOptions(gamma=GAMMA, max_len=min(positions, len(ids) + GAMMA + 2))
    spec = pinned_models(graphs, options)["target"]
    gamma = 0 if graphs.method == "none" else GAMMA
    source, out = exported / spec.file, folder / "compiled"
    compiled = backend.compile_model(source, spec, capacity_for(options, gamma), out, True)
    runner = PassRunner(backend.device, backend.open_model(out / compiled.file, spec), spec)
    return logits_along(runner, "verify" if gamma else "decode", ids, 1)


def read_whole(exported: Path, ids: np.ndarray) -> np.ndarray:
    """The same by one pass of the graph as it was exported."""
    spec = read_exported(exported).models["target"]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_session(exported / spec.file, options, default_threads())
    read = ids[:-1].tolist()
    given = {**whole_pass(spec, read), "logit_rows": np.arange(len(read))}
    (logits,) = session.run(["logits"], given)
    return np.asarray(logits[0])


def apart(exact: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Mean of the sum of p log(p / p'), and share of rows with the same best."""
    total = 0.0
    for row, rounded in zip(exact, other, strict=True):
        p, q = log_softmax(row), log_softmax(rounded)
        total += float((np.exp(p) * (p - q)).sum())
    same = (exact.argmax(axis=1) == other.argmax(axis=1)).mean()
    return total / len(exact), float(same)


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Of one row, in float64."""
    wide = row.astype(np.float64) - row.max()
    return np.asarray(wide - np.log(np.exp(wide).sum()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("exported", type=Path)
    parser.add_argument("--text", type=Path, help="UTF-8; its first tokens are read")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--weights", choices=["int4", "int8"], default="int4")
    parser.add_argument("--quantizers", nargs="+", choices=QUANTIZERS, default=[*QUANTIZERS])
    parser.add_argument("--bundle-less", action="store_true")
    arguments = parser.parse_args()

    exported: Path = arguments.exported
    graphs = read_exported(exported)
    if arguments.text is None:
        text = "\n".join(prompt.text for prompt in default_prompts())
    else:
        text = arguments.text.read_text(encoding="utf-8")
    found = Tokenizer.from_file(str(exported / graphs.text.tokenizer)).encode(text).ids
    most = min(arguments.tokens, graphs.models["target"].max_position)
    ids = np.array(found[:most], np.int64)
    if len(ids) < 2:
        parser.error("the text has fewer than 2 tokens")

    def read(directory: Path, folder: Path) -> np.ndarray:
        if arguments.bundle_less:
            return read_whole(directory, ids)
        return read_by_passes(directory, ids, folder)

    rows = [(arguments.weights, quantizer) for quantizer in arguments.quantizers]
    if ("int8", "rtn") not in rows:
        rows.append(("int8", "rtn"))
    results = []
    with tempfile.TemporaryDirectory() as place:
        exact = read(exported, Path(place))
        print(f"{len(exact)} tokens" + (", the graph alone" if arguments.bundle_less else ""))
    for weights, quantizer in rows:
        asked = Quantizing(weights=weights, quantizer=quantizer)
        wanted = {"target": asked.wanted(graphs, "onnxruntime")["target"]}
        with tempfile.TemporaryDirectory() as place, Steps(quiet=True) as steps:
            small = Path(place) / "small"
            small.mkdir()
            started = time.perf_counter()
            quantize_into(exported, graphs, small, wanted, asked, steps)
            spent = time.perf_counter() - started
            size = read_exported(small).models["target"].parameters_bytes
            divergence, same = apart(exact, read(small, Path(place)))
        print(
            f"{weights} {quantizer:<8} divergence {divergence:.4f}, same best token {same:6.2%}, "
            f"{spent:6.1f} s, {size / 1e6:.2f} MB",
            flush=True,
        )
        results.append(
            {
                "weights": weights,
                "quantizer": quantizer,
                "divergence": round(divergence, 5),
                "same_best_token": round(same, 4),
                "seconds": round(spent, 2),
                "weights_bytes": size,
            }
        )
    described = {"exported": exported.name, "tokens": len(exact), "results": results}
    print(json.dumps({**described, "bundle_less": arguments.bundle_less}))


if __name__ == "__main__":
    main()

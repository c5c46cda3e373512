"""What a float32 model does with calibration texts, for quantizers that go by it.

The exported graph itself is run, over caches as the runtime has them, with what matrices are
multiplied by as further outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.errors import RequestError
from spec_export.engines.graphs import ModelSpec
from spec_export.engines.ort import open_session
from spec_export.engines.passes import whole_pass
from spec_export.engines.products import sample_names
from spec_export.engines.quantize import Observed

_STEP = "running calibration texts"
_FEWEST_ROWS = 8
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def observe(
    graph: Path,
    spec: ModelSpec,
    texts: Sequence[Sequence[int]],
    threads: int,
    rows: int = 1024,
    progress: Progress = no_progress,
) -> Observed:
    """Run a model over texts.

    Args:
        graph: as it was exported, float32, its weights beside it.
        spec: its description.
        texts: token ids.
        threads: to compute with.
        rows: of samples to keep for each value, spread over all texts.
        progress: called with (step, done, total).

    Raises:
        RequestError: the texts are too few to tell anything.
    """
    texts = [text[: spec.max_position] for text in texts if text]
    total = sum(map(len, texts))
    if total < _FEWEST_ROWS:
        raise RequestError(
            f"{total} tokens to calibrate on; at least {_FEWEST_ROWS} are needed: give more texts"
        )
    every = max(1, -(-total // rows))
    inputs: dict[str, list[np.ndarray]] = {}
    largest: dict[str, np.ndarray] = {}
    session, names = _opened(graph, threads)
    outputs = [*names, *(state.output for state in spec.states)]
    skipped = 0
    for done, text in enumerate(texts):
        progress(_STEP, done, len(texts))
        found = session.run(outputs, whole_pass(spec, text))
        first = -skipped % every
        skipped += len(text)
        for name, values in zip(names, found, strict=False):
            flat = values.reshape(-1, values.shape[-1])
            inputs.setdefault(name, []).append(flat[first::every].copy())
        for state, cache in zip(spec.states, found[len(names) :], strict=True):
            size = np.abs(cache[0, :, : len(text)]).max(axis=1)
            largest[state.input] = np.maximum(largest.get(state.input, 0.0), size)
    progress(_STEP, len(texts), len(texts))
    return Observed({name: np.concatenate(parts) for name, parts in inputs.items()}, largest, texts)


def _opened(graph: Path, threads: int) -> tuple[ort.InferenceSession, list[str]]:
    """The graph with its matrices' inputs as further outputs; its weights stay where they are."""
    model = ir.load(graph)
    names = sample_names(model.graph)
    values = {out.name: out for node in model.graph for out in node.outputs}
    known = {value.name for value in model.graph.outputs}
    model.graph.outputs.extend(values[name] for name in names if name not in known)
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(graph.parent))
    return open_session(ir.to_proto(model).SerializeToString(), options, threads), names

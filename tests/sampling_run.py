"""Run single sampling graphs: in onnxruntime, in ONNX's reference evaluator, over bound arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from spec_export.engines.graphs import (
    BIAS_SLOTS,
    END_SLOTS,
    FILTERS,
    padded_vocabulary,
    weighing_keys,
)
from spec_export.export.sampling_confidence import confidence_graph
from spec_export.export.sampling_filters import filter_graph
from spec_export.export.sampling_graphs import (
    accept_graph,
    position_races_graph,
    propose_graph,
    sample_graph,
    top_logprobs_graph,
    weighing_graph,
)
from spec_export.runtime.noise import race_size
from tests import algorithm1
from tests.weighing import Edits, Filters

Arrays = dict[str, NDArray]
KEYS = {key.name: key for model in ("target", "draft") for key in weighing_keys(model)}
CAPACITY = 48  # of `edit_feeds`
GARBAGE_IDS = [-1, 2**31, 2**40, -(2**62)]
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
PLACE = ("last_id", "kv_len", "draft_kv_len")  # what every graph reads that ends a round
RULES = ("greedy", "one_hot", "dense", "block", "invariant")


@cache
def model(name: str, V: int, Vd: int | None = None) -> onnx.ModelProto:
    """The graph of that name; Vd is the drafting model's vocabulary, V unless given."""
    Vd = Vd or V
    stage, _, variant = name.partition("_")
    if stage == "filter":
        made = filter_graph(variant, V)
    elif name in KEYS:
        made = weighing_graph(KEYS[name], V, Vd if KEYS[name].model == "draft" else V)
    elif name == "position_races":
        made = position_races_graph(V)
    elif name == "confidence":
        made = confidence_graph(V, Vd)
    elif name == "top_logprobs":
        made = top_logprobs_graph(V)
    elif name == "accept_edited":
        made = accept_graph("greedy", V, is_edited=True)
    elif stage == "accept":
        made = accept_graph(variant, V)
    else:
        made = sample_graph(variant, V) if stage == "sample" else propose_graph(variant, V, Vd)
    return ir.to_proto(made)


def open_graph(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    return ort.InferenceSession(proto.SerializeToString(), options, providers=providers)


@cache
def session(name: str, V: int, Vd: int | None = None) -> ort.InferenceSession:
    return open_graph(model(name, V, Vd))


def run_session(opened: ort.InferenceSession, feeds: Arrays) -> Arrays:
    wanted = {i.name for i in opened.get_inputs()}
    outputs = opened.run(None, {k: v for k, v in feeds.items() if k in wanted})
    return dict(zip([o.name for o in opened.get_outputs()], outputs, strict=True))


def run(name: str, V: int, feeds: Arrays, Vd: int | None = None) -> Arrays:
    """Outputs by name; `feeds` may hold more than the graph reads.

    A distribution's name may end with filters, as in `distribution+edits+top`: their graph is run
    on what it makes, and `p` is what is kept of that.
    """
    weighing, _, way = name.rpartition("+")
    if way in FILTERS:
        made = run(f"filter_{way}", V, feeds | run(weighing, V, feeds, Vd))
        return made | {"p": made["kept"]}
    return run_session(session(name, V, Vd), feeds)


def refer(name: str, V: int, feeds: Arrays, Vd: int | None = None) -> Arrays:
    """What ONNX's reference evaluator says."""
    weighing, _, way = name.rpartition("+")
    if way in FILTERS:
        made = refer(f"filter_{way}", V, feeds | refer(weighing, V, feeds, Vd))
        return made | {"p": made["kept"]}
    evaluator = ReferenceEvaluator(model(name, V, Vd))
    with np.errstate(all="ignore"):
        outputs = evaluator.run(None, {k: feeds[k] for k in evaluator.input_names})
    return dict(zip(evaluator.output_names, outputs, strict=True))


class Bound:
    """A session over arrays bound once: write into `x`, call, read from `y`."""

    def __init__(self, name: str, V: int, **dims: int) -> None:
        self._session, dims = session(name, V), {"D": 1} | dims
        self._binding = self._session.io_binding()
        self.x: Arrays = {}
        self.y: Arrays = {}
        for value in self._session.get_inputs():
            self.x[value.name] = self._bind(value, dims, self._binding.bind_ortvalue_input)
        for value in self._session.get_outputs():
            self.y[value.name] = self._bind(value, dims, self._binding.bind_ortvalue_output)

    def _bind(self, value, dims: dict[str, int], bind: Callable) -> NDArray:
        shape = [dims.get(d, d) for d in value.shape]
        kinds = {"float": np.float32, "int64": np.int64, "uint8": np.uint8}
        dtype = kinds[value.type.removeprefix("tensor(").removesuffix(")")]
        tensor = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))
        bind(value.name, tensor)
        return tensor.numpy()

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def padded(rows: NDArray, fill: float = 0.0) -> NDArray[np.float32]:
    """Rows of V as rows of V64."""
    V = rows.shape[-1]
    made = np.full((*rows.shape[:-1], padded_vocabulary(V)), fill, np.float32)
    made[..., :V] = rows
    return made


def distribution(logits: NDArray, temperature: float = 1.0) -> NDArray[np.float32]:
    """p `[R, V64]` of raw logits `[1, R, V]`, by the graph."""
    feeds = {"logits": logits, "temperature": floats(temperature)}
    return run("distribution", logits.shape[2], feeds)["p"]


def round_feeds(
    rng: np.random.Generator, gamma: int, V: int, *, temperature: float = 0.8
) -> Arrays:
    """A random round, every draft present, drawn from q: whatever any `accept_*` reads."""
    logits = rng.normal(size=(1, gamma + 1, V)).astype(np.float32) * 2
    q = algorithm1.softmax(rng.normal(size=(gamma, V)) * 2).astype(np.float32)
    return {
        "logits": logits,
        "p": distribution(logits, temperature),
        "scores": padded(logits[0], -np.inf),
        "draft_tokens": np.array([rng.choice(V, p=row / row.sum()) for row in q.astype(float)]),
        "n_draft": ids(gamma),
        "last_id": ids(1),
        "kv_len": ids(40),
        "draft_kv_len": np.arange(39, 39 + gamma) + (np.arange(gamma) > 0),
        "uniform": rng.random(gamma, np.float32),
        "race": rng.standard_exponential((gamma + 1, race_size(V))).astype(np.float32),
        "q": padded(q),
    }


def accept(rule: str, V: int, feeds: Arrays) -> Arrays:
    """Judge a round; one row of the races is used where the rule takes one."""
    race = feeds["race"] if rule == "invariant" else feeds["race"][:1]
    return run(f"accept_{rule}", V, feeds | {"race": race})


def sample(variant: str, V: int, feeds: Arrays, row: int = 0) -> Arrays:
    """Choose a token from one row of a round, with the first race."""
    one = {name: feeds[name][row : row + 1] for name in ("p", "scores") if name in feeds}
    one |= {"race": feeds["race"][:1]} if "race" in feeds else {}
    one |= {name: feeds.get(name, ids(1)) for name in PLACE}
    logits = np.ascontiguousarray(feeds["logits"][:, row : row + 1])
    return run(f"sample_{variant}", V, one | {"logits": logits})


def filter_feeds(logits: NDArray, filters: Filters, temperature: float = 1.0) -> Arrays:
    """What a distribution and its filters read."""
    return {
        "logits": logits,
        "temperature": floats(temperature),
        "top_k": ids(filters.top_k),
        "top_p": floats(filters.top_p),
        "min_p": floats(filters.min_p),
        "typical_p": floats(filters.typical_p),
    }


def repeated(values: list, slots: int) -> list:
    return values + [values[0]] * (slots - len(values))


def edit_feeds(
    V: int, prompt: list[int], output: list[int], drafts: list[int], edits: Edits, row0: int = 0
) -> Arrays:
    """What the graphs read after `prompt` and `output`; the rest of the history is garbage."""
    text = [*prompt, *output]
    history = np.resize(np.array(GARBAGE_IDS), CAPACITY)
    history[: len(text)] = text
    bias = list(edits.bias.items()) or [(0, 0.0)]
    return {
        "history": history,
        "n_history": ids(len(text)),
        "draft_tokens": np.array(drafts, np.int64),
        "row0": ids(row0),
        "prompt_counts": np.bincount(prompt, minlength=V).astype(np.float32),
        "output_counts": np.bincount(output or [0], minlength=V).astype(np.float32) * bool(output),
        "repetition": floats(edits.repetition),
        "presence": floats(edits.presence),
        "frequency": floats(edits.frequency),
        "ngram": ids(edits.ngram),
        "bias_ids": ids(*repeated([token for token, _ in bias], BIAS_SLOTS)),
        "bias_values": floats(*repeated([value for _, value in bias], BIAS_SLOTS)),
        "end_ids": ids(*repeated(list(edits.end_ids) or [0], END_SLOTS)),
        "end_from": ids(edits.end_from),
    }

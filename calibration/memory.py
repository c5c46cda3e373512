"""What a target and a draft take in memory, by context length, from their description alone.

Weights and caches are counted; they are nearly all of it for models worth speculating with. The
rest is small and estimated: constants with a date were measured, and tests/calibration hold the sum
against the memory of a process that really opened a bundle. What an engine for a GPU keeps besides
(its context, its plans) is not in these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spec_export.calibration.weight_sizes import (
    CACHE_BYTES,
    ITEM_BYTES,
    parts,
    resident_bytes,
)
from spec_export.engines.consistency import (
    GAMMA_RANGE,
    LONGEST_CHUNK,
    check_graphs,
    check_manifest,
    rounded_capacity,
)
from spec_export.engines.errors import IntegrityError, RequestError, SchemaError
from spec_export.engines.graphs import (
    GRAPHS_FILE,
    GRAPHS_SCHEMA,
    GraphsSpec,
    ModelSpec,
    padded_vocabulary,
)
from spec_export.engines.manifest import MANIFEST_FILE, MANIFEST_SCHEMA, Manifest
from spec_export.engines.strict import read_json

_WIDENING = "onnxruntime"  # the backend for a CPU, which has no kernels for half precision
_LARGEST_WEIGHTS = 1 << 50
# November 2026, onnxruntime 1.32 on x86-64, anonymous memory:
_TOKENIZER_BYTES_AN_ID = 600  # byte-level tokenizers of 1 k to 150 k ids took 590 to 780
_ENGINES_BYTES = 8 << 20  # graphs, bindings and the sampling engines of the tiny pair
_PROGRAM_BYTES = 80 << 20  # interpreter, numpy, onnxruntime: 31 MB of their own, 46 MB of libraries
# Rows of probabilities that sampling keeps for each row of a verify pass: p, q, what is left.
_SAMPLING_ROWS = 3


@dataclass(frozen=True)
class Described:
    """What decides memory, of a bundle or an exported directory.

    Attributes:
        models: `target`, and `draft` where a model drafts.
        drafts: whether rounds have drafts at all.
        ids: of the tokenizer.
        gammas: drafts a round that verify passes are built for, ascending.
        chunk: rows of a prefill pass.
        max_len: tokens of a context.
        widens: the engine is onnxruntime on a processor, which keeps weights in its own way.
    """

    models: Mapping[str, ModelSpec]
    drafts: bool
    ids: int
    gammas: tuple[int, ...]
    chunk: int
    max_len: int
    widens: bool = False

    @property
    def is_half(self) -> bool:
        """Whether any weights have two bytes."""
        return any(ITEM_BYTES.get(spec.dtype) == 2 for spec in self.models.values())

    @property
    def positions(self) -> int:
        """The longest context the target was made for."""
        return self.models["target"].max_position

    def plain(self) -> Described:
        """The target alone."""
        return replace(self, models={"target": self.models["target"]}, drafts=False, gammas=())


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a process that decodes one text.

    Attributes:
        max_len: tokens of the context.
        weights: by model; an engine holds them once.
        caches: by model, at full capacity: the context and the rows a pass may write past it.
        buffers: logits of every pass, and rows of probabilities.
        workspace: what is between the layers of the widest pass.
        tokenizer: the tokenizer.
        engines: graphs, bindings, sampling engines.
        program: interpreter and libraries.
    """

    max_len: int
    weights: Mapping[str, int]
    caches: Mapping[str, int]
    buffers: int
    workspace: int
    tokenizer: int
    engines: int
    program: int

    @property
    def bundle(self) -> int:
        """What opening the bundle and filling one context adds to a process."""
        counted = sum(self.weights.values()) + sum(self.caches.values())
        return counted + self.buffers + self.workspace + self.tokenizer + self.engines

    @property
    def total(self) -> int:
        """The whole process."""
        return self.bundle + self.program

    def parts(self) -> list[tuple[str, int]]:
        """Every part with its name."""
        return [
            *((f"weights, {name}", count) for name, count in self.weights.items()),
            *((f"caches, {name}", count) for name, count in self.caches.items()),
            ("logits and probabilities", self.buffers),
            ("workspace", self.workspace),
            ("tokenizer", self.tokenizer),
            ("engines", self.engines),
            ("program", self.program),
        ]


def read_described(
    path: Path,
    *,
    max_len: int | None = None,
    gammas: tuple[int, ...] | None = None,
    chunk: int | None = None,
) -> Described:
    """Read the description of a bundle or an exported directory; no engine, no weights.

    Args:
        path: the directory.
        max_len: another context than the bundle's; of an exported directory 1024 unless given, or
            all the target has.
        gammas: other gammas than the bundle's; of an exported directory 4 unless given.
        chunk: another chunk than the bundle's; of an exported directory 128 unless given.

    Raises:
        IntegrityError: it is neither of the two.
        SchemaError: its description does not fit together.
        RequestError: the shapes do not fit the models.
    """
    if (path / MANIFEST_FILE).is_file():
        manifest = read_json(path / MANIFEST_FILE, Manifest, schema=MANIFEST_SCHEMA)
        check_manifest(manifest, str(path / MANIFEST_FILE))
        models, method, text = manifest.models, manifest.method, manifest.text
        shapes = (manifest.gammas, manifest.chunk, manifest.max_len)
        widens = manifest.device.backend == _WIDENING
    elif (path / GRAPHS_FILE).is_file():
        graphs = read_json(path / GRAPHS_FILE, GraphsSpec, schema=GRAPHS_SCHEMA)
        check_graphs(graphs, str(path / GRAPHS_FILE))
        models, method, text = graphs.models, graphs.method, graphs.text
        shapes = ((4,), 128, min(1024, models["target"].max_position))
        widens = False
    else:
        raise IntegrityError(
            f"{path} is neither a bundle ({MANIFEST_FILE}) nor an exported directory "
            f"({GRAPHS_FILE})"
        )
    drafts = method != "none"
    described = Described(
        models=models,
        drafts=drafts,
        ids=text.vocabulary,
        gammas=tuple(sorted(set(gammas or shapes[0]))) if drafts else (),
        chunk=shapes[1] if chunk is None else chunk,
        max_len=shapes[2] if max_len is None else max_len,
        widens=widens,
    )
    _check(described, str(path))
    return described


def memory_use(described: Described, max_len: int | None = None) -> MemoryUse:
    """Bytes at a context of `max_len` tokens, that of the description unless given."""
    max_len = described.max_len if max_len is None else max_len
    gamma = max(described.gammas, default=0)
    capacity = rounded_capacity(max_len, described.chunk, gamma)
    models = described.models
    return MemoryUse(
        max_len=max_len,
        weights={
            name: resident_bytes(spec, on_processor=described.widens)
            for name, spec in models.items()
        },
        caches={name: cache_row_bytes(spec) * capacity for name, spec in models.items()},
        buffers=_buffers(described),
        workspace=max(_workspace(spec, described.chunk) for spec in models.values()),
        tokenizer=_TOKENIZER_BYTES_AN_ID * described.ids,
        engines=_ENGINES_BYTES,
        program=_PROGRAM_BYTES,
    )


def cache_row_bytes(spec: ModelSpec) -> int:
    """Bytes of the caches for one token."""
    total = 0
    for state in spec.states:
        others = [d for axis, d in enumerate(state.dims) if axis != state.length_axis]
        total += math.prod(int(d) for d in others) * CACHE_BYTES[state.dtype]
    return total


def largest_context(described: Described, limit: int) -> int | None:
    """The longest context that `limit` bytes hold; None where not even the shortest fits."""
    low, high = 2, described.positions
    if memory_use(described, low).total > limit:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if memory_use(described, middle).total <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def require_fit(described: Described, limit: int, where: str, sets: int = 1) -> MemoryUse:
    """Refuse, before anything is allocated, what does not fit into `limit` bytes.

    Args:
        described: what is to be opened.
        limit: bytes there are.
        where: whose they are, for the message.
        sets: of caches that are needed at a time.

    Raises:
        RequestError: with what is needed, what there is, and the context that would fit.
    """
    use = memory_use(described)
    limit -= (sets - 1) * sum(use.caches.values())
    if use.total <= limit:
        return use
    context = largest_context(described, limit)
    fix = (
        f"rebuild with `--max-len {context}` or less"
        if context is not None
        else "no context is short enough: use a smaller model or fewer bits a weight"
    )
    raise RequestError(
        f"a context of {use.max_len} tokens needs {use.total / 1e6:.0f} MB, but {where} has "
        f"{limit / 1e6:.0f} MB; {fix}"
    )


def _buffers(described: Described) -> int:
    """Logits of every bound pass, float32, and the rows that sampling keeps."""
    vocabulary = described.models["target"].vocabulary
    verified = sum(gamma + 1 for gamma in described.gammas)
    rows = 2 + 1 + 2 + verified  # prefill, decode, exact_decode, verify passes
    sampling = _SAMPLING_ROWS * (max(described.gammas, default=0) + 1)
    total = 4 * (rows * vocabulary + sampling * padded_vocabulary(vocabulary))
    if "draft" in described.models:
        total += 4 * (1 + max(described.gammas)) * described.models["draft"].vocabulary
    return total


def _workspace(spec: ModelSpec, rows: int) -> int:
    """Activations of a pass: of 16 h numbers a row, three are as wide as a feed-forward layer."""
    return round(16 * parts(spec).hidden * ITEM_BYTES[spec.dtype] * rows)


def _check(described: Described, origin: str) -> None:
    for name, spec in described.models.items():
        if not 0 <= spec.parameters_bytes <= _LARGEST_WEIGHTS or spec.layers < 1:
            raise SchemaError(
                f"{origin}: the {name} has {spec.layers} layers and {spec.parameters_bytes} bytes "
                "of weights; it was altered, or made by something else"
            )
        if spec.dtype not in ITEM_BYTES:
            raise SchemaError(f"{origin}: weights of {spec.dtype} are not known here")
    if not 0 <= described.ids <= 1 << 24:
        raise SchemaError(f"{origin}: the tokenizer has {described.ids} ids")
    if not 2 <= described.max_len <= described.positions:
        raise RequestError(
            f"a context of {described.max_len} tokens: the target has {described.positions} "
            f"positions, so a context is 2 to {described.positions} tokens"
        )
    if not 2 <= described.chunk <= LONGEST_CHUNK:
        raise RequestError(f"a chunk of {described.chunk} is outside 2 to {LONGEST_CHUNK}")
    low, high = GAMMA_RANGE
    for gamma in described.gammas:
        if not low <= gamma <= high:
            raise RequestError(f"gamma {gamma} is outside {low} to {high}")

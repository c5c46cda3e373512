"""What `manifest.json` says of a bundle: its engines, its shapes, and what was proved of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spec_export.engines.graphs import (
    FileSpec,
    ModelSpec,
    ParitySpec,
    SamplingSpec,
    TextSpec,
    WeightFormat,
)

MANIFEST_SCHEMA = 1
MANIFEST_FILE = "manifest.json"

ExactnessClass = Literal["width_invariant", "row_invariant", "none", "unprobed"]


@dataclass(frozen=True)
class GpuSpec:
    """The GPU that engines were built on.

    Attributes:
        name: what CUDA calls it.
        compute_capability: such as `8.9`.
        driver: newest CUDA version its driver serves.
        cuda: version of the CUDA runtime.
    """

    name: str
    compute_capability: str
    driver: str
    cuda: str


@dataclass(frozen=True)
class DeviceSpec:
    """Where an engine was built.

    Attributes:
        backend: engine library, such as `onnxruntime`.
        version: of that library.
        processor: what the operating system calls it.
        machine: instruction set, such as `x86_64`.
        threads: threads an engine computes with.
        gpu: where it computes, or None for a processor, and for a build ahead of time.
    """

    backend: str
    version: str
    processor: str
    machine: str
    threads: int
    gpu: GpuSpec | None = None


@dataclass(frozen=True)
class CompilerSpec:
    """What a compiler of GPU engines was told.

    Attributes:
        compute_capabilities: GPUs that the engines are for; empty: the kind they were built on.
        options: other than its own defaults, by name.
        timing_cache_sha256: of the kernel times that the build left, if it timed any.
    """

    compute_capabilities: tuple[str, ...]
    options: dict[str, str]
    timing_cache_sha256: str | None


@dataclass(frozen=True)
class EngineSpec:
    """How a model was compiled for a GPU.

    Attributes:
        precision: of weights and sums, such as `float16` or `float16, weights int4`.
        weights: format of the matrices inside the layers, where it is another one.
        profiles: the optimization profile of each role; roles of one shape share it.
        attentions: layers whose attention is one fused kernel.
        cache_updates: caches that are written in place.
    """

    precision: str
    weights: WeightFormat | None
    profiles: dict[str, int]
    attentions: int
    cache_updates: int


@dataclass(frozen=True)
class ExactnessSpec:
    """What the exactness probe found of the target engine on the device it was built on.

    Attributes:
        kind: `width_invariant`: a row has the same bits for every row count of 2 and more;
            `row_invariant`: the same bits at one row count, wherever it stands and whatever the
            other rows hold; `none`: neither; `unprobed`: built where it cannot run.
        widths: row counts compared.
        lengths: cached lengths compared.
        rows: rows compared bit by bit.
        reason: the first difference found, or what was shown.
    """

    kind: ExactnessClass
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: int
    reason: str


@dataclass(frozen=True)
class Manifest:
    """The whole of `manifest.json`.

    Attributes:
        schema: version of this description.
        created: UTC time, ISO 8601.
        producer: what made it, name to version.
        source: what the checkpoints were called.
        method: `model`, `ngram` or `none`.
        gamma: drafts per round the widest verify pass was built for; 0 without a draft.
        gammas: all that a verify pass was built for, ascending; none without a draft.
        max_len: tokens of a context, prompt included.
        chunk: rows of a prefill pass.
        capacity: rows of a cache: `max_len` and the widest pass, rounded up.
        device: where it was built.
        models: `target` and perhaps `draft`, with roles and dimensions pinned.
        sampling: sampling graphs by name, dimensions pinned.
        text: tokenizer and chat template.
        parity: checks against the checkpoint, by model.
        lowered: what the backend replaced, by model.
        exactness: of the target engine.
        onnx: SHA-256 of every graph it was compiled from and of their weights, by relative path.
        compiler: what was asked of it; None where the library compiles as it opens.
        engines: how each model was compiled, for such a compiler.
        files: every other file of the bundle by relative path.
    """

    schema: int
    created: str
    producer: dict[str, str]
    source: dict[str, str]
    method: Literal["model", "ngram", "none"]
    gamma: int
    gammas: tuple[int, ...]
    max_len: int
    chunk: int
    capacity: int
    device: DeviceSpec
    models: dict[str, ModelSpec]
    sampling: dict[str, SamplingSpec]
    text: TextSpec
    parity: dict[str, ParitySpec]
    lowered: dict[str, tuple[str, ...]]
    exactness: ExactnessSpec
    onnx: dict[str, str]
    compiler: CompilerSpec | None
    engines: dict[str, EngineSpec]
    files: dict[str, FileSpec]

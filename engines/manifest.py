"""What `manifest.json` says of a bundle: its engines, its shapes, and what was proved of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spec_export.engines.graphs import ModelSpec, ParitySpec, SamplingSpec, TextSpec

MANIFEST_SCHEMA = 1
MANIFEST_FILE = "manifest.json"

ExactnessClass = Literal["width_invariant", "row_invariant", "none"]


@dataclass(frozen=True)
class DeviceSpec:
    """Where an engine was built.

    Attributes:
        backend: engine library, such as `onnxruntime`.
        version: of that library.
        processor: what the operating system calls it.
        machine: instruction set, such as `x86_64`.
        threads: threads an engine computes with.
    """

    backend: str
    version: str
    processor: str
    machine: str
    threads: int


@dataclass(frozen=True)
class FileSpec:
    """A file of the bundle."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class ExactnessSpec:
    """What the exactness probe found of the target engine on the device it was built on.

    Attributes:
        kind: `width_invariant`: a row has the same bits for every row count of 2 and more;
            `row_invariant`: the same bits at one row count, wherever it stands and whatever the
            other rows hold; `none`: neither.
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
    files: dict[str, FileSpec]

"""An opened bundle: engines, tokenizer and device, shared by every session on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spec_export.engines.backend import Backend, Device, Engine
from spec_export.engines.bundle import (
    Bundle,
    Progress,
    VerifiedFiles,
    default_memory,
    no_progress,
    open_bundle,
)
from spec_export.engines.errors import BundleError
from spec_export.engines.extras import require
from spec_export.engines.fitting import check_fits
from spec_export.engines.manifest import Manifest
from spec_export.engines.passes import cache_bytes
from spec_export.runtime.grammar import GrammarTokenizer
from spec_export.runtime.text import Text


@dataclass(frozen=True)
class OpenedBundle:
    """Engines over one set of weights.

    Attributes:
        bundle: what was opened.
        device: where the engines run.
        target: the target's engine.
        draft: the drafting model's engine, for method `model`.
        sampling: sampling engines by name.
        text: tokenizer and chat template.
        exactness: `width_invariant`, `row_invariant` or `none` where the engine runs as it was
            probed; `unprobed` on another processor, library version or thread count.
    """

    bundle: Bundle
    device: Device
    target: Engine
    draft: Engine | None
    sampling: Mapping[str, Engine]
    text: Text
    exactness: str

    @property
    def manifest(self) -> Manifest:
        """Description of the bundle."""
        return self.bundle.manifest

    @cached_property
    def grammar_tokenizer(self) -> GrammarTokenizer:
        """The tokenizer as grammars need it; made when first asked for, which takes a moment."""
        file = self.bundle.file(self.manifest.text.tokenizer)
        vocabulary = self.manifest.models["target"].vocabulary
        return GrammarTokenizer(file, vocabulary, self.manifest.text.end_ids)

    def session_bytes(self) -> int:
        """Memory of the caches of one session."""
        return sum(cache_bytes(spec) for spec in self.manifest.models.values())


class SamplingEngines(Mapping[str, Engine]):
    """The sampling engines of a bundle, each opened when first asked for: a request needs few."""

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self._bundle, self._backend = bundle, backend
        self._open: dict[str, Engine] = {}

    def __getitem__(self, name: str) -> Engine:
        if name not in self._open:
            spec = self._bundle.manifest.sampling[name]
            self._open[name] = self._backend.open_sampling(self._bundle.file(spec.file), spec)
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bundle.manifest.sampling)

    def __len__(self) -> int:
        return len(self._bundle.manifest.sampling)


def make_backend(name: str, threads: int | None = None) -> Backend:
    """The backend called `name`.

    Args:
        name: as in a manifest.
        threads: of the host, to compute with; where a GPU computes it has no use for them.

    Raises:
        BundleError: this version has no such backend.
        MissingExtra: its library is not installed.
        EngineError: its library cannot be used here.
    """
    if name not in _BACKENDS:
        raise BundleError(f"backend {name!r} is unknown; this version has: {', '.join(_BACKENDS)}")
    return _BACKENDS[name](name, threads)


def _onnxruntime(name: str, threads: int | None) -> Backend:
    require("ort", "onnxruntime")
    if name == "onnxruntime-cuda":
        from spec_export.engines.ort_cuda import OrtCudaBackend

        return OrtCudaBackend(threads)
    from spec_export.engines.ort import OrtBackend

    return OrtBackend(threads)


def _tensorrt(name: str, _: int | None) -> Backend:
    from spec_export.engines.trt import TrtBackend

    return TrtBackend(name)


_BACKENDS: dict[str, Callable[[str, int | None], Backend]] = {
    "onnxruntime": _onnxruntime,
    "onnxruntime-cuda": _onnxruntime,
    "tensorrt": _tensorrt,
    "tensorrt-rtx": _tensorrt,
}


def _threads(manifest: Manifest) -> int:
    return min(manifest.device.threads, os.cpu_count() or 1)


def open_runtime(
    path: Path | str,
    *,
    threads: int | None = None,
    memory: VerifiedFiles | None = None,
    progress: Progress = no_progress,
) -> OpenedBundle:
    """Verify a bundle and open its engines.

    Args:
        path: the bundle directory.
        threads: threads to compute with; unless given the number it was built with, or all
            processors where there are fewer.
        memory: which files were hashed before; the user's cache unless given.
        progress: shown while hashing.

    Raises:
        BundleError: the bundle cannot be trusted or read, or was built for another machine.
        EngineError: the engine library refuses it.
    """
    memory = default_memory() if memory is None else memory
    bundle = open_bundle(Path(path), memory, progress)
    manifest = bundle.manifest
    backend = make_backend(manifest.device.backend, threads or _threads(manifest))
    found = backend.describe()
    check_fits(manifest.device, manifest.compiler, found)
    models = {
        name: backend.open_model(bundle.file(spec.file), spec)
        for name, spec in manifest.models.items()
    }
    sampling = SamplingEngines(bundle, backend)
    template = manifest.text.chat_template
    text = Text(
        bundle.file(manifest.text.tokenizer),
        None if template is None else bundle.file(template),
        manifest.text,
    )
    probed = found == manifest.device
    return OpenedBundle(
        bundle=bundle,
        device=backend.device,
        target=models["target"],
        draft=models.get("draft"),
        sampling=sampling,
        text=text,
        exactness=manifest.exactness.kind if probed else "unprobed",
    )

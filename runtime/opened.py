"""An opened bundle: engines, tokenizer and device, shared by every session on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from spec_export.engines.manifest import Manifest
from spec_export.engines.passes import cache_bytes
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

    def session_bytes(self) -> int:
        """Memory of the caches of one session."""
        return sum(cache_bytes(spec) for spec in self.manifest.models.values())


def make_backend(name: str, threads: int | None = None) -> Backend:
    """The backend called `name`.

    Raises:
        BundleError: this version has no such backend.
        MissingExtra: its library is not installed.
    """
    if name != "onnxruntime":
        raise BundleError(f"backend {name!r} is unknown; this version has: onnxruntime")
    require("ort", "onnxruntime")
    from spec_export.engines.ort import OrtBackend

    return OrtBackend(threads)


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
        threads: threads to compute with; the number it was built with unless given.
        memory: which files were hashed before; the user's cache unless given.
        progress: shown while hashing.

    Raises:
        BundleError: the bundle cannot be trusted or read.
        EngineError: the engine library refuses it.
    """
    memory = default_memory() if memory is None else memory
    bundle = open_bundle(Path(path), memory, progress)
    manifest = bundle.manifest
    backend = make_backend(manifest.device.backend, threads or manifest.device.threads)
    models = {
        name: backend.open_model(bundle.file(spec.file), spec)
        for name, spec in manifest.models.items()
    }
    sampling = {
        name: backend.open_sampling(bundle.file(spec.file), spec)
        for name, spec in manifest.sampling.items()
    }
    template = manifest.text.chat_template
    text = Text(
        bundle.file(manifest.text.tokenizer),
        None if template is None else bundle.file(template),
        manifest.text,
    )
    probed = backend.describe() == manifest.device
    return OpenedBundle(
        bundle=bundle,
        device=backend.device,
        target=models["target"],
        draft=models.get("draft"),
        sampling=sampling,
        text=text,
        exactness=manifest.exactness.kind if probed else "unprobed",
    )

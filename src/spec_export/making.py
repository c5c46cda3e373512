"""Checkpoint to bundle: the stages behind `export`, `build` and `model-to-engine`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.compiling import Compiling, check_device_memory, open_backend
from spec_export.console import Steps, size
from spec_export.engines.errors import BuildError, RequestError
from spec_export.quantizing import check_quantized, quantized

if TYPE_CHECKING:
    from spec_export.engines.build import BuildOptions
    from spec_export.engines.bundle import Bundle, VerifiedFiles
    from spec_export.engines.graphs import ElementType, GraphsSpec, ModelSpec
    from spec_export.export.exporter import ExportedPair
    from spec_export.runtime.compare import SelfCheck

_NEEDED_TO_EXPORT = (
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors",
    "gguf",
)


_UNKEPT = (
    "what texts decided is in no directory that is kept, so `check --exported` on the device has "
    "nothing to compare the engines with: quantize first, with `spec-export quantize`, then build "
    "and check with the directory it writes"
)


@dataclass(frozen=True)
class Checkpoints:
    """What to export, as the user named it."""

    target: str
    draft: str
    dtype: ElementType
    trust_remote_code: bool


@dataclass(frozen=True)
class Shapes:
    """What a build pins; `max_len` None: 1024, or all positions of a model with fewer."""

    gammas: tuple[int, ...]
    max_len: int | None
    chunk: int
    link_weights: bool = False

    def options(self, positions: int) -> BuildOptions:
        """The options for a target with `positions` positions."""
        from spec_export.engines.build import BuildOptions

        max_len = self.max_len
        if max_len is None:
            max_len = min(BuildOptions.max_len, positions)
        *narrower, gamma = sorted(self.gammas)
        return BuildOptions(gamma, max_len, self.chunk, self.link_weights, tuple(narrower))


def parse_gammas(text: str) -> tuple[int, ...]:
    """`4` or `2,4,8`.

    Raises:
        RequestError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.removeprefix("-").isdecimal() and len(part) <= 9 for part in parts):
        raise RequestError(f"--gamma {text}: one or more whole numbers, such as 4 or 2,4,8")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Made:
    """A new bundle and the check it passed before it was kept; None where it cannot run."""

    bundle: Bundle
    self_check: SelfCheck | None


def export(checkpoints: Checkpoints, out: Path, steps: Steps) -> ExportedPair:
    """Export to portable ONNX."""
    from spec_export.engines.extras import require

    require("export", *_NEEDED_TO_EXPORT)
    steps("loading torch and transformers", 0, 1)
    from spec_export.export.exporter import export_pair

    steps("loading torch and transformers", 1, 1)
    _silence_libraries()
    return export_pair(
        checkpoints.target,
        checkpoints.draft,
        out,
        dtype=checkpoints.dtype,
        trust_remote_code=checkpoints.trust_remote_code,
        progress=steps,
    )


def build(exported: Path, shapes: Shapes, out: Path, chosen: Compiling, steps: Steps) -> Made:
    """Compile an exported directory and check the result, where it can run."""
    from spec_export.engines.atomic import check_replaceable
    from spec_export.engines.build import build_bundle, check_options, read_exported
    from spec_export.engines.bundle import default_memory
    from spec_export.engines.extras import require
    from spec_export.engines.manifest import MANIFEST_FILE
    from spec_export.runtime.compare import check_session
    from spec_export.runtime.opened import open_runtime
    from spec_export.runtime.session import Session

    require("build", "onnx_ir")
    from spec_export.engines.quantize import needs_observing

    graphs = read_exported(exported)
    options = shapes.options(graphs.models["target"].max_position)
    check_options(options, graphs)
    check_quantized(graphs, chosen.backend)
    backend = open_backend(chosen)
    check_replaceable(out, MANIFEST_FILE)
    checks: list[SelfCheck] = []

    def check(path: Path, hashed: VerifiedFiles) -> None:
        steps("decoding with and without drafts", 0, 1)
        found = check_session(Session(open_runtime(path, memory=hashed)))
        steps("decoding with and without drafts", 1, 1)
        if found.is_promised and found.departs_at is not None:
            raise BuildError(
                f"token {found.departs_at} of a text decoded with drafts is not that of plain "
                "decoding, though the exactness probe found no difference; nothing was written"
            )
        checks.append(found)

    wanted = chosen.quantizing.wanted(graphs, chosen.backend)
    with (
        quantized(exported, graphs, wanted, chosen.quantizing, out, steps) as reference,
        _retyped(reference, chosen, out, steps) as prepared,
    ):
        described = read_exported(prepared)
        steps.say(statement(described, options))
        memory = check_device_memory(chosen, backend, prepared, described, options)
        if memory is not None:
            steps.say(memory)
        is_lasting = not any(map(needs_observing, wanted.values()))  # made again from the source
        source = exported if is_lasting else reference
        if not is_lasting and not backend.can_run:
            steps.say(_UNKEPT)
        bundle = build_bundle(
            prepared, out, backend, options, default_memory(), steps, check, source, reference
        )
    return Made(bundle, checks[0] if checks else None)


@contextlib.contextmanager
def _retyped(exported: Path, chosen: Compiling, out: Path, steps: Steps) -> Iterator[Path]:
    """The exported directory, or one of another element type that goes away."""
    from spec_export.engines.build import read_exported
    from spec_export.engines.prepare import retype_exported

    dtype = chosen.computed_dtype(read_exported(exported))
    if dtype is None:
        yield exported
        return
    with directory_beside(out, None) as prepared:
        prepared.mkdir()
        retype_exported(exported, prepared, dtype, steps)
        yield prepared


def model_to_engine(
    checkpoints: Checkpoints,
    shapes: Shapes,
    out: Path,
    chosen: Compiling,
    keep: Path | None,
    steps: Steps,
) -> Made:
    """Export, then build; the exported directory is kept at `keep` or not at all."""
    from spec_export.engines.atomic import check_replaceable
    from spec_export.engines.extras import require
    from spec_export.engines.manifest import MANIFEST_FILE

    require("ort", "onnxruntime")
    backend = open_backend(chosen)  # refuses what it does not know, before the export
    if keep is None and not backend.can_run:
        steps.say(
            "the bundle cannot run here, and the exported graphs go away: `check` on the device "
            "will probe it and not compare it. Keep them with --keep-exported DIR"
        )
    check_replaceable(out, MANIFEST_FILE)
    shapes = _settle(checkpoints, shapes, steps)
    with directory_beside(out, keep) as exported:
        export(checkpoints, exported, steps)
        shapes = replace(shapes, link_weights=keep is None)
        return build(exported, shapes, out, chosen, steps)


def statement(graphs: GraphsSpec, options: BuildOptions) -> str:
    """What a bundle takes on disk and in memory, said before any of it is taken."""
    from spec_export.engines.build import capacity_for

    gamma = options.gamma if graphs.method != "none" else 0
    capacity = capacity_for(options, gamma)
    weights = sum(spec.parameters_bytes for spec in graphs.models.values())
    caches = sum(cache_bytes_at(spec, capacity) for spec in graphs.models.values())
    whole = options.max_len == graphs.models["target"].max_position
    context = f"{options.max_len} tokens{', all the target has positions for' if whole else ''}"
    return (
        f"sizes: weights {size(weights)} on disk and in memory, one session's caches "
        f"{size(caches)} for a context of {context}"
    )


def cache_bytes_at(spec: ModelSpec, capacity: int) -> int:
    """Memory of one set of caches of a model whose capacity is not pinned yet."""
    from spec_export.engines.passes import cache_bytes

    states = tuple(
        replace(state, dims=tuple(capacity if dim == "C" else dim for dim in state.dims))
        for state in spec.states
    )
    return cache_bytes(replace(spec, states=states))


def _settle(checkpoints: Checkpoints, shapes: Shapes, steps: Steps) -> Shapes:
    """Decide the context and refuse before the export what the build would refuse after it."""
    from spec_export.engines.build import check_shapes
    from spec_export.engines.extras import require

    require("export", *_NEEDED_TO_EXPORT)
    steps("opening the checkpoint", 0, 1)
    from spec_export.export.checkpoint import open_checkpoint
    from spec_export.export.skeleton import max_position

    _silence_libraries()
    opened = open_checkpoint(checkpoints.target, trust_remote_code=checkpoints.trust_remote_code)
    positions = max_position(opened.config)
    options = shapes.options(positions)
    steps("opening the checkpoint", 1, 1)
    check_shapes(options, "none" if checkpoints.draft == "none" else "drafts", positions)
    return replace(shapes, max_len=options.max_len)


@contextlib.contextmanager
def directory_beside(out: Path, keep: Path | None) -> Iterator[Path]:
    """Where to export to: `keep`, or a directory on the same disk as `out` that goes away."""
    if keep is not None:
        yield keep
        return
    from spec_export.engines.atomic import storage_error

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(
            prefix=f".{out.name}.", suffix=".exported", dir=out.parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise storage_error(error, out) from error
    with folder as path:
        yield Path(path) / "exported"


def _silence_libraries() -> None:
    """What transformers and torch remark about a checkpoint is not about the export."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    for name in ("transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)

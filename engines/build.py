"""From an exported directory to a bundle: engines with pinned shapes, checked and probed.

Everything that depends on gamma, on the context length or on this device is decided here.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from spec_export.engines.atomic import check_replaceable, new_directory
from spec_export.engines.backend import Backend, Compiled
from spec_export.engines.build_sampling import compile_sampling
from spec_export.engines.bundle import Bundle, Progress, VerifiedFiles, list_files, no_progress
from spec_export.engines.bundle import open_bundle as _open_bundle
from spec_export.engines.consistency import (
    GAMMA_RANGE,
    LONGEST_CHUNK,
    check_graphs,
    rounded_capacity,
)
from spec_export.engines.errors import BuildError, IntegrityError
from spec_export.engines.external import check_external
from spec_export.engines.graphs import (
    GRAPHS_FILE,
    GRAPHS_SCHEMA,
    GraphsSpec,
    ModelSpec,
    RoleSpec,
    pinned_roles,
)
from spec_export.engines.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    ExactnessSpec,
    Manifest,
)
from spec_export.engines.probe import probe_exactness
from spec_export.engines.standard import STANDARD_GRAPH, compare_with_standard, onnx_files
from spec_export.engines.strict import read_json, to_json
from spec_export.engines.versions import versions

SelfCheck = Callable[[Path, VerifiedFiles], None]


@dataclass(frozen=True)
class BuildOptions:
    """What a build decides.

    Attributes:
        gamma: drafts per round, 1 to 16; the verify pass has gamma + 1 rows.
        narrower: further, smaller ones to build verify passes for: a round of fewer drafts takes
            the narrowest pass that holds them.
        max_len: tokens of a context, prompt included.
        chunk: rows of a prefill pass.
        link_weights: let the bundle share the files of the exported directory, which goes away, in
            place of a copy.
    """

    gamma: int = 4
    max_len: int = 1024
    chunk: int = 128
    link_weights: bool = False
    narrower: tuple[int, ...] = ()


def read_exported(path: Path) -> GraphsSpec:
    """Read and check the description of an exported directory.

    Raises:
        SchemaError: `graphs.json` is of another schema version or malformed.
        IntegrityError: a file is missing or reads weights from elsewhere.
    """
    if not (path / GRAPHS_FILE).is_file():
        raise IntegrityError(
            f"{path} is not an exported directory: it has no {GRAPHS_FILE}; make one with "
            "`spec-export export`"
        )
    graphs = read_json(path / GRAPHS_FILE, GraphsSpec, schema=GRAPHS_SCHEMA)
    check_graphs(graphs, str(path / GRAPHS_FILE))
    named = [spec.file for spec in graphs.models.values()]
    named += [spec.file for spec in graphs.sampling.values()]
    for relative in named:
        file = path / relative
        if Path(relative).is_absolute() or ".." in Path(relative).parts:
            raise IntegrityError(f"{path}: {relative!r} is outside the directory")
        if not file.is_file():
            raise IntegrityError(f"{file} is missing; export again")
        check_external(file, frozenset(p.name for p in file.parent.iterdir() if not p.is_symlink()))
    return graphs


def verify_exported(
    path: Path,
    graphs: GraphsSpec,
    memory: VerifiedFiles | None = None,
    progress: Progress = no_progress,
) -> None:
    """Hash an exported directory: what it says of parity holds for these files and no others.

    Raises:
        IntegrityError: a file is missing, was cut or altered, or is used and not listed.
    """
    memory = VerifiedFiles(None) if memory is None else memory
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    for done, relative in enumerate(sorted(graphs.files)):
        progress("hashing what was exported", done, len(graphs.files))
        spec, file = graphs.files[relative], path / relative
        if relative not in found:
            raise IntegrityError(f"{file} is missing; copy the whole directory, or export again")
        if file.stat().st_size != spec.bytes or memory.sha256(file) != spec.sha256:
            raise IntegrityError(
                f"{file} was altered since it was exported; copy the directory again, or export "
                "again"
            )
    progress("hashing what was exported", len(graphs.files), len(graphs.files))
    used = {*onnx_files(path, graphs), graphs.text.tokenizer}
    unknown = sorted(used - set(graphs.files))
    if unknown:
        raise IntegrityError(f"{path}: {GRAPHS_FILE} uses {unknown[0]!r} but does not list it")


def build_bundle(
    exported: Path,
    out: Path,
    backend: Backend,
    options: BuildOptions | None = None,
    memory: VerifiedFiles | None = None,
    progress: Progress = no_progress,
    self_check: SelfCheck = lambda path, memory: None,
    source: Path | None = None,
    reference: Path | None = None,
) -> Bundle:
    """Compile an exported directory for this device.

    What is built where it cannot run is neither compared nor probed, and says so: `check` does both
    on the device.

    Args:
        exported: directory with `graphs.json`.
        out: bundle to write; taken as a whole or not at all.
        backend: the engine library.
        options: gamma, context length and chunk.
        memory: where hashes of the new files are remembered.
        progress: called with (step, done, total).
        self_check: called with the finished bundle, still beside `out`, and the hashes of its
            files; what it raises leaves no bundle. Not called where the bundle cannot run.
        source: the directory `exported` was derived from, whose graphs the manifest names.
        reference: the directory whose graphs engines are held against; `exported` unless given.

    Raises:
        BuildError: the options do not fit the models, or a lowered engine computes something else.
        StorageError: `out` cannot be written.
    """
    options = options or BuildOptions()
    graphs = read_exported(exported)
    check_options(options, graphs)
    check_replaceable(out, MANIFEST_FILE)
    memory, hashed = memory or VerifiedFiles(None), VerifiedFiles(None)
    verify_exported(exported, graphs, memory, progress)
    gammas = gammas_for(options, graphs.method)
    gamma = max(gammas, default=0)
    capacity = capacity_for(options, gamma)
    models = pinned_models(graphs, options)
    standards = models if reference is None else pinned_models(read_exported(reference), options)
    with new_directory(out, MANIFEST_FILE) as work:
        compiled = {}
        for name, spec in models.items():
            progress(f"compiling the {name}", 0, 1)
            portable = graphs.models[name]
            compiled[name] = _compile(
                backend, exported, portable, spec, work, capacity, options.link_weights
            )
            models[name] = _as_compiled(spec, compiled[name])
            progress(f"compiling the {name}", 1, 1)
            if backend.can_run:
                described = replace(standards[name], roles=models[name].roles)
                standard = (reference or exported) / portable.file
                said = _check_engine(
                    backend, work, name, models[name], standard, described, options, progress
                )
                compiled[name] = replace(compiled[name], lowered=(*compiled[name].lowered, *said))
        sampling = compile_sampling(backend, exported, graphs, capacity, gammas, work, progress)
        shutil.copytree(exported / "text", work / "text")
        exactness = _probe(backend, work, models["target"], capacity, options.max_len, progress)
        manifest = Manifest(
            schema=MANIFEST_SCHEMA,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            producer=graphs.producer
            | {f"{k} (build)": v for k, v in versions("spec-export").items()},
            source=graphs.source,
            method=graphs.method,
            gamma=gamma,
            gammas=gammas,
            max_len=options.max_len,
            chunk=options.chunk,
            capacity=capacity,
            device=backend.describe(),
            models=models,
            sampling=sampling,
            text=graphs.text,
            parity=graphs.parity,
            lowered={name: made.lowered for name, made in compiled.items()},
            exactness=exactness,
            onnx=_listed_hashes(source or exported),
            compiler=backend.compiler(),
            engines={n: made.engine for n, made in compiled.items() if made.engine is not None},
            files=list_files(work, hashed),
        )
        (work / MANIFEST_FILE).write_text(to_json(manifest), encoding="utf-8")
        if backend.can_run:
            self_check(work, hashed)
    return _open_bundle(out, memory, progress)


def _listed_hashes(exported: Path) -> dict[str, str]:
    """SHA-256 of graphs and weights as the directory lists them, which was verified."""
    graphs = read_exported(exported)
    return {name: graphs.files[name].sha256 for name in onnx_files(exported, graphs)}


def check_options(options: BuildOptions, graphs: GraphsSpec) -> None:
    """Refuse what the models cannot serve.

    Raises:
        BuildError: naming the value, what is possible, and the option.
    """
    check_shapes(options, graphs.method, graphs.models["target"].max_position)


def check_shapes(options: BuildOptions, method: str, positions: int) -> None:
    """Refuse what a target with `positions` positions cannot serve; see `check_options`."""
    low, high = GAMMA_RANGE
    for gamma in gammas_for(options, method):
        if not low <= gamma <= high:
            raise BuildError(f"--gamma {gamma} is outside {low} to {high}")
    if not 2 <= options.max_len <= positions:
        raise BuildError(
            f"--max-len {options.max_len}: the target has {positions} positions, so a "
            f"context is 2 to {positions} tokens"
        )
    if not 2 <= options.chunk <= LONGEST_CHUNK:
        raise BuildError(f"--chunk {options.chunk} is outside 2 to {LONGEST_CHUNK}")


def gammas_for(options: BuildOptions, method: str) -> tuple[int, ...]:
    """Every gamma that a verify pass is built for, ascending; none without a draft."""
    return () if method == "none" else tuple(sorted({options.gamma, *options.narrower}))


def capacity_for(options: BuildOptions, gamma: int) -> int:
    """Rows of a cache; see `rounded_capacity`."""
    return rounded_capacity(options.max_len, options.chunk, gamma)


def pinned_models(graphs: GraphsSpec, options: BuildOptions) -> dict[str, ModelSpec]:
    """The models of an exported directory with numbers for all that a build decides."""
    gammas = gammas_for(options, graphs.method)
    capacity = capacity_for(options, max(gammas, default=0))
    return {
        name: _pinned(spec, capacity, pinned_roles(spec.roles, options.chunk, gammas))
        for name, spec in graphs.models.items()
    }


def _pinned(spec: ModelSpec, capacity: int, roles: tuple[RoleSpec, ...]) -> ModelSpec:
    symbols = {"C": capacity}
    return replace(
        spec,
        inputs=tuple(tensor.pinned(symbols) for tensor in spec.inputs),
        outputs=tuple(tensor.pinned(symbols) for tensor in spec.outputs),
        states=tuple(
            replace(s, dims=tuple(symbols.get(d, d) if isinstance(d, str) else d for d in s.dims))
            for s in spec.states
        ),
        roles=roles,
    )


def _compile(
    backend: Backend,
    exported: Path,
    portable: ModelSpec,
    spec: ModelSpec,
    work: Path,
    capacity: int,
    link: bool,
) -> Compiled:
    """Compile a model; its standard graph is kept beside it where its weights are."""
    source, folder = exported / portable.file, (work / spec.file).parent
    pinned = replace(portable, roles=spec.roles)
    compiled = backend.compile_model(source, pinned, capacity, folder, link)
    if Path(compiled.file).suffix == source.suffix:
        shutil.copyfile(source, folder / STANDARD_GRAPH)
    return compiled


def _as_compiled(spec: ModelSpec, compiled: Compiled) -> ModelSpec:
    """The description of a model after it was compiled."""
    file = PurePosixPath(spec.file).with_name(compiled.file)
    return replace(spec, file=str(file), roles=compiled.roles or spec.roles)


def _probe(
    backend: Backend, work: Path, spec: ModelSpec, capacity: int, max_len: int, progress: Progress
) -> ExactnessSpec:
    if not backend.can_run:
        return ExactnessSpec("unprobed", (), (), 0, "built where it cannot run")
    engine = backend.open_model(work / spec.file, spec)
    return probe_exactness(backend.device, engine, spec, capacity, max_len, progress)


def _check_engine(
    backend: Backend,
    work: Path,
    name: str,
    spec: ModelSpec,
    standard: Path,
    described: ModelSpec,
    options: BuildOptions,
    progress: Progress,
) -> tuple[str, ...]:
    """Hold the compiled engine against its standard graph; returns how it computes otherwise."""
    progress(f"checking the compiled {name}", 0, 1)
    result = compare_with_standard(backend, work, spec, options.max_len, standard, described)
    progress(f"checking the compiled {name}", 1, 1)
    if not result.agrees:
        raise BuildError(f"the compiled {name} does not compute its graph: {result.describe()}")
    if result.as_run is None:
        return ()
    return (f"products in 8 bits, row by row: best token the same in {result.as_run:.2%}",)

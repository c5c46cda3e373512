"""What tests share: the tiny pair, exported once, and bundles of it, built when first asked for.

Everything here is made through the public API and must not be written to: copy it first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.bundle import VerifiedFiles
from spec_export.engines.ort import OrtBackend
from spec_export.runtime import OpenedBundle, open_runtime
from tests import exported as assembling
from tests.tiny_models import POSITIONS, TINY, save_tiny_model

GAMMA, MAX_LEN, CHUNK = 4, 128, 32

if TYPE_CHECKING:
    from spec_export.export.exporter import ExportedPair

ExportPair = Callable[..., "ExportedPair"]
Build = Callable[..., Path]
Export = Callable[[str], Path]
Open = Callable[[Path], OpenedBundle]


@pytest.fixture(scope="session")
def export_pair() -> Iterator[Callable[..., ExportedPair]]:
    """`export_pair`, which makes the sampling graphs of a pair of vocabularies once a session.

    They depend on nothing else, and building them takes as long as the rest of a tiny build.
    """
    exporter = pytest.importorskip("spec_export.export.exporter", reason="needs the extra [export]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "sampling_graphs", functools.cache(exporter.sampling_graphs))
        yield exporter.export_pair


@pytest.fixture(scope="session")
def tiny_pair_exported(export_pair: ExportPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair, exported as float32."""
    out = tmp_path_factory.mktemp("pair") / "exported"
    return export_pair(str(TINY / "target"), str(TINY / "draft"), out).path


@pytest.fixture(scope="session")
def tiny_exported(tiny_pair_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """The tiny target with another draft.

    `pair`, `ngram`, `none`; `self`: the target itself; `random`: the pair's draft with its weights
    shuffled; `short`: the pair's draft, made for 40 positions.
    """
    pair = tiny_pair_exported
    made = {"pair": pair}

    def export(draft: str) -> Path:
        if draft not in made:
            out = tmp_path_factory.mktemp(draft) / "exported"
            if draft in ("ngram", "none"):
                assembling.with_method(pair, draft, out)  # type: ignore[arg-type]
            elif draft == "short":
                assembling.with_draft(pair, pair, "draft", out, max_position=40)
            else:
                model = {"self": "target", "random": "draft"}[draft]
                assembling.with_draft(pair, pair, model, out)
            if draft == "random":
                assembling.scramble_weights(out, "draft", seed=1)
            made[draft] = out
        return made[draft]

    return export


@pytest.fixture(scope="session")
def build_tiny(tiny_exported: Export, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build the tiny target with a draft of `tiny_exported`; each combination once."""
    made: dict[tuple[str, int, int, int], Path] = {}

    def build(
        draft: str = "pair", gamma: int = GAMMA, max_len: int = MAX_LEN, chunk: int = CHUNK
    ) -> Path:
        key = (draft, gamma, max_len, chunk)
        if key not in made:
            out = tmp_path_factory.mktemp(f"{draft}_{gamma}") / "bundle"
            options = BuildOptions(gamma=gamma, max_len=max_len, chunk=chunk)
            made[key] = build_bundle(tiny_exported(draft), out, OrtBackend(), options).path
        return made[key]

    return build


@pytest.fixture(scope="session")
def tiny_bundle(build_tiny: Build) -> Path:
    """The tiny pair at gamma 4, 128 tokens, prefill in chunks of 32."""
    return build_tiny("pair")


@pytest.fixture(scope="session")
def tiny_ngram_bundle(build_tiny: Build) -> Path:
    """The tiny target with prompt lookup."""
    return build_tiny("ngram")


@pytest.fixture(scope="session")
def tiny_plain_bundle(build_tiny: Build) -> Path:
    """The tiny target without a draft."""
    return build_tiny("none")


@pytest.fixture(scope="session")
def tiny_self_bundle(build_tiny: Build) -> Path:
    """The tiny target with itself as its draft."""
    return build_tiny("self")


@pytest.fixture(scope="session")
def open_once() -> Open:
    """Open a bundle, once a session of tests, without a memory of verified files."""
    made: dict[Path, OpenedBundle] = {}

    def opened(path: Path) -> OpenedBundle:
        if path not in made:
            made[path] = open_runtime(path, memory=VerifiedFiles(None))
        return made[path]

    return opened


@pytest.fixture(scope="session")
def export_family(
    export_pair: ExportPair, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Export a random model of a family of `tiny_models`, with prompt lookup; each once."""
    made: dict[tuple[str, str], Path] = {}

    def export(family: str, dtype: str = "float32") -> Path:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{family}_{dtype}")
            checkpoint = save_tiny_model(folder / "checkpoint", family)
            out = folder / "exported"
            made[family, dtype] = export_pair(str(checkpoint), "ngram", out, dtype=dtype).path
        return made[family, dtype]

    return export


@pytest.fixture(scope="session")
def build_family(
    export_family: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Build a random model of a family with draft `ngram` or `self` (itself); each once.

    At gamma 8, to the end of its positions, in chunks of 20 rows, which do not divide them.
    """
    made: dict[tuple[str, str], Path] = {}

    def build(family: str, draft: str = "ngram") -> Path:
        if (family, draft) not in made:
            folder, exported = tmp_path_factory.mktemp(f"{family}_{draft}"), export_family(family)
            if draft == "self":
                exported = assembling.with_draft(exported, exported, "target", folder / "exported")
            options = BuildOptions(gamma=8, max_len=POSITIONS, chunk=20)
            bundle = build_bundle(exported, folder / "bundle", OrtBackend(), options)
            made[family, draft] = bundle.path
        return made[family, draft]

    return build

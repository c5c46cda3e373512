"""Exported directories put together from others, so that the tests trace each model once.

What comes out has the layout that `export_pair` writes. `parity` is left as it was: nothing was
checked again.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from spec_export.engines.build import read_exported
from spec_export.engines.graphs import DRAFT_ROLES, GRAPHS_FILE, GraphsSpec, ModelSpec
from spec_export.engines.hashing import describe_files
from spec_export.engines.strict import to_json

Method = Literal["ngram", "none"]


def with_method(exported: Path, method: Method, out: Path) -> Path:
    """The target of `exported`, with prompt lookup or without a draft."""
    graphs = read_exported(exported)
    return _write(exported, graphs, None, method, out)


def with_draft(exported: Path, drafts: Path, model: str, out: Path, **changes: int) -> Path:
    """The target of `exported` drafting with a model of `drafts`; `changes` go into its spec."""
    graphs, others = read_exported(exported), read_exported(drafts)
    spec = replace(others.models[model], file="draft/model.onnx", roles=DRAFT_ROLES, **changes)
    shutil.copytree(drafts / model, out / "draft")
    return _write(exported, graphs, spec, "model", out)


def scramble_weights(exported: Path, model: str, seed: int) -> None:
    """Shuffle every weight of a model within blocks: the same magnitudes, and nothing learned."""
    file = exported / model / "model.onnx.data"
    weights = np.fromfile(file, np.float32)
    np.random.default_rng(seed).shuffle(weights)
    weights.tofile(file)
    redescribe(exported)


def redescribe(exported: Path) -> None:
    """Have the description tell of the files as they are now."""
    described = exported / GRAPHS_FILE
    graphs = read_exported(exported)
    described.unlink()
    described.write_text(to_json(replace(graphs, files=describe_files(exported))), encoding="utf-8")


def _write(
    exported: Path,
    graphs: GraphsSpec,
    draft: ModelSpec | None,
    method: Literal["model", "ngram", "none"],
    out: Path,
) -> Path:
    from spec_export.export import exporter

    shutil.copytree(exported / "target", out / "target")
    shutil.copytree(exported / "text", out / "text")
    models = {"target": graphs.models["target"]} | ({"draft": draft} if draft else {})
    changed = replace(
        graphs, method=method, models=models, sampling=exporter._write_sampling(out, models)
    )
    changed = replace(changed, files=describe_files(out))
    (out / GRAPHS_FILE).write_text(to_json(changed), encoding="utf-8")
    return out

"""Show what a bundle, an exported directory or a single ONNX file holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_export.console import Steps, print_rows, size
from spec_export.engines.errors import IntegrityError
from spec_export.making_report import (
    METHODS,
    Rows,
    compiler_rows,
    device,
    exactness,
    gammas,
    parity_rows,
)

if TYPE_CHECKING:
    from spec_export.engines.bundle import Bundle
    from spec_export.engines.graphs import GraphsSpec, ModelSpec, TextSpec
    from spec_export.engines.manifest import Manifest

_HASH_SHOWN = 16


def inspect(path: Path, *, as_json: bool) -> None:
    """Print what is at `path`.

    Raises:
        IntegrityError: it is none of the three, or cannot be trusted.
        MissingExtra: it is an ONNX file and `onnx_ir` is not installed.
    """
    from spec_export.engines.graphs import GRAPHS_FILE
    from spec_export.engines.manifest import MANIFEST_FILE

    if path.is_file() and path.suffix == ".onnx":
        from spec_export.onnx_file import onnx_object, onnx_rows, read_onnx

        found = read_onnx(path)
        _show(onnx_rows(found), onnx_object(found), as_json)
    elif (path / MANIFEST_FILE).is_file():
        bundle = _open(path, quiet=as_json)
        shown = {"sha256": bundle.sha256, **dataclasses.asdict(bundle.manifest)}
        _show(bundle_rows(bundle), {"kind": "bundle", **shown}, as_json)
    elif (path / GRAPHS_FILE).is_file():
        from spec_export.engines.build import read_exported

        graphs = read_exported(path)
        described = {"kind": "exported", **dataclasses.asdict(graphs)}
        _show(exported_rows(path, graphs), described, as_json)
    else:
        raise IntegrityError(
            f"{path} {'holds' if path.exists() else 'does not exist, so it is'} none of: a bundle "
            f"({MANIFEST_FILE}), an exported directory ({GRAPHS_FILE}), an .onnx file"
        )


def bundle_rows(bundle: Bundle) -> Rows:
    """Everything of a manifest, and what follows from it."""
    from spec_export.engines.passes import cache_bytes

    manifest = bundle.manifest
    caches = sum(cache_bytes(spec) for spec in manifest.models.values())
    return [
        ("bundle", f"{bundle.path}"),
        ("hash", bundle.sha256),
        ("created", manifest.created),
        *_source_rows(manifest.source, manifest.producer),
        ("method", f"{METHODS[manifest.method]}, gamma {gammas(manifest)}"),
        ("context", f"{manifest.max_len} tokens (caches of {manifest.capacity} rows)"),
        *_model_rows(manifest.models),
        ("memory", f"one session's caches {size(caches)}"),
        *_text_rows(manifest.text),
        *(("lowered", f"{name}: {', '.join(how)}") for name, how in manifest.lowered.items()),
        *parity_rows(manifest.parity, manifest.models),
        ("exactness", exactness(manifest.exactness)),
        ("built on", device(manifest.device)),
        *compiler_rows(manifest),
        *_profile_rows(manifest),
        *_titled(
            "files",
            [
                f"{file.sha256[:_HASH_SHOWN]}  {size(file.bytes):>10}  {name}"
                for name, file in manifest.files.items()
            ],
        ),
    ]


def _profile_rows(manifest: Manifest) -> Rows:
    """Which optimization profile of an engine serves which role."""
    return [
        (
            "profiles",
            f"{name}: {', '.join(f'{role} {i}' for role, i in engine.profiles.items())}",
        )
        for name, engine in manifest.engines.items()
    ]


def exported_rows(path: Path, graphs: GraphsSpec) -> Rows:
    """Everything of `graphs.json`, and the sizes of the files."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return [
        ("exported", f"{path}"),
        *_source_rows(graphs.source, graphs.producer),
        ("method", METHODS[graphs.method]),
        ("opset", f"{graphs.opset}"),
        *_model_rows(graphs.models),
        ("memory", _cache_row(graphs.models)),
        *_text_rows(graphs.text),
        *parity_rows(graphs.parity, graphs.models),
        *_titled(
            "files",
            [f"{size(file.stat().st_size):>10}  {file.relative_to(path)}" for file in files],
        ),
    ]


def _open(path: Path, *, quiet: bool) -> Bundle:
    from spec_export.engines.bundle import default_memory, open_bundle

    with Steps(quiet=quiet, lines=False) as steps:
        return open_bundle(path, default_memory(), steps)


def _show(rows: Rows, described: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(described, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_rows(rows)


def _source_rows(source: dict[str, str], producer: dict[str, str]) -> Rows:
    made_with = ", ".join(f"{name} {version}" for name, version in producer.items())
    return [
        *(("from", f"{name}: {what}") for name, what in source.items()),
        ("made with", made_with),
    ]


def _model_rows(models: dict[str, ModelSpec]) -> Rows:
    rows: Rows = []
    for name, spec in models.items():
        windows = {state.window for state in spec.states if state.window is not None}
        window = f", window {', '.join(map(str, sorted(windows)))}" if windows else ""
        rows.append(
            (
                name,
                f"{spec.architecture}, {spec.dtype}, {spec.layers} layers, vocabulary "
                f"{spec.vocabulary}, {spec.max_position} positions{window}, weights "
                f"{size(spec.parameters_bytes)}",
            )
        )
        if spec.quantization is not None:
            rows.append(("", spec.quantization.describe()))
        rows += [
            ("", f"{role.name:<13} {role.rows!s:>7} rows, {role.logit_rows!s:>7} with logits")
            for role in spec.roles
        ]
    return rows


def _cache_row(models: dict[str, ModelSpec]) -> str:
    from spec_export.making import cache_bytes_at

    per_token = sum(cache_bytes_at(spec, 1) for spec in models.values())
    return f"caches take {size(per_token)} a token of context"


def _text_rows(text: TextSpec) -> Rows:
    chat = "with a chat template" if text.chat_template else "no chat template"
    ends = ", ".join(map(str, text.end_ids)) or "none"
    start = "none" if text.bos_id is None else f"{text.bos_id}"
    return [("text", f"{text.vocabulary} ids, {chat}, BOS {start}, end {ends}")]


def _titled(label: str, lines: list[str]) -> Rows:
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]

"""From checkpoints to an exported directory: graphs, weights, tokenizer and `graphs.json`.

The directory is portable: no gamma, no context length and no engine is decided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
from transformers import PreTrainedModel

from spec_export.engines.atomic import check_replaceable, new_directory
from spec_export.engines.errors import ExportError
from spec_export.engines.graphs import (
    DRAFT_ROLES,
    GRAPHS_FILE,
    GRAPHS_SCHEMA,
    TARGET_ROLES,
    Dim,
    ElementType,
    GraphsSpec,
    ModelSpec,
    ParitySpec,
    SamplingSpec,
    StateSpec,
    TensorSpec,
    TextSpec,
)
from spec_export.engines.hashing import describe_files
from spec_export.engines.strict import to_json
from spec_export.engines.versions import versions
from spec_export.export.checkpoint import Checkpoint, TextFiles, open_checkpoint
from spec_export.export.decoder import OPSET, LayerCache, trace_decoder
from spec_export.export.pair import check_pair
from spec_export.export.parity import check_parity
from spec_export.export.rewrite import make_portable
from spec_export.export.sampling_graphs import sampling_graphs
from spec_export.export.skeleton import build_skeleton, max_position
from spec_export.export.weights import DTYPES, attach_weights, map_weights, save_graph

Progress = Callable[[str, int, int], None]
Method = Literal["model", "ngram", "none"]
WITHOUT_MODEL: dict[str, Method] = {"ngram": "ngram", "none": "none"}


@dataclass(frozen=True)
class ExportedPair:
    """An exported directory and its description."""

    path: Path
    graphs: GraphsSpec


def export_pair(
    target: str,
    draft: str,
    out: Path,
    *,
    dtype: ElementType = "float32",
    trust_remote_code: bool = False,
    progress: Progress = lambda *_: None,
) -> ExportedPair:
    """Export a target and its draft.

    Args:
        target: Hugging Face directory, hub id or GGUF file.
        draft: another of these, or `ngram` (prompt lookup) or `none`.
        out: directory to write; taken as a whole or not at all.
        dtype: element type of weights and caches, `float32` or `float16`.
        trust_remote_code: run code that comes with the checkpoints.
        progress: called with (step, done, total).

    Raises:
        CheckpointError: a checkpoint cannot be read or is not supported.
        PairError: the tokenizers differ.
        ParityError: a graph does not compute what torch computes.
        StorageError: `out` cannot be written.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype {dtype!r} cannot be exported; choose {' or '.join(DTYPES)}")
    check_replaceable(out, GRAPHS_FILE)
    method = WITHOUT_MODEL.get(draft, "model")
    checkpoints = {"target": open_checkpoint(target, trust_remote_code=trust_remote_code)}
    if method == "model":
        checkpoints["draft"] = open_checkpoint(draft, trust_remote_code=trust_remote_code)
        check_pair(
            checkpoints["target"].text,
            checkpoints["draft"].text,
            checkpoints["target"].config.vocab_size,
            checkpoints["draft"].config.vocab_size,
        )
    with new_directory(out, GRAPHS_FILE) as work:
        models: dict[str, ModelSpec] = {}
        parity: dict[str, ParitySpec] = {}
        for name, checkpoint in checkpoints.items():
            models[name], parity[name] = _export_model(
                name, checkpoint, work, dtype, trust_remote_code, progress
            )
        graphs = GraphsSpec(
            schema=GRAPHS_SCHEMA,
            producer=versions("spec-export", "torch", "transformers", "onnxruntime"),
            source={name: _source(c.source) for name, c in checkpoints.items()},
            opset=OPSET,
            method=method,
            models=models,
            sampling=_write_sampling(work, models),
            text=write_text(work, checkpoints["target"].text),
            parity=parity,
            files=describe_files(work),
        )
        (work / GRAPHS_FILE).write_text(to_json(graphs), encoding="utf-8")
    return ExportedPair(out, graphs)


def _export_model(
    name: str,
    checkpoint: Checkpoint,
    work: Path,
    dtype: ElementType,
    trust_remote_code: bool,
    progress: Progress,
) -> tuple[ModelSpec, ParitySpec]:
    torch_dtype = DTYPES[dtype][2]
    progress(f"tracing the {name}", 0, 1)
    traced = trace_decoder(checkpoint.config, torch_dtype, trust_remote_code)
    parameters = canonical_names(traced.skeleton)
    portable = make_portable(traced.model, len(traced.layers), parameters)
    progress(f"tracing the {name}", 1, 1)

    shapes = {
        key: tuple(value.shape)
        for key, value in traced.skeleton.named_parameters()
        if key in portable.weights
    }
    reader = checkpoint.weights_for(shapes)
    folder = work / name
    folder.mkdir()
    total = sum(v.numel() * torch_dtype.itemsize for v in traced.skeleton.parameters())
    written = 0

    def count(size: int) -> None:
        nonlocal written
        written += size
        progress(f"writing the {name}", written, total)

    data = folder / "model.onnx.data"
    size = attach_weights(portable.model, portable.weights, reader, dtype, data, count)
    progress(f"writing the {name}", size, size)
    graph = folder / "model.onnx"
    save_graph(portable.model, graph)
    architecture = type(traced.skeleton).__name__
    spec = _model_spec(name, portable.model, checkpoint, traced.layers, dtype, size, architecture)
    del traced, reader

    progress(f"checking the {name} against torch", 0, 1)
    reference = build_skeleton(checkpoint.config, torch_dtype, "eager", trust_remote_code)
    map_weights(reference, portable.model, portable.weights)
    found = check_parity(reference, graph, spec)
    progress(f"checking the {name} against torch", 1, 1)
    return spec, found


def canonical_names(model: PreTrainedModel) -> dict[str, str]:
    """Every parameter name to the first name of the same parameter."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _model_spec(
    name: str,
    model: ir.Model,
    checkpoint: Checkpoint,
    layers: list[LayerCache],
    dtype: ElementType,
    size: int,
    architecture: str,
) -> ModelSpec:
    caches = [
        (f"{index}.{kind}", layer)
        for index, layer in enumerate(layers)
        for kind in ("key", "value")
    ]
    states = tuple(
        StateSpec(
            input=f"past_key_values.{suffix}",
            output=f"present.{suffix}",
            kind="self",
            length_axis=2,
            dtype=dtype,
            dims=(1, layer.heads, "C", layer.size),
            window=layer.window,
            aliased=True,
        )
        for suffix, layer in caches
    )
    logits = _tensor_spec(model.graph.outputs[0])
    return ModelSpec(
        file=f"{name}/model.onnx",
        architecture=architecture,
        dtype=dtype,
        vocabulary=int(logits.dims[2]),
        max_position=max_position(checkpoint.config),
        layers=len(layers),
        inputs=tuple(_tensor_spec(v) for v in model.graph.inputs),
        outputs=tuple(_tensor_spec(v) for v in model.graph.outputs),
        states=states,
        taps=(),
        roles=TARGET_ROLES if name == "target" else DRAFT_ROLES,
        parameters_bytes=size,
    )


_ELEMENT_TYPES: dict[Any, ElementType] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT64: "int64",
    ir.DataType.INT32: "int32",
    ir.DataType.UINT8: "uint8",
    ir.DataType.BOOL: "bool",
}


def _tensor_spec(value: ir.Value) -> TensorSpec:
    assert value.name is not None and value.shape is not None and value.dtype is not None
    dims: list[Dim] = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    return TensorSpec(value.name, _ELEMENT_TYPES[value.dtype], tuple(dims))


def _write_sampling(work: Path, models: dict[str, ModelSpec]) -> dict[str, SamplingSpec]:
    folder = work / "sampling"
    folder.mkdir()
    draft = models["draft"].vocabulary if "draft" in models else None
    written = {}
    for name, model in sampling_graphs(models["target"].vocabulary, draft).items():
        save_graph(model, folder / f"{name}.onnx")
        written[name] = SamplingSpec(
            f"sampling/{name}.onnx",
            tuple(_tensor_spec(v) for v in model.graph.inputs),
            tuple(_tensor_spec(v) for v in model.graph.outputs),
        )
    return written


def write_text(work: Path, text: TextFiles) -> TextSpec:
    """Write the tokenizer and the chat template; returns their description."""
    folder = work / "text"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(text.tokenizer_json)
    template = None
    if text.chat_template is not None:
        template = "text/chat_template.jinja"
        (work / template).write_text(text.chat_template, encoding="utf-8")
    return TextSpec(
        tokenizer="text/tokenizer.json",
        tokenizer_sha256=hashlib.sha256(text.tokenizer_json).hexdigest(),
        chat_template=template,
        special_tokens=dict(text.special_tokens),
        bos_id=text.bos_id,
        add_bos=text.add_bos,
        end_ids=tuple(text.end_ids),
        vocabulary=text.vocabulary,
    )


def _source(source: str) -> str:
    """What to record of a source: its last part, so that no path of this machine is kept."""
    return Path(source).name if Path(source).exists() else source

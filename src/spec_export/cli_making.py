"""Commands that make something: what their options say, put together, and the work called."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_export import options as opt
from spec_export import options_making as making_opt
from spec_export import options_quantizing as quant_opt

if TYPE_CHECKING:
    from spec_export.compiling import Compiling
    from spec_export.quantizing import Quantizing


def model_to_engine(
    target: making_opt.Target,
    output: making_opt.BundleOut,
    draft: making_opt.Draft = "ngram",
    gamma: making_opt.BuiltGamma = "4",
    max_len: making_opt.MaxLen = None,
    chunk: making_opt.Chunk = 128,
    dtype: making_opt.BuiltDtype = None,
    backend: opt.Backend = opt.BackendName.onnxruntime,
    threads: making_opt.BuildThreads = None,
    weights: quant_opt.Weights = None,
    draft_weights: quant_opt.DraftWeights = None,
    quantizer: quant_opt.Quantizer = None,
    block: quant_opt.Block = None,
    head: quant_opt.Head = None,
    kv: quant_opt.Kv = None,
    activations: quant_opt.ActivationsOption = None,
    calibrator: quant_opt.CalibratorOption = None,
    calibration: quant_opt.Calibration = None,
    compute_capability: making_opt.ComputeCapability = None,
    workspace: making_opt.Workspace = None,
    timing_cache: making_opt.TimingCache = None,
    builder_optimization_level: making_opt.OptimizationLevel = None,
    no_single_row: making_opt.NoSingleRow = False,
    keep_exported: making_opt.KeepExported = None,
    trust_remote_code: making_opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Checkpoint to bundle: export, build, check."""
    from spec_export import making, making_report
    from spec_export.console import Steps, print_rows

    asked = _quantizing(
        weights, draft_weights, quantizer, block, head, kv, activations, calibrator, calibration
    )
    chosen = _compiling(
        asked,
        backend,
        threads,
        dtype,
        compute_capability,
        workspace,
        timing_cache,
        builder_optimization_level,
        no_single_row=no_single_row,
    )
    checkpoints = making.Checkpoints(target, draft, chosen.exported_dtype, trust_remote_code)
    shapes = making.Shapes(making.parse_gammas(gamma), max_len, chunk)
    lost = making_report.lost_rows(output)
    with Steps(quiet=quiet) as steps:
        made = making.model_to_engine(checkpoints, shapes, output, chosen, keep_exported, steps)
    if not quiet:
        print_rows(making_report.made_rows(made, lost))


def export(
    target: making_opt.Target,
    output: opt.ExportedOut,
    draft: making_opt.Draft = "ngram",
    dtype: making_opt.Dtype = making_opt.ElementTypeName.float32,
    trust_remote_code: making_opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Checkpoint to portable ONNX, for any device."""
    from spec_export import making, making_report
    from spec_export.console import Steps, print_rows

    checkpoints = making.Checkpoints(target, draft, dtype.value, trust_remote_code)
    with Steps(quiet=quiet) as steps:
        pair = making.export(checkpoints, output, steps)
    if not quiet:
        print_rows(making_report.exported_rows(pair))


def quantize(
    exported: opt.Exported,
    output: opt.ExportedOut,
    weights: quant_opt.QuantizedWeights = None,
    draft_weights: quant_opt.DraftWeights = None,
    quantizer: quant_opt.Quantizer = None,
    block: quant_opt.Block = None,
    head: quant_opt.Head = None,
    kv: quant_opt.Kv = None,
    activations: quant_opt.ActivationsOption = None,
    calibrator: quant_opt.CalibratorOption = None,
    calibration: quant_opt.Calibration = None,
    backend: opt.Backend = opt.BackendName.onnxruntime,
    quiet: opt.Quiet = False,
) -> None:
    """Portable ONNX in float32 to portable ONNX of fewer bits, for `build`."""
    from spec_export import making_report
    from spec_export.console import Steps, print_rows
    from spec_export.quantizing import quantize_directory

    asked = _quantizing(
        weights, draft_weights, quantizer, block, head, kv, activations, calibrator, calibration
    )
    with Steps(quiet=quiet) as steps:
        graphs = quantize_directory(exported, output, asked, backend.value, steps)
    if not quiet:
        print_rows(making_report.quantized_rows(output, graphs))


def build(
    exported: opt.Exported,
    output: making_opt.BundleOut,
    gamma: making_opt.BuiltGamma = "4",
    max_len: making_opt.MaxLen = None,
    chunk: making_opt.Chunk = 128,
    dtype: making_opt.BuiltDtype = None,
    backend: opt.Backend = opt.BackendName.onnxruntime,
    threads: making_opt.BuildThreads = None,
    weights: quant_opt.Weights = None,
    draft_weights: quant_opt.DraftWeights = None,
    quantizer: quant_opt.Quantizer = None,
    block: quant_opt.Block = None,
    head: quant_opt.Head = None,
    kv: quant_opt.Kv = None,
    activations: quant_opt.ActivationsOption = None,
    calibrator: quant_opt.CalibratorOption = None,
    calibration: quant_opt.Calibration = None,
    compute_capability: making_opt.ComputeCapability = None,
    workspace: making_opt.Workspace = None,
    timing_cache: making_opt.TimingCache = None,
    builder_optimization_level: making_opt.OptimizationLevel = None,
    no_single_row: making_opt.NoSingleRow = False,
    quiet: opt.Quiet = False,
) -> None:
    """Portable ONNX to bundle, on the device that runs it; tensorrt-rtx also for others."""
    from spec_export import making, making_report
    from spec_export.console import Steps, print_rows

    asked = _quantizing(
        weights, draft_weights, quantizer, block, head, kv, activations, calibrator, calibration
    )
    chosen = _compiling(
        asked,
        backend,
        threads,
        dtype,
        compute_capability,
        workspace,
        timing_cache,
        builder_optimization_level,
        no_single_row=no_single_row,
    )
    shapes = making.Shapes(making.parse_gammas(gamma), max_len, chunk)
    lost = making_report.lost_rows(output)
    with Steps(quiet=quiet) as steps:
        made = making.build(exported, shapes, output, chosen, steps)
    if not quiet:
        print_rows(making_report.made_rows(made, lost))


def _quantizing(
    weights: Enum | None,
    draft_weights: Enum | None,
    quantizer: Enum | None,
    block: int | None,
    head: Enum | None,
    kv: Enum | None,
    activations: Enum | None,
    calibrator: Enum | None,
    texts: Path | None,
) -> Quantizing:
    """What is made smaller; `weights` are as they were given, perhaps a type (`_compiling`)."""
    from spec_export.quantizing import Quantizing

    return Quantizing(
        _name(weights),
        _name(draft_weights),
        _name(quantizer),
        block,
        _name(head),
        _name(kv),
        _name(activations),
        _name(calibrator),
        texts,
    )


def _compiling(
    asked: Quantizing,
    backend: Enum,
    threads: int | None,
    dtype: Enum | None,
    compute_capability: str | None,
    workspace: str | None,
    timing_cache: Path | None,
    optimization_level: int | None,
    *,
    no_single_row: bool,
) -> Compiling:
    """What a bundle is compiled with.

    Raises:
        RequestError: `--dtype` and `--weights` contradict each other.
    """
    from spec_export.compiling import Compiling, asked_precision

    dtype_name, weights = asked_precision(_name(dtype), asked.weights)
    return Compiling(
        backend.value,
        threads,
        dtype_name,
        dataclasses.replace(asked, weights=weights),
        compute_capability,
        workspace,
        timing_cache,
        optimization_level,
        not no_single_row,
    )


def _name(chosen: Enum | None) -> Any:
    """The value of an option with names, which its type has checked."""
    return None if chosen is None else chosen.value

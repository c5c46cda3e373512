"""The command line. Options only; every command imports its work when it is run."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from spec_export import options as opt
from spec_export.commands import Command, Commands, run
from spec_export.engines.errors import RequestError

app = typer.Typer(
    cls=Commands,
    help="Turn a target model and a draft into engines, and decode speculatively.",
    epilog="Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from spec_export import __version__

        typer.echo(f"spec-export {__version__}")
        raise typer.Exit


def _name(chosen: Enum | None) -> Any:
    """The value of an option with names, which its type has checked."""
    return None if chosen is None else chosen.value


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command("model-to-engine", cls=Command)
def _model_to_engine(
    target: opt.Target,
    output: opt.BundleOut,
    draft: opt.Draft = "ngram",
    gamma: opt.BuiltGamma = "4",
    max_len: opt.MaxLen = None,
    chunk: opt.Chunk = 128,
    dtype: opt.BuiltDtype = None,
    backend: opt.Backend = opt.BackendName.onnxruntime,
    threads: opt.BuildThreads = None,
    weights: opt.Weights = None,
    draft_weights: opt.DraftWeights = None,
    quantizer: opt.Quantizer = None,
    block: opt.Block = None,
    head: opt.Head = None,
    kv: opt.Kv = None,
    activations: opt.ActivationsOption = None,
    calibrator: opt.CalibratorOption = None,
    calibration: opt.Calibration = None,
    compute_capability: opt.ComputeCapability = None,
    workspace: opt.Workspace = None,
    timing_cache: opt.TimingCache = None,
    builder_optimization_level: opt.OptimizationLevel = None,
    no_single_row: opt.NoSingleRow = False,
    keep_exported: opt.KeepExported = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Checkpoint to bundle: export, build, check."""
    from spec_export import making, making_report
    from spec_export.compiling import Compiling, asked_precision
    from spec_export.console import Steps, print_rows
    from spec_export.quantizing import Quantizing

    dtype_name, weights_name = asked_precision(_name(dtype), _name(weights))
    chosen = Compiling(
        backend.value,
        threads,
        dtype_name,
        Quantizing(
            weights_name,
            _name(draft_weights),
            _name(quantizer),
            block,
            _name(head),
            _name(kv),
            _name(activations),
            _name(calibrator),
            calibration,
        ),
        compute_capability,
        workspace,
        timing_cache,
        builder_optimization_level,
        not no_single_row,
    )
    checkpoints = making.Checkpoints(target, draft, chosen.exported_dtype, trust_remote_code)
    shapes = making.Shapes(making.parse_gammas(gamma), max_len, chunk)
    lost = making_report.lost_rows(output)
    with Steps(quiet=quiet) as steps:
        made = making.model_to_engine(checkpoints, shapes, output, chosen, keep_exported, steps)
    if not quiet:
        print_rows(making_report.made_rows(made, lost))


@app.command("export", cls=Command)
def _export(
    target: opt.Target,
    output: opt.ExportedOut,
    draft: opt.Draft = "ngram",
    dtype: opt.Dtype = opt.ElementTypeName.float32,
    trust_remote_code: opt.TrustRemoteCode = False,
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


@app.command("quantize", cls=Command)
def _quantize(
    exported: opt.Exported,
    output: opt.ExportedOut,
    weights: opt.QuantizedWeights = None,
    draft_weights: opt.DraftWeights = None,
    quantizer: opt.Quantizer = None,
    block: opt.Block = None,
    head: opt.Head = None,
    kv: opt.Kv = None,
    activations: opt.ActivationsOption = None,
    calibrator: opt.CalibratorOption = None,
    calibration: opt.Calibration = None,
    backend: opt.Backend = opt.BackendName.onnxruntime,
    quiet: opt.Quiet = False,
) -> None:
    """Portable ONNX in float32 to portable ONNX of fewer bits, for `build`."""
    from spec_export import making_report
    from spec_export.console import Steps, print_rows
    from spec_export.quantizing import Quantizing, quantize_directory

    asked = Quantizing(
        _name(weights),
        _name(draft_weights),
        _name(quantizer),
        block,
        _name(head),
        _name(kv),
        _name(activations),
        _name(calibrator),
        calibration,
    )
    with Steps(quiet=quiet) as steps:
        graphs = quantize_directory(exported, output, asked, backend.value, steps)
    if not quiet:
        print_rows(making_report.quantized_rows(output, graphs))


@app.command("build", cls=Command)
def _build(
    exported: opt.Exported,
    output: opt.BundleOut,
    gamma: opt.BuiltGamma = "4",
    max_len: opt.MaxLen = None,
    chunk: opt.Chunk = 128,
    dtype: opt.BuiltDtype = None,
    backend: opt.Backend = opt.BackendName.onnxruntime,
    threads: opt.BuildThreads = None,
    weights: opt.Weights = None,
    draft_weights: opt.DraftWeights = None,
    quantizer: opt.Quantizer = None,
    block: opt.Block = None,
    head: opt.Head = None,
    kv: opt.Kv = None,
    activations: opt.ActivationsOption = None,
    calibrator: opt.CalibratorOption = None,
    calibration: opt.Calibration = None,
    compute_capability: opt.ComputeCapability = None,
    workspace: opt.Workspace = None,
    timing_cache: opt.TimingCache = None,
    builder_optimization_level: opt.OptimizationLevel = None,
    no_single_row: opt.NoSingleRow = False,
    quiet: opt.Quiet = False,
) -> None:
    """Portable ONNX to bundle, on the device that runs it; tensorrt-rtx also for others."""
    from spec_export import making, making_report
    from spec_export.compiling import Compiling, asked_precision
    from spec_export.console import Steps, print_rows
    from spec_export.quantizing import Quantizing

    dtype_name, weights_name = asked_precision(_name(dtype), _name(weights))
    chosen = Compiling(
        backend.value,
        threads,
        dtype_name,
        Quantizing(
            weights_name,
            _name(draft_weights),
            _name(quantizer),
            block,
            _name(head),
            _name(kv),
            _name(activations),
            _name(calibrator),
            calibration,
        ),
        compute_capability,
        workspace,
        timing_cache,
        builder_optimization_level,
        not no_single_row,
    )
    shapes = making.Shapes(making.parse_gammas(gamma), max_len, chunk)
    lost = making_report.lost_rows(output)
    with Steps(quiet=quiet) as steps:
        made = making.build(exported, shapes, output, chosen, steps)
    if not quiet:
        print_rows(making_report.made_rows(made, lost))


@app.command("run", cls=Command)
def _run(
    bundle: opt.BundleIn,
    stdin: opt.Stdin = None,
    prompt: opt.Prompt = None,
    chat: opt.Chat = False,
    gamma: opt.Gamma = None,
    draft_confidence: opt.DraftConfidence = None,
    fast_plain: opt.FastPlain = False,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = None,
    samples: opt.Samples = None,
    rule: opt.Rule = None,
    draft_sampling: opt.DraftSampling = opt.DraftSamplingName.probabilistic,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    typical_p: opt.TypicalP = 1.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    no_repeat_ngram: opt.NoRepeatNgram = 0,
    logit_bias: opt.LogitBias = None,
    allow: opt.Allow = None,
    ban: opt.Ban = None,
    min_tokens: opt.MinTokens = 0,
    json_schema: opt.JsonSchema = None,
    regex: opt.Regex = None,
    lark: opt.Lark = None,
    stop: opt.Stop = None,
    logprobs: opt.Logprobs = 0,
    compare: opt.Compare = False,
    as_json: opt.RunAsJson = False,
    quiet: opt.TextOnly = False,
    threads: opt.Threads = None,
    pipeline: opt.Pipeline = None,
) -> None:
    """Generate text; streams it, then says how it was made."""
    from spec_export.running import (
        RunOptions,
        parse_bias,
        parse_gamma,
        read_grammar,
        run_bundle,
    )

    if stdin not in (None, "-"):
        raise RequestError(f"{stdin!r} is in no place; give a prompt as --prompt TEXT")
    if stdin == "-" and prompt not in (None, "-"):
        raise RequestError("--prompt TEXT and - are two prompts; give one")
    if logprobs and not as_json:
        raise RequestError("--logprobs N is shown with --json; give both, or leave it out")
    options = RunOptions(
        prompt=None if prompt == "-" else prompt,
        chat=chat,
        max_tokens=max_tokens,
        sampling={
            "temperature": temperature,
            "seed": seed,
            "rule": rule and rule.value,
            "draft": draft_sampling.value,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "typical_p": typical_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "no_repeat_ngram": no_repeat_ngram,
            "logit_bias": parse_bias(logit_bias or []),
            "allowed_tokens": None if allow is None else tuple(allow),
            "banned_tokens": tuple(ban or ()),
            "min_tokens": min_tokens,
            "top_logprobs": logprobs,
        },
        grammar=read_grammar(json_schema, regex, lark),
        gamma=parse_gamma(gamma),
        draft_confidence=draft_confidence,
        fast_plain=fast_plain,
        stop=tuple(stop or ()),
        samples=samples,
        threads=threads,
        pipelined=pipeline,
        compare=compare,
        show="json" if as_json else "quiet" if quiet else "report",
    )
    if not run_bundle(bundle, options):
        raise typer.Exit(1)


@app.command("inspect", cls=Command)
def _inspect(path: opt.Inspected, as_json: opt.AsJson = False) -> None:
    """Show a bundle, an exported directory or an ONNX file."""
    from spec_export.inspecting import inspect

    inspect(path, as_json=as_json)


@app.command("check", cls=Command)
def _check(
    bundle: opt.BundleIn,
    law: opt.Law = False,
    exported: opt.ExportedHere = None,
    record: opt.Record = False,
    polygraphy: opt.PolygraphyRuns = None,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Hash, compare and probe a bundle here: a certificate."""
    from spec_export.checking import check

    if not check(
        bundle,
        threads,
        law=law,
        as_json=as_json,
        quiet=quiet,
        exported=exported,
        recorded=record,
        runs=polygraphy,
    ):
        raise typer.Exit(1)


@app.command("doctor", cls=Command)
def _doctor(as_json: opt.AsJson = False) -> None:
    """Show this machine, what is missing, and what can be done on it."""
    from spec_export.doctor import doctor

    doctor(as_json=as_json)


@app.command("calibrate", cls=Command)
def _calibrate(
    bundle: opt.BundleIn,
    prompts: opt.Prompts = None,
    tokens: opt.MeasuredTokens = 64,
    temperature: opt.MeasuredTemperature = 0.0,
    rule: opt.MeasuredRule = opt.RuleName.reject,
    seed: opt.MeasuredSeed = 0,
    threads: opt.Threads = None,
    output: opt.ProfileOut = None,
    report: opt.Report = None,
    exported: opt.BuiltFrom = None,
    precisions: opt.ComparedPrecisions = None,
    synthetic: opt.Synthetic = None,
    cost_ratio: opt.SyntheticCost = None,
    as_json: opt.AsJson = False,
    quiet: opt.VerdictOnly = False,
) -> None:
    """Measure a bundle here: is speculation worth it, and with what gamma?"""
    from spec_export import calibrating

    options = calibrating.CalibrateOptions(
        prompts,
        tokens,
        temperature,
        rule.value,
        seed,
        threads,
        output,
        report,
        exported,
        precisions,
    )
    asked = calibrating.SyntheticAsked(synthetic, cost_ratio)
    calibrating.check_asked(options, asked)
    if synthetic is not None:
        calibrating.calibrate_synthetic(bundle, options, asked, as_json=as_json, quiet=quiet)
        return
    calibrating.calibrate_bundle(bundle, options, as_json=as_json, quiet=quiet)


@app.command("plan", cls=Command)
def _plan(
    alpha: opt.Alpha = None,
    cost_ratio: opt.CostRatio = None,
    verify_cost: opt.VerifyCost = None,
    gamma_max: opt.GammaMax = None,
    memory: opt.Memory = None,
    device: opt.BoardOption = None,
    memory_limit: opt.MemoryLimit = None,
    max_len: opt.PlannedMaxLen = None,
    gamma: opt.PlannedGamma = None,
    chunk: opt.PlannedChunk = None,
    report: opt.Report = None,
    as_json: opt.AsJson = False,
) -> None:
    """Does speculation pay, with what gamma, and does it fit? Nothing is built or run."""
    from spec_export.making import parse_gammas
    from spec_export.planning import MemoryAsked, Supposed, check_asked, plan, plan_memory

    supposed = Supposed(alpha, cost_ratio, verify_cost, gamma_max)
    board, gammas = device and device.value, gamma and parse_gammas(gamma)
    check_asked(supposed, memory, (board, memory_limit, max_len, gammas, chunk))
    if memory is None:
        plan(supposed, report, as_json=as_json)
        return
    asked = MemoryAsked(memory, board, memory_limit, max_len, gammas or None, chunk)
    if not plan_memory(asked, report, as_json=as_json):
        raise typer.Exit(1)


def main() -> None:
    """Run the program."""
    run(app)


if __name__ == "__main__":
    main()

"""The command line. Options only; every command imports its work when it is run."""

from __future__ import annotations

from typing import Annotated

import typer

from spec_export import cli_making
from spec_export import options as opt
from spec_export import options_looking as look_opt
from spec_export import options_measuring as measure_opt
from spec_export import options_running as run_opt
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


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of the program itself."""


app.command("model-to-engine", cls=Command)(cli_making.model_to_engine)
app.command("export", cls=Command)(cli_making.export)
app.command("quantize", cls=Command)(cli_making.quantize)
app.command("build", cls=Command)(cli_making.build)


@app.command("run", cls=Command)
def _run(
    bundle: opt.BundleIn,
    stdin: run_opt.Stdin = None,
    prompt: run_opt.Prompt = None,
    chat: run_opt.Chat = False,
    gamma: run_opt.Gamma = None,
    draft_confidence: run_opt.DraftConfidence = None,
    fast_plain: run_opt.FastPlain = False,
    max_tokens: run_opt.MaxTokens = None,
    temperature: run_opt.Temperature = 0.0,
    seed: run_opt.Seed = None,
    samples: run_opt.Samples = None,
    rule: run_opt.Rule = None,
    draft_sampling: run_opt.DraftSampling = run_opt.DraftSamplingName.probabilistic,
    top_k: run_opt.TopK = 0,
    top_p: run_opt.TopP = 1.0,
    min_p: run_opt.MinP = 0.0,
    typical_p: run_opt.TypicalP = 1.0,
    repetition_penalty: run_opt.RepetitionPenalty = 1.0,
    presence_penalty: run_opt.PresencePenalty = 0.0,
    frequency_penalty: run_opt.FrequencyPenalty = 0.0,
    no_repeat_ngram: run_opt.NoRepeatNgram = 0,
    logit_bias: run_opt.LogitBias = None,
    allow: run_opt.Allow = None,
    ban: run_opt.Ban = None,
    min_tokens: run_opt.MinTokens = 0,
    json_schema: run_opt.JsonSchema = None,
    regex: run_opt.Regex = None,
    lark: run_opt.Lark = None,
    stop: run_opt.Stop = None,
    logprobs: run_opt.Logprobs = 0,
    compare: run_opt.Compare = False,
    as_json: run_opt.RunAsJson = False,
    quiet: run_opt.TextOnly = False,
    threads: opt.Threads = None,
    pipeline: run_opt.Pipeline = None,
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
def _inspect(path: look_opt.Inspected, as_json: opt.AsJson = False) -> None:
    """Show a bundle, an exported directory or an ONNX file."""
    from spec_export.inspecting import inspect

    inspect(path, as_json=as_json)


@app.command("check", cls=Command)
def _check(
    bundle: opt.BundleIn,
    law: look_opt.Law = False,
    exported: look_opt.ExportedHere = None,
    record: look_opt.Record = False,
    polygraphy: look_opt.PolygraphyRuns = None,
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
    prompts: measure_opt.Prompts = None,
    tokens: measure_opt.MeasuredTokens = 64,
    temperature: measure_opt.MeasuredTemperature = 0.0,
    rule: measure_opt.MeasuredRule = opt.RuleName.reject,
    seed: measure_opt.MeasuredSeed = 0,
    threads: opt.Threads = None,
    output: measure_opt.ProfileOut = None,
    report: opt.Report = None,
    exported: measure_opt.BuiltFrom = None,
    precisions: measure_opt.ComparedPrecisions = None,
    synthetic: measure_opt.Synthetic = None,
    cost_ratio: measure_opt.SyntheticCost = None,
    as_json: opt.AsJson = False,
    quiet: measure_opt.VerdictOnly = False,
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
    alpha: measure_opt.Alpha = None,
    cost_ratio: measure_opt.CostRatio = None,
    verify_cost: measure_opt.VerifyCost = None,
    gamma_max: measure_opt.GammaMax = None,
    memory: measure_opt.Memory = None,
    device: measure_opt.BoardOption = None,
    memory_limit: measure_opt.MemoryLimit = None,
    max_len: measure_opt.PlannedMaxLen = None,
    gamma: measure_opt.PlannedGamma = None,
    chunk: measure_opt.PlannedChunk = None,
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

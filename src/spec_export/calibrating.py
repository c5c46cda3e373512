"""`calibrate`: measure a bundle here, write its profile, say what it advises.

With `--synthetic` drafts are made up at a set acceptance instead, and no profile is written.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.console import Steps
from spec_export.engines.errors import RequestError
from spec_export.planning import check_report, print_wrapped, write_report

if TYPE_CHECKING:
    from spec_export.calibration.measure import Task
    from spec_export.calibration.profile import Profile
    from spec_export.engines.backend import Backend
    from spec_export.engines.bundle import VerifiedFiles
    from spec_export.engines.manifest import DeviceSpec
    from spec_export.runtime import OpenedBundle

_HEIGHT = 3600  # pixels of a picture: up to 16 positions and as many times
_PRECISIONS_HEIGHT = 1400


@dataclass(frozen=True)
class CalibrateOptions:
    """What to measure on, as the user gave it."""

    prompts: Path | None
    tokens: int
    temperature: float
    rule: str | None
    seed: int
    threads: int | None
    output: Path | None
    report: Path | None
    exported: Path | None = None
    precisions: str | None = None


@dataclass(frozen=True)
class SyntheticAsked:
    """Acceptances to set, and what a draft is supposed to cost, as the user gave it."""

    alphas: str | None
    cost_ratio: float | None


def check_asked(options: CalibrateOptions, asked: SyntheticAsked) -> None:
    """Refuse options of one way to calibrate beside those of the other.

    Raises:
        RequestError: naming which go together.
    """
    if asked.alphas is None and asked.cost_ratio is not None:
        raise RequestError(
            "--cost-ratio belongs to --synthetic: what a draft takes is measured otherwise"
        )
    if options.precisions is not None and options.exported is None:
        raise RequestError(
            "--precisions needs --exported DIR, the directory that the bundle was built from"
        )
    if asked.alphas is not None and options.exported is not None:
        raise RequestError("--synthetic compares no precisions; leave out --exported")
    if asked.alphas is not None and (options.output or options.report) is not None:
        raise RequestError(
            "--synthetic writes no profile and no page: leave out --output and --report; --json "
            "prints all of it"
        )


def calibrate_synthetic(
    bundle: Path, options: CalibrateOptions, asked: SyntheticAsked, *, as_json: bool, quiet: bool
) -> None:
    """Measure speculation at set acceptances, print a table.

    Raises:
        RequestError: the prompts or the bundle give nothing to measure, or a number means nothing.
        BundleError: the bundle cannot be trusted or read.
    """
    from spec_export.calibration import synthetic, synthetic_report
    from spec_export.calibration.calibrate import check_bundle, check_task
    from spec_export.calibration.synthetic_result import synthetic_result

    assert asked.alphas is not None
    alphas = synthetic.parse_alphas(asked.alphas)
    synthetic.check_cost_ratio(asked.cost_ratio)
    _check_memory(bundle)
    with Steps(quiet=quiet or as_json, animated=False) as steps:
        opened = _open(bundle, options, steps)
        check_bundle(opened)
        task = _task(opened, options)
        check_task(opened, task)
        synthetic.check_task(task)
        found = synthetic.measure_synthetic(opened, task, alphas, steps)
    result, device = synthetic_result(found, asked.cost_ratio), _device(opened, options)
    if as_json:
        text = synthetic_report.as_json(result, device, task)
        print(json.dumps(text, ensure_ascii=False, allow_nan=False), flush=True)
    elif quiet:
        print(synthetic_report.verdict(result), flush=True)
    else:
        print_wrapped(synthetic_report.terminal_lines(result, device, task))


def calibrate_bundle(
    bundle: Path, options: CalibrateOptions, *, as_json: bool, quiet: bool
) -> None:
    """Measure, write the profile, print the advice.

    Raises:
        RequestError: the prompts or the bundle give nothing to measure, memory does not hold it, or
            a file cannot be where it was asked for.
        BundleError: the bundle cannot be trusted or read.
        StorageError: the profile or the report cannot be written.
    """
    from spec_export.calibration import profile_report
    from spec_export.calibration.calibrate import calibrate, check_bundle, check_task
    from spec_export.calibration.memory import memory_use, read_described
    from spec_export.calibration.profile import PROFILE_FILE, write_profile
    from spec_export.engines.bundle import VerifiedFiles

    _check_places(options)
    _check_memory(bundle)
    hashed = VerifiedFiles(None)
    with Steps(quiet=quiet or as_json, animated=False) as steps:
        opened = _open(bundle, options, steps)
        check_bundle(opened)
        if options.exported is not None:
            _check_precisions(opened, options.exported, options, hashed, steps)
        task = _task(opened, options)
        check_task(opened, task)
        device = _device(opened, options)
        out = options.output or bundle / PROFILE_FILE
        state = out.with_name(out.name + ".partial")
        profile = calibrate(opened, device, task, state, steps)
        profile = replace(profile, memory=dict(memory_use(read_described(bundle)).parts()))
        if options.exported is not None:
            profile = _compared(profile, opened, options.exported, task, options, hashed, steps)
    write_profile(out, profile)
    with contextlib.suppress(OSError):
        state.unlink(missing_ok=True)
    if options.report is not None:
        height = _HEIGHT + (_PRECISIONS_HEIGHT if profile.precisions is not None else 0)
        write_report(options.report, profile_report.html(profile), height)
    if as_json:
        print(json.dumps(asdict(profile), ensure_ascii=False, allow_nan=False), flush=True)
    elif quiet:
        print(profile.reason, flush=True)
    else:
        print_wrapped([*profile_report.terminal_lines(profile), f"- written to {out}"])


def _open(bundle: Path, options: CalibrateOptions, steps: Steps) -> OpenedBundle:
    from spec_export.runtime.opened import open_runtime

    return open_runtime(bundle, threads=options.threads, progress=steps)


def _device(opened: OpenedBundle, options: CalibrateOptions) -> DeviceSpec:
    """Where it runs now."""
    return _backend(opened, options).describe()


def _backend(opened: OpenedBundle, options: CalibrateOptions) -> Backend:
    from spec_export.runtime.opened import make_backend

    built_on = opened.manifest.device
    return make_backend(built_on.backend, options.threads or built_on.threads)


def _task(opened: OpenedBundle, options: CalibrateOptions) -> Task:
    from spec_export.calibration.measure import Task
    from spec_export.calibration.prompts import encode_prompts, fitting_prompts, read_prompts
    from spec_export.runtime import Sampling

    if options.prompts is None:
        prompts, ids = fitting_prompts(opened)
    else:
        prompts = read_prompts(options.prompts)
        ids = encode_prompts(opened, prompts)
    # Not the default for a seed: whoever runs without one gets `reject`.
    rule = options.rule if options.temperature else None
    sampling = Sampling(options.temperature, options.seed, rule)  # type: ignore[arg-type]
    return Task(tuple(prompts), tuple(map(tuple, ids)), options.tokens, sampling)


def _check_precisions(
    opened: OpenedBundle,
    exported: Path,
    options: CalibrateOptions,
    memory: VerifiedFiles,
    steps: Steps,
) -> None:
    """Refuse before anything is measured what cannot be compared."""
    from spec_export.calibration.precision_names import parse_precisions
    from spec_export.engines.extras import require

    require("build", "onnx_ir")
    from spec_export.calibration.candidates import check_comparable, check_room
    from spec_export.calibration.devices import available_bytes
    from spec_export.calibration.memory import memory_use, read_described
    from spec_export.engines.certify import exported_models

    check_comparable(opened)
    wanted, available = parse_precisions(options.precisions), available_bytes()
    exported_models(opened.bundle, exported, steps, memory)
    if available is not None:
        use = memory_use(read_described(opened.bundle.path))
        check_room(opened, wanted, use, available)


def _compared(
    profile: Profile,
    opened: OpenedBundle,
    exported: Path,
    task: Task,
    options: CalibrateOptions,
    memory: VerifiedFiles,
    steps: Steps,
) -> Profile:
    """The profile with other precisions of both models."""
    from spec_export.calibration import precision_report
    from spec_export.calibration.candidates import make_candidates
    from spec_export.calibration.precision_names import parse_precisions
    from spec_export.calibration.precisions import compare_precisions

    backend, wanted = _backend(opened, options), parse_precisions(options.precisions)
    with tempfile.TemporaryDirectory(prefix="spec-export.", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        candidates = make_candidates(opened, backend, exported, wanted, place, steps, memory)
        found = compare_precisions(opened, candidates, task, profile.times, steps)
    reason = f"{profile.reason}; {precision_report.sentence(found)}"
    return replace(profile, precisions=found, reason=reason)


def _check_places(options: CalibrateOptions) -> None:
    """Refuse before anything is measured what cannot be written at the end."""
    for option, path in (("-o", options.output), ("--report", options.report)):
        if path is not None and path.is_dir():
            raise RequestError(f"{option} {path} is a directory; name a file")
        if path is not None and not path.parent.is_dir():
            raise RequestError(f"{option} {path}: there is no directory {path.parent}; make it")
    if options.report is not None:
        check_report(options.report)


def _check_memory(bundle: Path) -> None:
    """Refuse before anything is opened; caches are also held to time passes and to read texts."""
    from spec_export.calibration.devices import available_bytes
    from spec_export.calibration.memory import read_described, require_fit
    from spec_export.engines.manifest import MANIFEST_FILE

    available = available_bytes()
    if available is not None and (bundle / MANIFEST_FILE).is_file():
        require_fit(read_described(bundle), available, "this machine", sets=3)

"""Run a bundle: find the prompt, stream the text, report, compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spec_export.commands import complain
from spec_export.console import Steps, Waiting, print_rows
from spec_export.engines.errors import RequestError
from spec_export.run_report import (
    comparison_rows,
    run_rows,
    samples_rows,
    samples_to_object,
    to_object,
    verdict,
)

if TYPE_CHECKING:
    from spec_export.runtime import OpenedBundle, Request, Session, Stats
    from spec_export.runtime.compare import DecodingComparison


@dataclass(frozen=True)
class RunOptions:
    """What `run` was asked for, as typed.

    Attributes:
        prompt: text, or None to read stdin.
        chat: put the prompt into the checkpoint's chat template.
        gamma: drafts per round; `auto`: what pays, by the profile beside the manifest.
        draft_confidence: rounds draft no further than below it; None: what the profile says, with
            `auto`.
        sampling: fields of `Sampling` by name.
        grammar: kind and text of what the text has to match.
        samples: texts to generate, each with a seed of its own; None: one, reported as such.
        threads: None: as many as the bundle was built with.
        pipelined: enqueue a round before the last one was read; None: where the device works later.
        compare: time it against plain decoding as well.
        show: `report`: text and report; `json`: one object; `quiet`: the text alone.
    """

    prompt: str | None
    chat: bool = False
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    grammar: tuple[str, str] | None = None
    gamma: int | Literal["auto"] | None = None
    draft_confidence: float | None = None
    fast_plain: bool = False
    stop: tuple[str, ...] = ()
    samples: int | None = None
    threads: int | None = None
    pipelined: bool | None = None
    compare: bool = False
    show: str = "report"


@dataclass
class Run:
    """A text and how it was made.

    Attributes:
        opened: the bundle.
        request: what was asked for.
        prompt: its ids.
        gamma: drafts per round, as used.
        pipelined: as in `RunOptions`.
        text: what was generated.
        ids: its tokens.
        logprobs: of each, under the target's raw law.
        top: of each, the most probable tokens and their logprobs, where asked for.
        finish: why it ended.
        stats: counts and times.
        notes: what the session served in another way than it should be.
        warnings: what was asked for and is not served.
        comparison: with plain decoding, where it was asked for and the text was long enough.
    """

    opened: OpenedBundle
    request: Request
    prompt: list[int]
    gamma: int
    pipelined: bool | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: str = "length"
    stats: Stats | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    comparison: DecodingComparison | None = None


def run_bundle(path: Path, options: RunOptions) -> bool:
    """Run a bundle and print what was asked for; whether every promise was kept."""
    if options.compare and options.samples is not None:
        raise RequestError("--compare times one text; leave out --samples")
    prompt = read_prompt(options.prompt)
    quiet = options.show != "report"
    opened = open_with_progress(path, options.threads, quiet=quiet)
    run = prepare(opened, prompt, options)
    if options.samples is not None:
        run_samples(run, options.samples, options.show)
        return True
    session = stream(run, quiet=quiet, to_stdout=options.show != "json")
    if options.compare:
        if len(run.ids) < 2 and not quiet:
            complain("not compared: a single token has no decode speed")
        compare(run, session, quiet=quiet)
    if options.show == "json":
        print(json.dumps(to_object(run), ensure_ascii=False, allow_nan=False), flush=True)
    elif options.show == "report":
        print_report(run)
    comparison = run.comparison
    if comparison is None or not comparison.is_broken:
        return True
    complain(
        f"failed: token {comparison.exact_departs_at} is not that of exact plain decoding, which "
        f"{opened.exactness} promises; `spec-export check {path}` looks closer"
    )
    return False


def run_samples(run: Run, count: int, show: str) -> None:
    """Generate several texts after one prompt, print each under a line of its own, and report."""
    from spec_export.runtime import Session, sample_requests

    session, runs = Session(run.opened, pipelined=run.pipelined), []
    for i, request in enumerate(sample_requests(run.request, count), start=1):
        one = Run(run.opened, request, run.prompt, run.gamma, run.pipelined)
        if show != "json":
            _write(f"--- sample {i} of {count}, seed {request.sampling.seed}\n")
        stream(one, session, quiet=show != "report", to_stdout=show != "json")
        runs.append(one)
    if show == "json":
        print(json.dumps(samples_to_object(runs), ensure_ascii=False, allow_nan=False), flush=True)
    elif show == "report":
        print(file=sys.stderr)
        print_rows(samples_rows(runs), to_stderr=True)


def print_report(run: Run) -> None:
    """Print how a text was made, and the comparison if there is one, to stderr."""
    print(file=sys.stderr)
    found = run.comparison
    drawn = run.request.sampling.temperature > 0
    rows = [] if found is None else comparison_rows(found, drawn=drawn)
    print_rows(run_rows(run) + rows, to_stderr=True)
    if found is not None:
        print(f"\n{verdict(found, run.gamma)}", file=sys.stderr, flush=True)


def read_prompt(given: str | None) -> str:
    """The prompt as given, or from stdin without the newline that ends it."""
    if given is not None:
        text = given
    elif sys.stdin is None or sys.stdin.isatty():
        raise RequestError("there is no prompt: give --prompt TEXT, or pipe one in")
    else:
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"the prompt on stdin is not UTF-8: {error}") from error
        text = text.removesuffix("\n").removesuffix("\r")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("the prompt of --prompt is not UTF-8") from error
    return text


def parse_bias(given: list[str]) -> dict[int, float]:
    """`ID=BIAS` as typed, by id."""
    biases: dict[int, float] = {}
    for pair in given:
        named, _, value = pair.partition("=")
        try:
            token, bias = int(named), float(value)
        except ValueError as error:
            raise RequestError(f"--logit-bias {pair}: it is ID=BIAS, such as 42=-100") from error
        if token in biases:
            raise RequestError(f"--logit-bias {pair}: token {token} has one already; give one")
        biases[token] = bias
    return biases


def parse_gamma(text: str | None) -> int | Literal["auto"] | None:
    """A number of drafts, or `auto`.

    Raises:
        RequestError: something else.
    """
    if text is None or text == "auto":
        return "auto" if text else None
    if not text.removeprefix("-").isdecimal() or len(text) > 9:
        raise RequestError(f"--gamma {text}: a whole number, or auto")
    return int(text)


def read_grammar(
    json_schema: Path | None, regex: str | None, lark: Path | None
) -> tuple[str, str] | None:
    """Kind and text of the grammar that was given, if one was."""
    given: list[tuple[str, str]] = []
    for kind, file in (("json_schema", json_schema), ("lark", lark)):
        if file is not None:
            try:
                given.append((kind, file.read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                raise RequestError(f"{file} cannot be read: {error}") from error
    if regex is not None:
        given.append(("regex", regex))
    if len(given) > 1:
        raise RequestError("--json-schema, --regex and --lark exclude each other; give one")
    return given[0] if given else None


def open_with_progress(path: Path, threads: int | None, *, quiet: bool) -> OpenedBundle:
    """Open a bundle; a terminal sees the files being verified."""
    from spec_export.runtime import open_runtime

    with Steps(quiet=quiet, lines=False) as steps:
        return open_runtime(path, threads=threads, progress=steps)


def prepare(opened: OpenedBundle, prompt: str, options: RunOptions) -> Run:
    """Turn what was typed into a request that the bundle accepts."""
    from spec_export.runtime import Grammar, Request, Sampling
    from spec_export.runtime.stream import effective_gamma

    request = Request(
        max_tokens=options.max_tokens,
        sampling=Sampling(**options.sampling),
        grammar=None if options.grammar is None else Grammar(*options.grammar),  # type: ignore[arg-type]
        gamma=None if options.gamma == "auto" else options.gamma,
        draft_confidence=options.draft_confidence,
        stop=options.stop,
        fast_plain=options.fast_plain,
    )
    warnings: tuple[str, ...] = ()
    if options.gamma == "auto":
        from spec_export.calibration.choice import UnusableProfile, gamma_costs

        try:
            request = replace(request, auto=gamma_costs(opened, request, options.threads))
        except UnusableProfile as error:
            warnings = (
                f"{error}; rounds have the {effective_gamma(opened, request)} drafts built",
            )
            complain(f"warning: {warnings[0]}")
    if options.chat:
        ids = opened.text.encode_chat([{"role": "user", "content": prompt}])
    else:
        ids = opened.text.encode(prompt)
    gamma = effective_gamma(opened, request)
    return Run(opened, request, ids, gamma, options.pipelined, warnings=warnings)


def stream(
    run: Run, session: Session | None = None, *, quiet: bool, to_stdout: bool = True
) -> Session:
    """Generate, writing text to stdout as it is made; returns the session for more."""
    from spec_export.runtime import Session, generate

    session = session or Session(run.opened, pipelined=run.pipelined)
    pieces = generate(session, run.prompt, run.request)
    waiting = Waiting(f"reading the prompt ({len(run.prompt)} tokens)", quiet=quiet)
    try:
        for piece in pieces:
            waiting.stop()
            run.text += piece.text
            run.ids += piece.tokens
            run.logprobs += piece.logprobs
            run.top += piece.top
            run.stats, run.finish = piece.stats, piece.finish or run.finish
            if to_stdout:
                _write(piece.text)
    finally:
        waiting.stop()
        run.notes = tuple(session.remarks)
    if to_stdout and not run.text.endswith("\n"):
        _write("\n")
    return session


def compare(run: Run, session: Session, *, quiet: bool) -> None:
    """Time the text against plain decoding; one of a single token has no decode speed."""
    from spec_export.runtime.compare import compare_decoding

    if len(run.ids) < 2:
        return
    with Steps(quiet=quiet, lines=False, animated=False) as steps:
        request = replace(run.request, gamma=run.gamma)
        run.comparison = compare_decoding(
            session, run.prompt, request, len(run.ids), progress=steps
        )


def _write(text: str) -> None:
    if sys.stdout is None:
        raise RequestError("stdout is closed; there is nowhere to write the text")
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()

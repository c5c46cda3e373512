"""What a run reports: rows for people, one object for programs, a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_export.making_report import MEANING, METHODS, Rows

if TYPE_CHECKING:
    from spec_export.running import Run
    from spec_export.runtime import Stats
    from spec_export.runtime.compare import DecodingComparison, Timing

_NO_DIFFERENCE = 0.03  # repeats of one run differ by as much on a quiet machine


def run_rows(run: Run) -> Rows:
    """Report of a run."""
    stats = _stats(run)
    tokens = f"{stats.emitted} (ended by {run.finish}), prompt {stats.prompt_tokens}"
    return _rows(run, tokens, why_drafts_were_off(run))


def samples_rows(runs: Sequence[Run]) -> Rows:
    """Report of several texts after one prompt: of each, and of all together."""
    from spec_export.runtime.stats import added_up

    total = added_up([_stats(run) for run in runs])
    tokens = f"{total.emitted} in {len(runs)} samples, prompt {total.prompt_tokens}"
    off = why_drafts_were_off(replace(runs[0], stats=total))
    each = [(f"sample {i}", _sample(run)) for i, run in enumerate(runs, start=1)]
    return [*each, *_rows(replace(runs[0], stats=total), tokens, off)]


def _sample(run: Run) -> str:
    stats = _stats(run)
    said = [f"{stats.emitted} tokens (ended by {run.finish})"]
    if stats.alpha is not None:
        said.append(
            f"alpha {stats.alpha:.2f} ({stats.accepted}/{stats.accepted + stats.rejections})"
        )
    if stats.tokens_per_s is not None:
        said.append(f"{stats.tokens_per_s:.1f} tokens/s")
    return ", ".join([*said, f"seed {run.request.sampling.seed}"])


def _rows(run: Run, tokens: str, off: str | None) -> Rows:
    stats = _stats(run)
    rows = [("method", f"{METHODS[run.opened.manifest.method]}, gamma {_gamma(run)}")]
    if off is not None:
        rows.append(("", off))
    rows.append(("tokens", tokens))
    if run.gamma:
        rows.append(("rounds", _rounds(stats)))
        rows.append(("acceptance", _acceptance(stats)))
    if run.request.sampling.temperature:
        rows.append(("sampling", _sampling(run)))
    rows += [("speed", _speed(stats)), ("exactness", exactness(run))]
    return [*rows, *(("note", note) for note in notes(run))]


def notes(run: Run) -> tuple[str, ...]:
    """What a reader of the text should know of it."""
    said = (*run.warnings, *run.notes)
    if run.request.grammar is None or run.finish != "length":
        return said
    return (*said, "cut off by length: the text may not match its grammar yet")


def _gamma(run: Run) -> str:
    least = _stats(run).draft_confidence
    stops = f", no draft after one below {least:g}" if least else ""
    return _drafts(run) + stops


def _drafts(run: Run) -> str:
    if run.request.auto is None or not run.gamma:
        return str(run.gamma)
    stats = _stats(run)
    passes = stats.rounds + stats.plain_steps
    mean = stats.drafted / passes if passes else 0.0
    return f"auto, 0 to {run.gamma}: {mean:.1f} drafts a pass"


def _sampling(run: Run) -> str:
    from spec_export.runtime.sampling import remarks

    sampling, manifest = run.request.sampling, run.opened.manifest
    said = [f"temperature {sampling.temperature:g}, rule {sampling.rule}, seed {sampling.seed}"]
    return "; ".join([*said, *remarks(sampling, manifest, run.opened.exactness)])


def why_drafts_were_off(run: Run) -> str | None:
    """Speculation is never off without a word: why some or all passes had no drafts."""
    manifest, stats = run.opened.manifest, _stats(run)
    if manifest.method == "none":
        return "drafts are off: the bundle was made without a draft"
    if run.gamma == 0:
        return "drafts are off: --gamma 0"
    if run.request.auto is not None:
        is_off = stats.plain_steps and not stats.rounds
        said = "no pass had drafts: none would have paid, by the profile and what was accepted"
        return said if is_off else None
    if manifest.method == "model":
        positions = manifest.models["draft"].max_position
        is_shorter = positions < manifest.max_len
        if is_shorter and stats.plain_steps and stats.prompt_tokens + stats.emitted >= positions:
            return (
                f"{stats.plain_steps} passes had no drafts: the text outgrew the {positions} "
                "positions of the draft"
            )
    if stats.plain_steps and not stats.rounds:
        found = "look-up found nothing to draft" if manifest.method == "ngram" else "no room"
        return f"no pass had drafts: {found}"
    return None


def exactness(run: Run) -> str:
    """What may be said of the bits of this run."""
    kind = run.opened.exactness
    if run.request.fast_plain and kind != "none":
        return f"{kind}, given up for passes without drafts by --fast-plain"
    return f"{kind}: {MEANING[kind]}"


def comparison_rows(found: DecodingComparison, *, drawn: bool) -> Rows:
    """Report of a comparison; texts that were `drawn` share their law, not their tokens."""
    low, high = min(found.speedups), max(found.speedups)
    repeats = len(found.speedups)
    rows = [
        (
            "compared",
            f"{found.tokens} tokens, {repeats} times each in turns, median (lowest to highest)",
        ),
        ("  as run", _timing(found.speculative)),
        ("  fast plain", f"{_timing(found.fast_plain)}; {_same(found.fast_departs_at, drawn)}"),
    ]
    if found.exact_plain is not None:
        exact = f"{_timing(found.exact_plain)}; {_same(found.exact_departs_at, drawn)}"
        rows.append(("  exact plain", exact))
    return [*rows, ("speed-up", f"{found.speedup:.2f}x of fast plain ({low:.2f} to {high:.2f})")]


def verdict(found: DecodingComparison, gamma: int) -> str:
    """Whether speculation pays, in a sentence, by the median repeat."""
    if gamma == 0:
        return "speculation was off, so there was nothing to time it against"
    low, high, times = min(found.speedups), max(found.speedups), f"{found.speedup:.2f}x"
    if low < 1 < high:
        times += f" (repeats {low:.2f} to {high:.2f})"
    if abs(found.speedup - 1) < _NO_DIFFERENCE:
        return f"speculation makes no difference here: {times}"
    if found.speedup > 1:
        return f"speculation pays here: {times}"
    return (
        f"speculation does not pay here: {times}; run with --gamma 0 --fast-plain, or calibrate "
        "the bundle and run with --gamma auto"
    )


def to_object(run: Run) -> dict[str, Any]:
    """The run as one JSON object."""
    from spec_export.runtime.sampling import remarks, served_rule

    manifest, found, sampling = run.opened.manifest, run.comparison, run.request.sampling
    return {
        "text": run.text,
        "token_ids": run.ids,
        "finish_reason": run.finish,
        "method": manifest.method,
        "gamma": run.gamma,
        "gamma_is_auto": run.request.auto is not None,
        "built_gamma": manifest.gamma,
        "drafts_off": why_drafts_were_off(run),
        **_counts(_stats(run)),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "rule": served_rule(sampling, manifest),
        "remarks": [*remarks(sampling, manifest, run.opened.exactness), *notes(run)],
        "logprobs": run.logprobs,
        "top_logprobs": run.top,
        "fast_plain": run.request.fast_plain,
        "exactness": run.opened.exactness,
        "bundle_sha256": run.opened.bundle.sha256,
        "speedup": None if found is None or run.gamma == 0 else found.speedup,
        "comparison": None if found is None else _comparison_object(found),
    }


def samples_to_object(runs: Sequence[Run]) -> dict[str, Any]:
    """Several texts after one prompt as one JSON object: each as a run of its own, and counts."""
    from spec_export.runtime.stats import added_up

    total = added_up([_stats(run) for run in runs])
    return {"samples": [to_object(run) for run in runs], "total": _counts(total)}


def _counts(stats: Stats) -> dict[str, Any]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "tokens": stats.emitted,
        "rounds": stats.rounds,
        "plain_steps": stats.plain_steps,
        "tokens_per_round": stats.tokens_per_round,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tested": stats.accepted + stats.rejections,
        "draft_confidence": stats.draft_confidence,
        "early_rounds": stats.early,
        "alpha": stats.alpha,
        "accepted_per_position": stats.accepted_per_position,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_ms": stats.ttft_ms,
    }


def _comparison_object(found: DecodingComparison) -> dict[str, Any]:
    ways = {
        "speculative": found.speculative,
        "exact_plain": found.exact_plain,
        "fast_plain": found.fast_plain,
    }
    return {
        "tokens": found.tokens,
        "speedups": found.speedups,
        "exact_departs_at": found.exact_departs_at,
        "fast_departs_at": found.fast_departs_at,
        "tokens_per_s": {
            name: None if timing is None else timing.tokens_per_s for name, timing in ways.items()
        },
    }


def _stats(run: Run) -> Stats:
    assert run.stats is not None
    return run.stats


def _rounds(stats: Stats) -> str:
    each = stats.tokens_per_round
    passes = f"{stats.rounds} with drafts, {stats.plain_steps} without"
    passes += f", {stats.early} stopped drafting early" if stats.draft_confidence else ""
    return passes if each is None else f"{passes}; {each:.2f} tokens per round"


def _acceptance(stats: Stats) -> str:
    if stats.alpha is None:
        return "no draft was tested"
    shares = ("-" if share is None else f"{share:.2f}" for share in stats.accepted_per_position)
    tested = stats.accepted + stats.rejections
    return f"alpha {stats.alpha:.2f} ({stats.accepted}/{tested}), by position {' '.join(shares)}"


def _speed(stats: Stats) -> str:
    first = f"first token after {stats.ttft_ms:.0f} ms"
    speed = stats.tokens_per_s
    return first if speed is None else f"{speed:.1f} tokens/s, {first}"


def _timing(timing: Timing) -> str:
    low, high = min(timing.tokens_per_s), max(timing.tokens_per_s)
    return f"{timing.median:.1f} tokens/s ({low:.1f} to {high:.1f})"


def _same(departs_at: int | None, drawn: bool) -> str:
    if departs_at is None:
        return "same text"
    return f"other text from token {departs_at} on{', as drawn anew' if drawn else ''}"

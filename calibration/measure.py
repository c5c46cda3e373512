"""Measure a bundle on the device it will run on, text by text, and take up again where it stopped.

After every prompt: a round at every token of a text, at the largest gamma; steps of the fastest
plain decoding; and some turns of every part by itself. So all three see the same minutes of the
machine.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spec_export.calibration.evidence import TextEvidence, TimedRound
from spec_export.calibration.parts import PartsTimer
from spec_export.calibration.prompts import Prompt
from spec_export.calibration.teacher import Teacher
from spec_export.engines.atomic import write_whole
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.errors import BundleError
from spec_export.engines.manifest import DeviceSpec
from spec_export.engines.strict import read_json, to_json
from spec_export.runtime import OpenedBundle, Request, Sampling, Session, Stats, generate
from spec_export.runtime.stream import plain_role

_SHORTER_EVERY = 3  # tokens
_TURNS = 4  # of all parts after each text
_STATE_SCHEMA = 1
_STEP = "measuring"


@dataclass(frozen=True)
class Task:
    """What to measure on.

    Attributes:
        prompts: with their categories.
        ids: of each prompt.
        tokens: to generate after each, at most.
        sampling: how they are drawn.
    """

    prompts: tuple[Prompt, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: int
    sampling: Sampling

    @property
    def sha256(self) -> str:
        """Of the prompts' texts and categories."""
        texts = json.dumps([asdict(prompt) for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()

    @property
    def rule(self) -> str | None:
        """Of acceptance; temperature 0 has none."""
        return self.sampling.rule if self.sampling.temperature else None

    @property
    def kv_len(self) -> int:
        """Cached tokens in the middle of a text, on average."""
        return sum(map(len, self.ids)) // len(self.ids) + self.tokens // 2


@dataclass(frozen=True)
class State:
    """Texts that are done, kept on disk until all are.

    Attributes:
        schema: version of this description.
        bundle_sha256: of the bundle.
        device: where.
        prompts_sha256: of the prompts.
        tokens: after each.
        temperature: of sampling.
        seed: of sampling.
        rule: of acceptance; None at temperature 0.
        texts: evidence of the first prompts.
    """

    schema: int
    bundle_sha256: str
    device: DeviceSpec
    prompts_sha256: str
    tokens: int
    temperature: float
    seed: int
    rule: str | None
    texts: tuple[TextEvidence, ...]


def measure(
    opened: OpenedBundle,
    device: DeviceSpec,
    task: Task,
    state_file: Path,
    progress: Progress = no_progress,
) -> list[TextEvidence]:
    """Evidence of every prompt of a task.

    Args:
        opened: the bundle.
        device: where it runs.
        task: what to measure on.
        state_file: what an interrupted run had done; it is written after every text and stays.
        progress: called with (step, done, total).
    """
    texts = _resume(state_file, opened, device, task)
    total = len(task.prompts)
    if len(texts) == total:
        return texts
    progress(_STEP, len(texts), total)
    write_whole(state_file, to_json(_state(opened, device, task, texts)))  # or fail before any work
    session = Session(opened)
    kv_len = min(task.kv_len, opened.manifest.max_len - opened.manifest.gamma - 2)
    timer = PartsTimer(opened, kv_len, greedy=task.sampling.temperature == 0)
    teacher = Teacher(opened, task.sampling.temperature) if opened.draft is not None else None
    warm_up(session, task)
    for prompt, ids in list(zip(task.prompts, task.ids, strict=True))[len(texts) :]:
        decoded = decode_rounds(session, ids, task)
        text = session.history[: len(ids) + 1 + len(decoded.rounds)]
        beta = tuple(map(float, teacher.beta(text, len(ids) + 1))) if teacher else ()
        plain = decode_plain(session, ids, task)
        texts.append(
            TextEvidence(
                category=prompt.category,
                rounds=decoded.rounds,
                shorter=decoded.shorter,
                plain_ms=plain,
                parts_ms=timer.turn(_TURNS),
                beta=beta,
            )
        )
        write_whole(state_file, to_json(_state(opened, device, task, texts)))
        progress(_STEP, len(texts), total)
    return texts


@dataclass(frozen=True)
class Decoded:
    """Rounds of a text.

    Attributes:
        rounds: begun at each token after the first, with all drafts a round may have.
        shorter: begun at some, with fewer drafts.
    """

    rounds: tuple[TimedRound, ...]
    shorter: tuple[TimedRound, ...]


def decode_rounds(session: Session, ids: Sequence[int], task: Task) -> Decoded:
    """Begin a round with all drafts it may have at every token of a text, and time it.

    Only the first token of a round is kept; the rest is taken back and comes again. At every third
    token a round of fewer drafts is timed before, every number of them in turn, and taken back
    whole. How sure the drafting model was is read after a round, out of its time. A text ends at an
    end token, at the limit, or where no whole round fits any more.
    """
    ends, gamma = session.opened.manifest.text.end_ids, session.gamma
    session.begin(task.sampling, plain_role(session.opened, Request()))
    session.prefill(ids)
    rounds: list[TimedRound] = []
    shorter: list[TimedRound] = []
    if session.first().tokens[0] in ends:
        return Decoded((), ())
    while len(rounds) < task.tokens - 1 and session.room > gamma:
        committed = len(session.history)
        if gamma > 1 and len(rounds) % _SHORTER_EVERY == 0:
            shorter.append(_timed_round(session, 1 + len(shorter) % (gamma - 1)))
            session.rewind(committed)
        whole = _timed_round(session, gamma)
        rounds.append(replace(whole, confidences=tuple(session.confidences())))
        if session.history[committed] in ends:
            break
        session.rewind(committed + 1)
    return Decoded(tuple(rounds), tuple(shorter))


def _timed_round(session: Session, n: int) -> TimedRound:
    """A round and the text of its tokens."""
    ends, text = session.opened.manifest.text.end_ids, session.opened.text.stream()
    started = time.perf_counter()
    result = session.round(n)
    for token in result.tokens:
        text.add(token)
    ms = (time.perf_counter() - started) * 1e3
    kept = next((i for i, t in enumerate(result.tokens, 1) if t in ends), len(result.tokens))
    return TimedRound(result.n_draft, result.n_accepted, kept, ms)


def decode_plain(session: Session, ids: Sequence[int], task: Task) -> tuple[float, ...]:
    """Time steps of the fastest plain decoding, text included: one row, whatever bits it gives."""
    session.begin(task.sampling, "decode")
    session.prefill(ids, drafts=False)
    session.first()
    times: list[float] = []
    text = session.opened.text.stream()
    while len(times) < max(1, task.tokens // 2) and session.room > 0:
        started = time.perf_counter()
        text.add(session.plain().tokens[0])
        times.append((time.perf_counter() - started) * 1e3)
    return tuple(times)


def warm_up(session: Session, task: Task) -> None:
    """Touch every buffer of every role once."""
    ids, few = task.ids[0], 8
    short = Task(task.prompts, task.ids, few, task.sampling)
    decode_rounds(session, ids, short)
    decode_plain(session, ids, short)


@dataclass(frozen=True)
class Race:
    """One text with drafts and the same number of tokens without, timed.

    Attributes:
        tokens: after the first, of each.
        speculative_ms: decoding them with drafts.
        plain_ms: by the fastest plain decoding.
    """

    tokens: int
    speculative_ms: float
    plain_ms: float


def race(session: Session, task: Task, gamma: int, progress: Progress = no_progress) -> list[Race]:
    """Decode every prompt with `gamma` drafts a round, then as many tokens plainly.

    As a user would, text and stops included. Plain decoding is the fastest the bundle has; what its
    tokens are does not change its time, so it goes on past an end that comes earlier in other bits.
    """
    found: list[Race] = []
    for number, ids in enumerate(task.ids):
        progress("comparing with plain decoding", number, len(task.ids))
        speculative = Request(task.tokens, task.sampling, gamma=gamma)
        with_drafts = decode(session, ids, speculative)
        if with_drafts.emitted > 1:
            plain = Request(
                with_drafts.emitted, task.sampling, gamma=0, ignore_end=True, fast_plain=True
            )
            alone = decode(session, ids, plain)
            found.append(Race(with_drafts.emitted - 1, with_drafts.decode_ms, alone.decode_ms))
    progress("comparing with plain decoding", len(task.ids), len(task.ids))
    return found


def decode(session: Session, ids: Sequence[int], request: Request) -> Stats:
    """Counts and times of a whole text."""
    stats = Stats(gamma=0)
    for piece in generate(session, ids, request):
        stats = piece.stats
    return stats


def _state(
    opened: OpenedBundle, device: DeviceSpec, task: Task, texts: Sequence[TextEvidence]
) -> State:
    return State(
        schema=_STATE_SCHEMA,
        bundle_sha256=opened.bundle.sha256,
        device=device,
        prompts_sha256=task.sha256,
        tokens=task.tokens,
        temperature=task.sampling.temperature,
        seed=task.sampling.seed or 0,
        rule=task.rule,
        texts=tuple(texts),
    )


def _resume(file: Path, opened: OpenedBundle, device: DeviceSpec, task: Task) -> list[TextEvidence]:
    """Texts of an interrupted run of the very same task; none where there was another or none."""
    try:
        found = read_json(file, State, schema=_STATE_SCHEMA)
    except BundleError:
        return []
    wanted = _state(opened, device, task, found.texts)
    usable = found == wanted and len(found.texts) <= len(task.prompts)
    return list(found.texts) if usable else []

"""Both models of every precision read the same texts: what each says of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spec_export.calibration.acceptance import overlap
from spec_export.calibration.candidates import Candidate
from spec_export.calibration.measure import Task
from spec_export.calibration.precision_names import AS_BUILT
from spec_export.calibration.precision_result import DraftPrecision, Quality
from spec_export.calibration.replays import Passes, passes_along, passes_of_lookup
from spec_export.calibration.teacher import distributions, in_vocabulary, logits_along
from spec_export.engines.errors import RequestError
from spec_export.engines.passes import PassRunner
from spec_export.runtime import OpenedBundle, Session


class Reading:
    """Reads texts with every model and keeps what they say of each token."""

    def __init__(
        self,
        opened: OpenedBundle,
        targets: Sequence[Candidate],
        drafts: Sequence[Candidate],
        task: Task,
    ) -> None:
        self._task = task
        self._targets, self._drafts = targets, drafts
        device = opened.device
        self._runners = {
            (kind, c.name): PassRunner(device, c.engine, c.spec)
            for kind, found in (("target", targets), ("draft", drafts))
            for c in found
        }
        own = targets if not drafts else targets[:1]
        self._sessions = {c.name: Session(in_precision(opened, c)) for c in own}
        self._vocabulary = targets[0].spec.vocabulary
        self._losses: dict[str, list[np.ndarray]] = {c.name: [] for c in targets}
        self._apart: dict[str, list[np.ndarray]] = {c.name: [] for c in targets}
        self._same: dict[str, list[np.ndarray]] = {c.name: [] for c in targets}
        self._betas: dict[tuple[str, str], list[np.ndarray]] = {}
        self._texts: dict[str, list[tuple[list[int], int]]] = {c.name: [] for c in own}

    def read(self, ids: Sequence[int]) -> None:
        """Go on from a prompt, and read prompt and text."""
        for name, session in self._sessions.items():
            self._texts[name].append((plain_text(session, ids, self._task), len(ids)))
        text, start = self._texts[AS_BUILT][-1]
        if len(text) - start < 2:
            return
        tokens = np.asarray(text, np.int64)
        exact: np.ndarray | None = None
        judged: dict[str, np.ndarray] = {}
        for target in self._targets:
            logits = logits_along(self._runners["target", target.name], "verify", tokens, 1)
            chances = _log_softmax(logits)
            judged[target.name] = distributions(
                logits[start - 1 :], self._task.sampling.temperature
            )
            exact = chances if exact is None else exact
            self._compare(target.name, exact, chances, tokens, start)
        for draft in self._drafts:
            rows = logits_along(self._runners["draft", draft.name], "step", tokens, start)
            known = in_vocabulary(rows, self._vocabulary)
            q = distributions(known, self._task.sampling.temperature)
            for name, p in judged.items():
                self._betas.setdefault((name, draft.name), []).append(overlap(p[: len(q)], q))

    def _compare(
        self, name: str, exact: np.ndarray, chances: np.ndarray, tokens: np.ndarray, start: int
    ) -> None:
        prompt = np.arange(start - 1)
        self._losses[name].append(-chances[prompt, tokens[1:start]])
        p, other = exact[start - 1 :], chances[start - 1 :]
        self._apart[name].append((np.exp(p) * (p - other)).sum(axis=1))
        self._same[name].append(p.argmax(axis=1) == other.argmax(axis=1))

    def quality(self, name: str) -> Quality:
        """How near a target is to the first.

        Raises:
            RequestError: no text went on past its first token.
        """
        if not self._apart[name]:
            raise RequestError("no text went on past its first token: give other prompts")
        losses, apart = np.concatenate(self._losses[name]), np.concatenate(self._apart[name])
        return Quality(
            perplexity=float(np.exp(losses.mean())) if len(losses) else 1.0,
            agreement=float(np.concatenate(self._same[name]).mean()),
            divergence=max(0.0, float(apart.mean())),
            tokens=len(apart),
        )

    def passes(self, target: str, draft: DraftPrecision | None) -> Passes:
        """Counts passes of any gamma."""
        if draft is None:
            return passes_of_lookup(self._texts[target])
        return passes_along(self._betas[target, draft.name])


def in_precision(
    opened: OpenedBundle, target: Candidate, draft: Candidate | None = None
) -> OpenedBundle:
    """The bundle with another target, and another draft where one is given."""
    manifest = opened.manifest
    models = {**manifest.models, "target": target.spec}
    engine = opened.draft
    if draft is not None:
        models["draft"], engine = draft.spec, draft.engine
    bundle = replace(opened.bundle, manifest=replace(manifest, models=models))
    return replace(opened, bundle=bundle, target=target.engine, draft=engine)


def plain_text(session: Session, ids: Sequence[int], task: Task) -> list[int]:
    """A prompt and what the target goes on with, without drafts."""
    ends = session.opened.manifest.text.end_ids
    session.begin(task.sampling, "decode")
    session.prefill(ids, drafts=False)
    token = session.first().tokens[0]
    while token not in ends and len(session.history) < len(ids) + task.tokens and session.room > 0:
        token = session.plain().tokens[0]
    return list(session.history)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))

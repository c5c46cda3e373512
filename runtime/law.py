"""Does a built bundle emit the target's law? A chi-square test of its own sampling engines.

Model passes are replaced by a toy: three tokens somewhere in the real vocabulary, whose next-token
laws p (target) and q (draft) depend on the last token. Everything else is what decodes text: the
bundle's propose and accept engines on its device, the noise, and the lengths a round hands on. The
joint law of five tokens, over about three rounds each, is known exactly and held against what came
out. One round would not do: a number used twice shows in the next one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from spec_export.engines.backend import Buffer
from spec_export.engines.bundle import Progress, no_progress
from spec_export.engines.errors import RequestError
from spec_export.engines.passes import BoundRole
from spec_export.runtime.buffers import HostMirror, Report, allocate_round
from spec_export.runtime.opened import OpenedBundle
from spec_export.runtime.sampling import Rule, Sampling, plan_for
from spec_export.runtime.sampling_calls import SamplingCalls

TOKENS = 5
_P = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.6, 0.15]])
_Q = np.array([[0.4, 0.2, 0.4], [0.3, 0.4, 0.3], [0.2, 0.3, 0.5]])
_SIGMAS = 4.7534  # of a normal law, exceeded once in a million


@dataclass(frozen=True)
class LawResult:
    """Outcome for one rule.

    Attributes:
        rule: how drafts were accepted.
        texts: texts drawn, each under a seed of its own.
        cells: texts that can come, each with its exact probability.
        statistic: chi-square of the counts.
        limit: what an exact sampler exceeds once in a million.
    """

    rule: Rule
    texts: int
    cells: int
    statistic: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the counts are those of the target's law."""
        return self.statistic <= self.limit


def check_law(
    opened: OpenedBundle, *, texts: int = 3000, progress: Progress = no_progress
) -> list[LawResult]:
    """Test every rule the bundle has.

    Args:
        opened: a bundle with a draft; the drafting model itself is not run.
        texts: per rule; 3000 give about 12 a cell.
        progress: called with (step, done, total).

    Raises:
        RequestError: the bundle was made without a draft, so there is no rule to test.
    """
    method = opened.manifest.method
    if method == "none":
        raise RequestError("this bundle was made without a draft; there is no rule to test")
    rules: tuple[Rule, ...] = ("reject", "invariant")
    if method == "model":
        rules = ("reject", "block", "invariant")
    return [_check_rule(opened, rule, texts, progress) for rule in rules]


def _check_rule(opened: OpenedBundle, rule: Rule, texts: int, progress: Progress) -> LawResult:
    toy = _Toy(opened, rule)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(texts):
        if seed % 100 == 0:
            progress(f"drawing texts, rule {rule}", seed, texts)
        counts[toy.draw(seed)] += 1
    progress(f"drawing texts, rule {rule}", texts, texts)
    statistic, cells = chi_square(counts, texts)
    return LawResult(rule, texts, cells, statistic, chi_square_limit(cells - 1))


def chi_square(counts: Counter[tuple[int, ...]], texts: int) -> tuple[float, int]:
    """Pearson's statistic of the counts against the exact law, and the number of cells."""
    statistic, cells = 0.0, 0
    for text in itertools.product(range(3), repeat=TOKENS):
        expected, last = float(texts), 0
        for token in text:
            expected *= _P[last, token]
            last = token
        statistic += float((counts[text] - expected) ** 2 / expected)
        cells += 1
    return statistic, cells


def chi_square_limit(freedom: int) -> float:
    """The quantile an exact sampler exceeds once in a million.

    Source: Wilson and Hilferty 1931: the cube root of a chi-square is almost normal.
    """
    width = 2 / (9 * freedom)
    return float(freedom * (1 - width + _SIGMAS * width**0.5) ** 3)


class _NoPass:
    """Stands where an engine runs a model; the toy writes the logits itself."""

    def enqueue(self) -> None:
        """Nothing to do."""


class _Toy:
    """Rounds over the toy laws through a bundle's sampling engines."""

    def __init__(self, opened: OpenedBundle, rule: Rule) -> None:
        self._device, manifest = opened.device, opened.manifest
        self._rule: Rule = rule
        gamma, vocabulary = manifest.gamma, manifest.models["target"].vocabulary
        self._gamma, self._is_model = gamma, manifest.method == "model"
        self._ids = [3, vocabulary // 2, vocabulary - 1]
        self._buffers = allocate_round(self._device, gamma)
        self._host = HostMirror(self._device, self._buffers)
        self._report = Report(self._device, self._buffers)
        self._logits = np.full((1, gamma + 1, vocabulary), -np.inf, np.float32)
        verify = self._device.allocate(self._logits.shape, np.float32)
        draft_width = manifest.models["draft"].vocabulary if self._is_model else vocabulary
        self._ids[2] = min(self._ids[2], draft_width - 1)
        self._draft_logits = np.full((1, 1, draft_width), -np.inf, np.float32)
        drafts: list[Buffer] = []
        if self._is_model:
            shape = self._draft_logits.shape
            drafts = [self._device.allocate(shape, np.float32) for _ in range(gamma)]
        self._verify, self._draft_buffers = verify, drafts
        role = BoundRole(_NoPass(), {"logits": verify}, gamma + 1)
        plan = plan_for(self._sampling(0), manifest)
        self._calls = SamplingCalls(opened, plan, self._buffers, {"verify": role}, drafts)
        self._drafted = np.zeros(gamma, np.int64)

    def _sampling(self, seed: int) -> Sampling:
        return Sampling(1.0, seed, rule=self._rule)

    def draw(self, seed: int) -> tuple[int, ...]:
        """The first tokens of the text of a seed, as 0, 1, 2."""
        self._calls.begin(self._sampling(seed))
        look_up = np.random.default_rng(seed)
        text, place, n = [0], 0, min(2, self._gamma)
        while len(text) <= TOKENS:
            self._host.set_place(len(text) + 1, self._ids[0], self._ids[text[-1]])
            self._calls.draw(place, len(text) + 1, len(text) + 2 + n, n)
            if self._calls.races is not None:
                self._calls.races.enqueue()
            drafts = self._propose(text, n, look_up)
            text += self._judge(text, drafts)
            place += 1
        return tuple(text[1 : TOKENS + 1])

    def _propose(self, text: list[int], n: int, look_up: np.random.Generator) -> list[int]:
        """`n` drafts: drawn by the propose engines, or found by a look-up that knows q."""
        drafts: list[int] = []
        if not self._is_model:
            for _ in range(n):
                drafts.append(int(look_up.choice(3, p=_Q[([*text, *drafts])[-1]])))
            self._host.set_drafts([self._ids[draft] for draft in drafts])
            return drafts
        for i in range(n):
            self._write(self._draft_logits, 0, _Q[[*text, *drafts][-1]])
            self._device.upload(self._draft_buffers[i], self._draft_logits)
            self._calls.propose[i].enqueue()
            self._device.download(self._buffers.drafts, self._drafted)
            drafts.append(self._ids.index(int(self._drafted[i])))
        return drafts

    def _judge(self, text: list[int], drafts: list[int]) -> list[int]:
        """What the accept engine emits for the drafts."""
        for row, last in enumerate([text[-1], *drafts]):
            self._write(self._logits, row, _P[last])
        self._device.upload(self._verify, self._logits)
        self._host.set_n_draft(len(drafts))
        self._calls.accept["verify"].enqueue()
        self._report.start()
        self._report.wait()
        emitted = [self._report.tokens[i] for i in range(self._report.n_accepted[0] + 1)]
        return [self._ids.index(token) for token in emitted]

    def _write(self, logits: np.ndarray, row: int, law: np.ndarray) -> None:
        logits[0, row, self._ids] = np.log(law)

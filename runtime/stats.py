"""What a generation did: rounds, drafts, acceptance and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counts of a text, or of several; whatever a stop cut off is counted nowhere.

    Attributes:
        gamma: drafts a round may have, as used.
        prompt_tokens: tokens of the prompt.
        emitted: tokens generated.
        rounds: passes that verified drafts.
        plain_steps: passes without drafts.
        drafted: drafts verified, without those a stop cut off.
        accepted: drafts that became text.
        rejections: rounds in which a draft was refused, and no stop hid it.
        draft_confidence: rounds stop drafting below it, as used; 0: never.
        early: rounds that did.
        drafted_at: per position, rounds that had a draft there.
        accepted_at: per position, rounds whose draft there became text.
        ttft_ms: time to the first token, prompt included; the mean of several texts.
        decode_ms: time of all tokens after the first.
        texts: texts that these are the counts of.
    """

    gamma: int
    prompt_tokens: int = 0
    emitted: int = 0
    rounds: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    draft_confidence: float = 0.0
    early: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    texts: int = 1

    def __post_init__(self) -> None:
        self.drafted_at = self.drafted_at or [0] * self.gamma
        self.accepted_at = self.accepted_at or [0] * self.gamma

    def count_round(
        self, n_draft: int, n_accepted: int, kept: int, *, is_early: bool = False
    ) -> None:
        """Count a round that emitted `n_accepted + 1` tokens, of which a stop left `kept`.

        One that stopped drafting early refused nothing by it: its drafts are `n_draft`.
        """
        self.emitted += kept
        if n_draft == 0:
            self.plain_steps += 1
            return
        cut = kept <= n_accepted
        drafted = kept if cut else n_draft
        accepted = min(n_accepted, kept)
        self.rounds += 1
        self.early += is_early
        self.drafted += drafted
        self.accepted += accepted
        if n_accepted < n_draft and not cut:
            self.rejections += 1
        for i in range(drafted):
            self.drafted_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    @property
    def alpha(self) -> float | None:
        """Acceptance of a draft that was reached: accepted / (accepted + rejections).

        The maximum-likelihood estimate of a truncated geometric law; accepted / drafted would
        count drafts after a rejection, which were never tested. None where nothing was tested.
        """
        tested = self.accepted + self.rejections
        return self.accepted / tested if tested else None

    @property
    def accepted_per_position(self) -> list[float | None]:
        """Share of rounds with a draft at a position in which it became text."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return [accepted / drafted if drafted else None for accepted, drafted in pairs]

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens per target pass after the prompt, passes without drafts included."""
        passes = self.rounds + self.plain_steps
        return (self.emitted - self.texts) / passes if passes else None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first by the time they took."""
        decoded = self.emitted - self.texts
        return decoded / self.decode_ms * 1e3 if self.decode_ms else None


def added_up(texts: Sequence[Stats]) -> Stats:
    """The counts of several texts after one prompt, under one gamma."""

    def positions(columns: Sequence[list[int]]) -> list[int]:
        return [sum(column) for column in zip(*columns, strict=True)]

    return Stats(
        gamma=texts[0].gamma,
        prompt_tokens=texts[0].prompt_tokens,
        emitted=sum(text.emitted for text in texts),
        rounds=sum(text.rounds for text in texts),
        plain_steps=sum(text.plain_steps for text in texts),
        drafted=sum(text.drafted for text in texts),
        accepted=sum(text.accepted for text in texts),
        rejections=sum(text.rejections for text in texts),
        draft_confidence=texts[0].draft_confidence,
        early=sum(text.early for text in texts),
        drafted_at=positions([text.drafted_at for text in texts]),
        accepted_at=positions([text.accepted_at for text in texts]),
        ttft_ms=sum(text.ttft_ms for text in texts) / len(texts),
        decode_ms=sum(text.decode_ms for text in texts),
        texts=sum(text.texts for text in texts),
    )

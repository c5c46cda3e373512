"""Decode until as many tokens are there as a replay has."""

from __future__ import annotations

from collections.abc import Sequence

from spec_export.runtime import Request, Session, Stats, generate


def decoded_to(session: Session, ids: Sequence[int], request: Request, emitted: int) -> Stats:
    """Counts of a text that is left as soon as it has `emitted` tokens."""
    stats = Stats(gamma=0)
    for piece in generate(session, ids, request):
        stats = piece.stats
        if stats.emitted >= emitted:
            break
    return stats

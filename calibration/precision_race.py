"""Decode with a target and a draft of other precisions, against plain decoding of the bundle."""

from __future__ import annotations

from collections.abc import Sequence

from spec_export.calibration.candidates import Candidate
from spec_export.calibration.measure import Task, decode
from spec_export.calibration.precision_reading import in_precision
from spec_export.runtime import OpenedBundle, Request, Session


def raced(
    opened: OpenedBundle, target: Candidate, draft: Candidate | None, gamma: int, task: Task
) -> float:
    """Measured speed-up over the fastest plain decoding of the bundle as it was built.

    Both decode as many tokens after every prompt, one after the other, past ends: what the tokens
    are does not change what they take.

    Args:
        opened: the bundle as it was built.
        target: in the precision.
        draft: in its precision; None: look-up.
        gamma: drafts a round; 0: plain, one row.
        task: prompts and how to go on from them.
    """
    base, other = Session(opened), Session(in_precision(opened, target, draft))
    alone = together = 0.0
    for ids in task.ids:
        together += _decode_ms(other, ids, task, gamma)
        alone += _decode_ms(base, ids, task, 0)
    return alone / together


def _decode_ms(session: Session, ids: Sequence[int], task: Task, gamma: int) -> float:
    request = Request(
        task.tokens, task.sampling, gamma=gamma, ignore_end=True, fast_plain=gamma == 0
    )
    stats = decode(session, ids, request)
    return stats.decode_ms / max(1, stats.emitted - 1)

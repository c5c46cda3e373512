"""Which sampling graphs there have to be, so that no request meets one that is missing.

Any combination of options may be asked for, and which graphs serve it is decided when it is. So all
of them belong to an exported directory, and all but the quick filters to a bundle: those are made
for the engines that have a use for them, and another filter serves what they would.
"""

from __future__ import annotations

from collections.abc import Collection

from spec_export.engines.graphs import FILTERS, weighing_keys

_OPTIONAL = ("filter_top", "filter_nucleus")
_CHOICES = ("greedy", "edited", "drawn")
_RULES = ("greedy", "edited", "one_hot", "invariant")
_RULES_OF_A_MODEL = ("dense", "block")


def exported_sampling(method: str, *, draft_differs: bool = False) -> frozenset[str]:
    """Names that `graphs.json` needs.

    Args:
        method: `model`, `ngram` or `none`.
        draft_differs: the draft's vocabulary has another size than the target's.
    """
    names = {key.name for key in weighing_keys("target")} | {"top_logprobs", "position_races"}
    names |= {f"filter_{filters}" for filters in FILTERS}
    names |= {f"sample_{choice}" for choice in _CHOICES}
    names |= {f"accept_{rule}" for rule in _RULES}
    if method == "model":
        names |= {f"accept_{rule}" for rule in _RULES_OF_A_MODEL}
        names |= {f"propose_{choice}" for choice in _CHOICES} | {"confidence"}
    if draft_differs:
        names |= {key.name for key in weighing_keys("draft")}
    return frozenset(names)


def missing_sampling(
    found: Collection[str], method: str, gammas: tuple[int, ...], *, draft_differs: bool = False
) -> list[str]:
    """Names that a manifest lacks of those it needs, in order.

    A quick filter that is there for one pass has to be there for all.

    Args:
        found: the names it has.
        method: `model`, `ngram` or `none`.
        gammas: drafts that rounds are built for; none without a draft.
        draft_differs: as above.
    """
    stems = {name.partition(".")[0] for name in found}
    unused = [name for name in _OPTIONAL if name not in stems]
    needed = needed_sampling(method, gammas, draft_differs=draft_differs, without=unused)
    return sorted(needed.difference(found))


def needed_sampling(
    method: str,
    gammas: tuple[int, ...],
    *,
    draft_differs: bool = False,
    without: Collection[str] = _OPTIONAL,
) -> frozenset[str]:
    """Names that a manifest needs: those of `exported_sampling` with the rows of each pass.

    Args:
        method: `model`, `ngram` or `none`.
        gammas: drafts that rounds are built for; none without a draft.
        draft_differs: as above.
        without: quick filters that the bundle does without.
    """
    exported = exported_sampling(method, draft_differs=draft_differs)
    verified = tuple(gamma + 1 for gamma in gammas)
    return frozenset(
        f"{name}.{rows}" if rows else name
        for name in exported.difference(without)
        for rows in _rows_of(name, verified)
    )


def _rows_of(name: str, verified: tuple[int, ...]) -> tuple[int, ...]:
    """Rows a graph is built for; 0 where its name does not say."""
    if name.startswith("accept_"):
        return verified
    if name.startswith(("sample_", "propose_", "position_", "confidence")):
        return (0,)
    return (1,) if name.startswith("draft_") else (1, *verified)

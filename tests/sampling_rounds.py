"""Rounds made to measure: a given outcome, unused rows full of garbage, awkward distributions."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests import algorithm1
from tests.sampling_run import (
    BELOW_ONE,
    GARBAGE_IDS,
    Arrays,
    accept,
    distribution,
    ids,
    round_feeds,
)

RATIO_RULES = ("dense", "block")
SAMPLED = ("one_hot", "dense", "block", "invariant")


def steer(feeds: Arrays, rule: str, n_draft: int, n_accepted: int) -> None:
    """Set ids and uniforms so that the round accepts exactly `n_accepted` of `n_draft` drafts."""
    rows, V = feeds["logits"][0].astype(float), feeds["logits"].shape[2]
    p, q = feeds["p"].astype(float)[:, :V], feeds["q"].astype(float)[:, :V]
    own = [accept("invariant", V, feeds | _without_drafts(feeds, i)) for i in range(n_draft)]
    for i in range(n_draft):
        best, worst = int(np.argmax(rows[i])), int(np.argmin(rows[i]))
        if rule == "invariant":
            best = int(own[i]["tokens"][0])
            worst = (best + 1) % V
        if rule in RATIO_RULES:  # a refusal needs q > p
            best, worst = int(np.argmax(p[i])), int(np.argmax(q[i] - p[i]))
        d = feeds["draft_tokens"][i] = best if i != n_accepted else worst
        if rule in ("one_hot", "dense"):
            bar = min(1.0, p[i, d] / (q[i, d] if rule == "dense" else 1.0))
            feeds["uniform"][i] = bar / 2 if i != n_accepted else (1 + bar) / 2
    if rule == "block":
        h = algorithm1.block_thresholds(p, q, feeds["draft_tokens"][:n_draft].tolist())
        for i in range(1, n_draft + 1):
            feeds["uniform"][i - 1] = h[i] / 2 if i <= n_accepted else (1 + h[i]) / 2
    feeds["n_draft"][0] = n_draft


def _without_drafts(feeds: Arrays, row: int) -> Arrays:
    """The round that begins at `row` and has no drafts."""
    G = len(feeds["draft_tokens"])
    return {name: np.roll(feeds[name], -row, axis=0) for name in ("p", "race")} | {
        "logits": np.roll(feeds["logits"], -row, axis=1),
        "draft_tokens": np.zeros(G, np.int64),
        "n_draft": ids(0),
    }


def spoil_unused(feeds: Arrays, n_draft: int) -> None:
    """Fill everything beyond the drafts with what must not matter."""
    gamma = len(feeds["draft_tokens"])
    feeds["q"][n_draft:] = np.nan
    feeds["uniform"][n_draft:] = np.nan
    feeds["draft_tokens"][n_draft:] = np.resize(np.array(GARBAGE_IDS), gamma)[n_draft:]
    for name in ("p", "scores"):
        feeds[name][n_draft + 1 :] = np.nan
    feeds["logits"][0, n_draft + 1 :] = np.nan


VOCABULARIES = st.sampled_from([3, 63, 64, 65, 1031, 50257, 151_936])
EDGES = st.sampled_from([0.0, 1e-30, 0.5, float(BELOW_ONE)])


@st.composite
def rounds(draw: st.DrawFn) -> Arrays:
    """A round over awkward distributions: banned tokens, wide logits, extreme temperatures."""
    V, gamma = draw(VOCABULARIES), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    feeds = round_feeds(rng, gamma, V)
    feeds["logits"] *= draw(st.sampled_from([0.0, 1.0, 30.0]))
    banned = rng.random((gamma + 1, V)) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    banned[:, rng.integers(V)] = False  # at 1.0 one token is left: a one-token support
    feeds["logits"][0][banned] = -np.inf
    feeds["p"] = distribution(feeds["logits"], draw(st.sampled_from([1e-6, 0.3, 1.0, 100.0])))
    feeds["uniform"][:] = draw(st.lists(EDGES, min_size=gamma, max_size=gamma))
    feeds["n_draft"][0] = draw(st.integers(0, gamma))
    if draw(st.booleans()):  # drafts the target bans
        feeds["draft_tokens"][:] = rng.integers(V, size=gamma)
    if draw(st.booleans()):  # a race that is decided at its ends
        feeds["race"][:] = rng.choice([0, 1e-30, 1, 37], size=feeds["race"].shape)
    return feeds

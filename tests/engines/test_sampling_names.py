"""A bundle has every sampling graph that a request may need, and the names of no other."""

from __future__ import annotations

import itertools

import pytest

from spec_export.engines.sampling_names import exported_sampling, missing_sampling, needed_sampling
from spec_export.runtime import Sampling
from spec_export.runtime.sampling import Plan, plan_for
from tests.conftest import Build, Open

QUICK = ("filter_top", "filter_nucleus")  # for the engines that have a use for them


@pytest.mark.parametrize(("method", "draft"), [("model", 70), ("model", 66), ("none", None)])
def test_they_are_what_export_writes(method: str, draft: int | None) -> None:
    graphs = pytest.importorskip("spec_export.export.sampling_graphs")
    other = draft not in (None, 70)
    written = set(graphs.sampling_graphs(70, draft))
    needed = exported_sampling(method, draft_differs=other)
    judging_a_model = {"accept_dense", "accept_block"}  # written for every method
    assert written - (set() if method == "model" else judging_a_model) == needed


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
def test_they_are_what_build_compiles(draft: str, build_tiny: Build, open_once: Open) -> None:
    manifest = open_once(build_tiny(draft)).manifest
    needed = needed_sampling(manifest.method, manifest.gammas)
    assert needed <= set(manifest.sampling)
    more = set(manifest.sampling) - needed
    assert all(name.startswith((*QUICK, "accept_dense", "accept_block")) for name in more), more


def test_every_width_has_its_own() -> None:
    needed = needed_sampling("model", (2, 4))
    assert {"accept_block.3", "accept_block.5", "filter_any.1", "filter_any.3"} <= needed
    assert {"distribution+edits+mask.5", "top_logprobs.3", "propose_drawn"} <= needed
    assert not {name for name in needed if name.startswith((*QUICK, "draft_"))}
    narrower = needed_sampling("model", (4,), draft_differs=True)
    assert {name for name in narrower if name.startswith("draft_") and name.endswith(".5")} == set()
    assert "draft_distribution+mask.1" in narrower


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
def test_what_is_missing_is_named(draft: str, build_tiny: Build, open_once: Open) -> None:
    """A filter that was missing used to be left out of the draw, without a word."""
    manifest = open_once(build_tiny(draft)).manifest
    found, kind = set(manifest.sampling), (manifest.method, manifest.gammas)
    assert missing_sampling(found, *kind) == []
    for name in needed_sampling(*kind):
        assert missing_sampling(found - {name}, *kind) == [name]
    for filters in QUICK:
        there = {name for name in found if name.startswith(filters)}
        assert missing_sampling(found - there, *kind) == [], "another one serves what it would"
        if len(there) > 1:
            assert missing_sampling(found - {f"{filters}.1"}, *kind) == [f"{filters}.1"]


OPTIONS: dict[str, list[object]] = {
    "temperature": [0.0, 1.0],
    "rule": ["reject", "block", "invariant"],
    "draft": ["greedy", "probabilistic"],
    "top_k": [0, 5, 600],
    "top_p": [1.0, 0.9],
    "min_p": [0.0, 0.1],
    "typical_p": [1.0, 0.5],
    "presence_penalty": [0.0, 1.0],
    "banned_tokens": [(), (3,)],
    "top_logprobs": [0, 3],
}


@pytest.mark.parametrize("draft", ["pair", "ngram", "none"])
def test_no_request_needs_another(draft: str, build_tiny: Build, open_once: Open) -> None:
    """A graph that was missing ended in a KeyError, or, a filter, did nothing without a word."""
    manifest = open_once(build_tiny(draft)).manifest
    needed = needed_sampling(manifest.method, manifest.gammas)
    widths = tuple(gamma + 1 for gamma in manifest.gammas)
    for values in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, values, strict=True))
        if options["temperature"] or options["typical_p"] == 1:
            plan = plan_for(Sampling(**options), manifest)  # type: ignore[arg-type]
            assert named_by(plan, widths) <= needed, options


def named_by(plan: Plan, widths: tuple[int, ...]) -> set[str]:
    """Graphs that a plan binds, without the filters that another one stands in for."""
    names = {f"sample_{plan.chooses}"} | {f"accept_{plan.accept}.{rows}" for rows in widths}
    names |= {f"propose_{plan.proposes}"} if plan.proposes else set()
    weighed = {
        plan.weighing(choice, "target") for choice in (plan.chooses, plan.proposes) if choice
    }
    stems = {key.name for key in weighed if key is not None}
    stems |= {f"filter_{plan.filters[-1]}"} if plan.filters else set()
    stems |= {"top_logprobs"} if plan.lists_logprobs else set()
    return names | {f"{stem}.{rows}" for stem in stems for rows in (1, *widths)}

"""Several verify widths in one bundle: a round takes the narrowest that holds its drafts."""

from __future__ import annotations

import numpy as np
import pytest

from spec_export.engines.backend import Call
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.bundle import open_bundle
from spec_export.engines.ort import OrtBackend
from spec_export.runtime import Sampling, Session
from tests.decoding import decode
from tests.deferred_device import deferred

PROMPT = "And the king said unto him"
GAMMAS = (1, 2, 5)


@pytest.fixture(scope="module")
def wide(tiny_exported, tmp_path_factory, open_once):
    """The tiny pair, or it with look-up, built for gamma 1, 2 and 5."""

    def build(draft: str):
        out = tmp_path_factory.mktemp("wide") / draft
        options = BuildOptions(gamma=5, max_len=128, chunk=16, narrower=(2, 1))
        return open_once(build_bundle(tiny_exported(draft), out, OrtBackend(), options).path)

    return {draft: build(draft) for draft in ("pair", "ngram")}


class Watched:
    """Notes that a call was enqueued."""

    def __init__(self, call: Call, name: str, seen: list[str]) -> None:
        self._call, self._name, self._seen = call, name, seen

    def enqueue(self) -> None:
        self._seen.append(self._name)
        self._call.enqueue()


def test_the_manifest_says_which_there_are(wide):
    manifest = open_bundle(wide["pair"].bundle.path).manifest
    assert (manifest.gamma, manifest.gammas) == (5, GAMMAS)
    roles = {role.name: role.rows for role in manifest.models["target"].roles}
    assert {name: roles[name] for name in roles if name.startswith("verify")} == {
        "verify": 6,
        "verify_2": 3,
        "verify_1": 2,
    }
    assert manifest.exactness.widths == (2, 3, 6, 16)
    for rows in (2, 3, 6):
        assert {f"accept_dense.{rows}", f"distribution+mask.{rows}"} <= set(manifest.sampling)


def test_a_round_takes_the_narrowest_pass_that_holds_its_drafts(wide):
    session = Session(wide["pair"])
    seen: list[str] = []
    for name, bound in session._roles.items():
        session._roles[name] = type(bound)(
            Watched(bound.call, name, seen), bound.buffers, bound.rows
        )
    session.prefill(session.opened.text.encode(PROMPT))
    session.first()
    seen.clear()
    for n in (5, 1, 2, 3, 4, 5, 2, 1):
        session.round(n)
    assert seen == [
        *("verify", "verify_1", "verify_2", "verify", "verify", "verify", "verify_2", "verify_1")
    ]


@pytest.mark.parametrize("draft", ["pair", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_widths_in_any_order_leave_the_text_as_it_is(draft, temperature, wide):
    """On a bundle that is exact at every width, with a position's noise; on a late device too."""
    opened = wide[draft]
    prompt, sampling = opened.text.encode(PROMPT), Sampling(temperature, 4)
    request = {"max_tokens": 60, "ignore_end": True, "sampling": sampling}
    plain = decode(opened, prompt, gamma=0, **request).tokens
    for gamma in range(1, 6):
        for where in (opened, deferred(opened)):
            assert decode(where, prompt, gamma=gamma, **request).tokens == plain
    for where in (opened, deferred(opened)):
        session = Session(where)
        session.begin(sampling)
        session.prefill(prompt)
        session.first()
        for n in np.random.default_rng(1).integers(0, 6, 60).tolist():
            if len(session.history) < len(prompt) + 60:
                session.round(n)
        assert session.history[len(prompt) :][: len(plain)] == plain


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_the_law_does_not_depend_on_the_width(rule, wide):
    """Two drafts in a pass of 3 rows or of 6: what is drawn is the same, number by number."""
    opened = wide["pair"]
    prompt, sampling = opened.text.encode(PROMPT), Sampling(1.0, 4, rule=rule)

    def text(session: Session) -> list[int]:
        session.begin(sampling)
        session.prefill(prompt)
        session.first()
        for _ in range(20):
            session.round(2)
        return list(session.history)

    narrow, wide_only = Session(opened), Session(opened)
    for rounds in wide_only._variants.values():
        rounds._verifying = rounds._verifying[-1:]
    wide_only._rounds_for(sampling)._verifying = [(5, "verify")]
    assert text(narrow) == text(wide_only)


def test_only_one_width_is_taken_where_rows_are_exact_at_one_width_alone(wide):
    from dataclasses import replace

    opened = wide["pair"]
    manifest = opened.manifest
    exactness = replace(manifest.exactness, kind="row_invariant")
    changed = replace(opened.bundle, manifest=replace(manifest, exactness=exactness))
    session = Session(replace(opened, bundle=changed))
    assert {session._rounds.role(n) for n in range(1, 6)} == {"verify"}

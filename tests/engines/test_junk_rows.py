"""A role of one row that was compiled for two, the second one junk, decodes to the same text.

TensorRT has no attention kernel for one row of some head counts. What the runtime makes of such a
bundle is tried with an engine that runs here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.engines.backend import Compiled
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.graphs import JUNK_ROLES, ModelSpec
from spec_export.engines.ort import OrtBackend
from spec_export.runtime import Sampling, open_runtime
from tests.decoding import decode

PROMPT = [5, 6, 7, 8, 5, 6, 7]


class TwoRowed(OrtBackend):
    """Compiles no role for one row."""

    def compile_model(
        self, graph: Path, spec: ModelSpec, capacity: int, out: Path, link: bool
    ) -> Compiled:
        made = super().compile_model(graph, spec, capacity, out, link)
        roles = (
            replace(role, rows=2, logit_rows=2) if role.name in JUNK_ROLES else role
            for role in spec.roles
        )
        return replace(made, roles=tuple(roles))


@pytest.fixture(scope="module")
def two_rowed(tiny_exported, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two_rowed") / "bundle"
    options = BuildOptions(gamma=4, max_len=128, chunk=32)
    return build_bundle(tiny_exported("pair"), out, TwoRowed(), options).path


def test_the_manifest_says_so(two_rowed):
    manifest = open_runtime(two_rowed).manifest
    assert manifest.models["target"].role("decode").rows == 2
    assert manifest.models["draft"].role("step").rows == 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
@pytest.mark.parametrize("fast_plain", [False, True])
@pytest.mark.parametrize("length", [1, 7])
def test_texts_are_those_of_one_row(two_rowed, tiny_bundle, sampling, fast_plain, length):
    request = {"max_tokens": 40, "ignore_end": True, "sampling": sampling}
    texts = [
        decode(
            open_runtime(bundle), PROMPT[:length], gamma=gamma, fast_plain=fast_plain, **request
        ).tokens
        for bundle in (two_rowed, tiny_bundle)
        for gamma in (0, 4)
    ]
    assert len(texts[0]) == 40
    assert all(text == texts[0] for text in texts)


def test_the_context_fills_to_its_last_token(two_rowed, tiny_bundle):
    """A junk row lies past the last position; the caches have room for it."""
    bundles = (two_rowed, tiny_bundle)
    texts = [decode(open_runtime(b), PROMPT, ignore_end=True).tokens for b in bundles]
    assert texts[0] == texts[1]
    assert len(texts[0]) + len(PROMPT) in (128, 129)

"""One tokenizer, two widths of logits: families are padded differently from size to size.

vllm 7252, koboldcpp 2325: vocabularies of 151936 and 152064 were refused, or ids that
only the draft has were proposed.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from spec_export.engines.build import BuildOptions, build_bundle, read_exported
from spec_export.engines.bundle import VerifiedFiles
from spec_export.engines.ort import OrtBackend
from spec_export.runtime import OpenedBundle, Sampling, Session, open_runtime
from tests.decoding import trace
from tests.exported import with_draft
from tests.tiny_models import TINY, save_tiny_model

NARROW, PADDED = 1031, 1088


@pytest.fixture(scope="module")
def padded_exported(export_pair, tmp_path_factory):
    """A random target that has 57 ids more than the tiny pair's draft, exported with that draft."""
    folder = tmp_path_factory.mktemp("padded")
    checkpoint = save_tiny_model(
        folder / "checkpoint", "llama", vocab_size=PADDED, max_position_embeddings=512
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / file, checkpoint / file)
    return export_pair(str(checkpoint), str(TINY / "draft"), folder / "exported").path


def opened(exported, out) -> OpenedBundle:
    options = BuildOptions(gamma=4, max_len=64, chunk=16)
    bundle = build_bundle(exported, out, OrtBackend(), options)
    return open_runtime(bundle.path, memory=VerifiedFiles(None))


@pytest.fixture(scope="module")
def narrower(padded_exported, tmp_path_factory) -> OpenedBundle:
    """The draft has fewer ids than the target."""
    return opened(padded_exported, tmp_path_factory.mktemp("narrower") / "bundle")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_a_narrower_vocabulary_is_accepted(temperature, padded_exported, narrower):
    """The target emits ids that the draft has never heard of, and drafting goes on after them."""
    models = read_exported(padded_exported).models
    assert (models["target"].vocabulary, models["draft"].vocabulary) == (PADDED, NARROW)
    plain, session = Session(narrower), Session(narrower)
    foreign = 0
    for first in range(12):
        sampling = Sampling(temperature, first)
        found = trace(session, [first, 1050], 50, 4, sampling=sampling)
        foreign += sum(token >= NARROW for token in found.tokens)
        assert found.accepted
        if temperature == 0:
            expected = trace(plain, [first, 1050], 50, 0)
            assert found.tokens[:50] == expected.tokens[:50]
    assert foreign, "no id above the draft's came up"


@pytest.mark.parametrize("rule", ["reject", "block", "invariant"])
def test_where_the_draft_knows_no_token_that_may_come_the_law_is_the_targets(rule, narrower):
    """Its q is empty, or NaN where a softmax kernel makes it so: no draft is taken at its word."""
    allowed = (PADDED - 1, PADDED - 2, PADDED - 3)
    session, seen, expected, variance = Session(narrower), 0, 0.0, 0.0
    for seed in range(60):
        sampling = Sampling(1.0, seed, rule=rule, allowed_tokens=allowed)
        found = trace(session, [seed % 50, 5], 8, 4, sampling=sampling)
        for token, row in zip(found.tokens[1:], found.logits[1:], strict=True):
            weights = np.exp(row[list(allowed)].astype(float))
            p = float(weights[0] / weights.sum())
            seen, expected, variance = (
                seen + (token == allowed[0]),
                expected + p,
                variance + p - p * p,
            )
    # Given the text before it each is a coin of its own: 5 deviations are one in a million.
    assert variance > 50
    assert abs(seen - expected) < 5 * variance**0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_above_the_targets_are_never_proposed(
    temperature, padded_exported, tiny_pair_exported, tmp_path
):
    """The draft is made to prefer them, and must propose something else."""
    exported = with_draft(tiny_pair_exported, padded_exported, "target", tmp_path / "exported")
    models = read_exported(exported).models
    assert (models["target"].vocabulary, models["draft"].vocabulary) == (NARROW, PADDED)
    bundle = opened(exported, tmp_path / "bundle")
    session = Session(bundle)
    biased = session.draft._passes
    for bound in biased:
        bound.call.enqueue = Biased(bound).enqueue
    seen: list[int] = []
    inner = session._roles["verify"].call.enqueue

    def watched() -> None:
        seen.extend(session._buffers.drafts.host.tolist())
        inner()

    session._roles["verify"].call.enqueue = watched
    for first in range(6):
        found = trace(session, [first, 5], 40, 4, sampling=Sampling(temperature, first))
        assert max(found.tokens) < NARROW
    assert len(seen) > 200
    assert min(seen) >= 0 and max(seen) < NARROW
    if temperature == 0:
        expected = trace(Session(bundle), [5, 5], 40, 0)
        assert found.tokens[:40] == expected.tokens[:40]


class Biased:
    """A pass of the draft whose best ids are ones the target does not have."""

    def __init__(self, bound) -> None:
        self.inner, self.logits = bound.call.enqueue, bound.buffers["logits"].host

    def enqueue(self) -> None:
        self.inner()
        self.logits[..., NARROW:] = np.float32(1e3)


def test_the_padded_ids_are_no_tokens():
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= NARROW

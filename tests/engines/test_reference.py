"""The reference backend against ONNX Runtime, and sessions that run on it.

Two implementations of the same graphs that share no code: onnxruntime 29020, onnx 8068,
where engines disagreed on what a causal flag means when a pass is shorter than its cache.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spec_export.engines.backend import Backend
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.bundle import open_bundle
from spec_export.engines.compare import compare_engines
from spec_export.engines.errors import BundleError, NonFiniteError
from spec_export.engines.ort import OrtBackend
from spec_export.engines.passes import PassRunner
from spec_export.engines.reference import ReferenceBackend
from spec_export.engines.standard import STANDARD_GRAPH
from spec_export.runtime import OpenedBundle, Sampling, Session, open_runtime
from spec_export.runtime.text import Text
from tests.decoding import decode, trace


def opened_by(backend: Backend, path, *, standard: bool = True) -> OpenedBundle:
    """Open a bundle's standard graphs with another backend than the one it was built for."""
    bundle = open_bundle(path)
    manifest = bundle.manifest

    def graph(file: str):
        compiled = bundle.file(file)
        return compiled.parent / STANDARD_GRAPH if standard else compiled

    models = {
        name: backend.open_model(graph(spec.file), spec) for name, spec in manifest.models.items()
    }
    sampling = {
        name: backend.open_sampling(bundle.file(spec.file), spec)
        for name, spec in manifest.sampling.items()
    }
    return OpenedBundle(
        bundle=bundle,
        device=backend.device,
        target=models["target"],
        draft=models.get("draft"),
        sampling=sampling,
        text=Text(bundle.file(manifest.text.tokenizer), None, manifest.text),
        exactness="none",
    )


@pytest.fixture(scope="module")
def referred(tiny_bundle) -> OpenedBundle:
    """The tiny pair on the reference backend."""
    return opened_by(ReferenceBackend(), tiny_bundle)


def test_both_backends_agree_on_the_tiny_target(tiny_bundle, referred):
    """Every role at several lengths. 1e-5 of the largest logit: summation order (6e-7 measured)."""
    bundle, backend = open_bundle(tiny_bundle), OrtBackend()
    spec = bundle.manifest.models["target"]
    lowered = backend.open_model(bundle.file(spec.file), spec)
    found = compare_engines(backend.device, lowered, referred.target, spec, 128)
    assert found.agrees and found.argmax_agreement == 1
    assert found.worst_logit < found.tolerance / 10


def test_they_agree_on_rows_that_are_a_tree(tiny_bundle):
    """Two paths in one pass: only the standard graph reads `depth` and `tree_mask`, in both."""
    bundle = open_bundle(tiny_bundle)
    spec = bundle.manifest.models["target"]
    file = bundle.file(spec.file).parent / STANDARD_GRAPH
    logits = []
    for backend in (OrtBackend(), ReferenceBackend()):
        runner = PassRunner(backend.device, backend.open_model(file, spec), spec)
        runner.prefill(np.arange(20))
        bound = runner._role("verify")
        depth = np.array([0, 1, 2, 1, 2])
        mask = np.eye(5, dtype=bool)
        for row, parents in enumerate([(), (0,), (0, 1), (0,), (0, 3)]):
            mask[row, list(parents)] = True
        backend.device.upload(bound.buffers["depth"], depth)
        backend.device.upload(bound.buffers["tree_mask"], mask)
        tree = runner.run("verify", np.array([3, 4, 5, 6, 7]), 20, np.arange(5))
        backend.device.upload(bound.buffers["depth"], np.arange(5))
        backend.device.upload(bound.buffers["tree_mask"], np.tril(np.ones((5, 5), bool)))
        for row, path in ((2, [3, 4, 5]), (4, [3, 6, 7])):  # each path alone gives the same
            chain = runner.run("verify", np.array(path), 20, np.arange(5))
            assert np.abs(chain[2] - tree[row]).max() < 1e-4
        logits.append(tree)
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [0, 4])
def test_sessions_give_the_same_text_on_both(temperature, gamma, tiny_bundle, open_once, referred):
    """The same noise, logits that differ by 1e-5: the same tokens unless a draw is that close."""
    prompt = referred.text.encode("And the king said unto his servants")
    request = {
        "max_tokens": 24,
        "gamma": gamma,
        "ignore_end": True,
        "sampling": Sampling(temperature, 3),
    }
    found = decode(referred, prompt, **request)
    expected = decode(open_once(tiny_bundle), prompt, **request)
    assert found.tokens == expected.tokens
    assert found.stats.accepted_at == expected.stats.accepted_at
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


def test_nan_in_a_given_up_text_does_not_reach_the_next(referred):
    """Standard attention multiplies every cached row, masked ones by 0; and 0 * NaN is NaN.

    NaN in a committed row used to stay where it was. A shorter text then had it past its length,
    where nothing overwrites it: every pass of that text failed as well.
    """
    prompt = referred.text.encode("And it came to pass, when the king heard the words, " * 5)
    expected = trace(Session(referred), prompt[:3], 8, 4)
    session = Session(referred)
    session.prefill(prompt)
    session.first()
    at = referred.manifest.chunk + 5
    assert at < len(prompt) - 1
    session._caches[session._spec.states[2].input].host[:, :, at] = np.nan
    for state in session.draft._spec.states:
        session.draft._caches[state.input].host[:, :, at] = np.nan
    with pytest.raises(NonFiniteError):
        session.round(4)
    found = trace(session, prompt[:3], 8, 4)
    assert found.tokens == expected.tokens
    assert found.accepted == expected.accepted


def test_a_session_that_takes_back_past_nan_goes_on(referred):
    prompt = referred.text.encode("And it came to pass, when the king heard the words of the woman")
    expected = trace(Session(referred), prompt[:5], 8, 2).tokens
    session = Session(referred)
    session.prefill(prompt)
    session.first()
    session._caches[session._spec.states[1].input].host[:, :, 9] = np.nan
    with pytest.raises(NonFiniteError):
        session.plain()
    session.rewind(5)
    while len(session.history) < 5 + 8:
        session.round(2)
    assert session.history[5:][:8] == expected[:8]


def test_a_bundle_can_be_built_for_it(export_family, tmp_path):
    """The whole of `Backend`: compile, open, allocate, check, probe."""
    options = BuildOptions(gamma=2, max_len=32, chunk=8)
    bundle = build_bundle(export_family("llama"), tmp_path / "bundle", ReferenceBackend(), options)
    manifest = bundle.manifest
    assert manifest.device.backend == "onnx.reference"
    assert manifest.lowered == {"target": ()}
    assert manifest.exactness.kind in ("none", "row_invariant", "width_invariant")
    opened = opened_by(ReferenceBackend(), bundle.path, standard=False)
    opened = replace(opened, exactness=manifest.exactness.kind)
    prompt = [7, 8, 9, 7, 8]
    found = decode(opened, prompt, ignore_end=True)
    assert len(found.tokens) == 32 - 5
    with pytest.raises(BundleError, match=r"'onnx\.reference' is unknown"):
        open_runtime(bundle.path)

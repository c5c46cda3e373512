"""A real pair of two sizes: Qwen2.5-Coder 1.5B, drafted by its 0.5B. Slow, and needs 24 GB."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.ort import OrtBackend
from spec_export.runtime import open_runtime
from tests.decoding import decode

FOLDER = os.environ.get("SPEC_EXPORT_MODELS", "")
TARGET, DRAFT = (Path(FOLDER) / f"qwen25-coder-{size}.gguf" for size in ("1.5b", "0.5b"))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not (FOLDER and TARGET.is_file() and DRAFT.is_file()),
    reason="set SPEC_EXPORT_MODELS to a folder with qwen25-coder-1.5b.gguf and -0.5b.gguf",
)
def test_qwen_pair_speculates_with_the_bytes_of_plain_decoding(tmp_path: Path) -> None:
    """151936 ids, tied embeddings, biases, two depths: parity, lowering, exactness, acceptance."""
    from spec_export.export.exporter import export_pair

    pair = export_pair(str(TARGET), str(DRAFT), tmp_path / "exported")
    assert all(found.argmax_agreement == 1.0 for found in pair.graphs.parity.values())
    options = BuildOptions(gamma=4, max_len=256, chunk=64)
    build_bundle(pair.path, tmp_path / "bundle", OrtBackend(), options)
    opened = open_runtime(tmp_path / "bundle")
    assert opened.exactness == "width_invariant"
    prompt = opened.text.encode_chat(
        [{"role": "user", "content": "Write a Python function that reverses a string."}]
    )
    speculative = decode(opened, prompt, max_tokens=48)
    plain = decode(opened, prompt, max_tokens=48, gamma=0)
    assert speculative.tokens == plain.tokens
    # A draft of the same family on boilerplate code; 0.9 and more was seen.
    assert speculative.stats.alpha is not None and speculative.stats.alpha > 0.6

"""A tiny random llama, and its checkpoint in Hugging Face layout."""

from __future__ import annotations

import pytest

from tests.tiny_checkpoints import save_directory, tiny_config, tiny_model


@pytest.fixture(scope="module")
def llama():
    return tiny_model(tiny_config("llama"))


@pytest.fixture
def directory(tmp_path, llama):
    return save_directory(tmp_path / "checkpoint", llama)

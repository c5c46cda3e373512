"""Checkpoints as a user names them, and every kind that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import BertConfig, T5Config

from spec_export.engines.errors import CheckpointError, UnsupportedModel
from spec_export.export.checkpoint import open_checkpoint
from tests.tiny_checkpoints import (
    edit_json,
    expected_logits,
    logits,
    parameter_shapes,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.mark.parametrize("source", ["./absent", "absent.gguf", "/a/b/absent", "a/b/c", "~/absent"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(source):
    with pytest.raises(CheckpointError, match=f"{source} does not exist"):
        open_checkpoint(source)


def test_an_empty_source_is_no_checkpoint():
    with pytest.raises(CheckpointError):
        open_checkpoint("")


def test_a_directory_without_a_configuration_points_at_its_gguf_file(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"no config\.json.*name it: .*model\.gguf"):
        open_checkpoint(str(tmp_path))


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="adapter; merge it"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_opened(directory, name):
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for source in (directory, directory / name):
        with pytest.raises(CheckpointError, match=r"pickle can run any code.*save_pretrained"):
            open_checkpoint(str(source))


def test_a_pickle_beside_safetensors_is_ignored(directory):
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    open_checkpoint(str(directory))


def test_weights_that_are_not_there(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file; is the download complete"):
        open_checkpoint(str(directory))


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], type[CheckpointError], str]] = {
    "code": ({"auto_map": {"AutoConfig": "evil.Config"}}, CheckpointError, "auto_map.*--trust-rem"),
    "gptq": ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, r"\(gptq\)"),
    "t5": (T5Config().to_dict(), UnsupportedModel, "'t5' model with an encoder"),
    "bert": (BertConfig().to_dict(), UnsupportedModel, "'bert' model: an encoder"),
    "vit": ({"model_type": "vit", "architectures": []}, UnsupportedModel, "no causal model"),
    "unknown": ({"model_type": "perpetuum"}, UnsupportedModel, "'perpetuum'"),
    "no type": ({"model_type": None}, UnsupportedModel, "None"),
    "classifier": (
        {"architectures": ["LlamaForSequenceClassification"]},
        UnsupportedModel,
        "another task",
    ),
    "parts": (
        {"model_type": "gemma3", "architectures": None, "text_config": {}},
        UnsupportedModel,
        "several parts",
    ),
    "layers": ({"num_hidden_layers": 10**12}, CheckpointError, "1000000000000, and there are 2"),
    "nonsense": ({"num_hidden_layers": "many"}, CheckpointError, "describes no model"),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_a_configuration_that_is_refused(directory, case):
    changes, error, message = REFUSED_CONFIGS[case]
    edit_json(directory / "config.json", **changes)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(str(directory))
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "llama", "model_type": 1}'])
def test_a_configuration_that_is_no_json_object(directory, content):
    (directory / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(directory))


def test_an_enormous_configuration_is_not_read(directory):
    with (directory / "config.json").open("ab") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(CheckpointError, match="1073741824 bytes"):
        open_checkpoint(str(directory))


# --- hub ---------------------------------------------------------------------------------------


def hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        return answer(repository, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_hub_id_is_downloaded_without_pickles(monkeypatch, directory, llama):
    calls = hub(monkeypatch, lambda *_, **__: str(directory))
    checkpoint = open_checkpoint("org/name", revision="main")
    assert torch.equal(logits(checkpoint, parameter_shapes(llama)), expected_logits(llama))
    assert [call["repository"] for call in calls] == ["org/name", "org/name"]
    assert all(call["revision"] == "main" for call in calls)
    patterns = [pattern for call in calls for pattern in call["allow_patterns"]]
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern or "pt" in pattern or ".py" in pattern for pattern in patterns)


def test_a_hub_model_is_refused_before_its_weights_are_downloaded(monkeypatch, directory):
    edit_json(directory / "config.json", quantization_config={"quant_method": "awq"})
    calls = hub(monkeypatch, lambda *_, **__: str(directory))
    with pytest.raises(UnsupportedModel, match="awq"):
        open_checkpoint("org/name")
    assert not any("safetensors" in str(call["allow_patterns"]) for call in calls)


def test_a_hub_that_does_not_answer(monkeypatch):
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host")

    hub(monkeypatch, offline)
    with pytest.raises(CheckpointError, match=r"org/name is no directory.*no route to host.*Check"):
        open_checkpoint("org/name")


def test_a_hub_repository_with_pickles_only(monkeypatch, directory):
    (directory / "model.safetensors").unlink()
    hub(monkeypatch, lambda *_, **__: str(directory))
    with pytest.raises(CheckpointError, match=r"org/name on the hub has no \*\.safetensors"):
        open_checkpoint("org/name")


def test_checkpoint_of_another_library_is_refused(directory):
    """A sentence embedder over a causal model would be exported as the bare model inside it."""
    (directory / "config_sentence_transformers.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="sentence_transformers"):
        open_checkpoint(str(directory))

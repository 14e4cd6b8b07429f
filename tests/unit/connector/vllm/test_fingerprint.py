"""What makes two engines' models the same model: their KV may be exchanged then, and only then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdcluster_connector.vllm.fingerprint import _model_digest


def digest(folder: Path, *, configuration: dict[str, Any] | None = None, **changed: Any) -> str:
    """Of a model as vLLM's ``ModelConfig`` has it."""
    told = {"model_type": "llama", "hidden_size": 64, "_name_or_path": str(folder), **(configuration or {})}
    hf_text_config = SimpleNamespace(to_dict=lambda: dict(told))
    facts = {"model": str(folder), "revision": None, "quantization": None, **changed}
    return _model_digest(SimpleNamespace(hf_text_config=hf_text_config, **facts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_weights(tmp_path / "model", b"weights" * 1000)


def with_weights(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_copies_of_a_model_are_the_same_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    copy = with_weights(tmp_path / "copy", b"weights" * 1000)
    assert digest(copy) == digest(folder)
    assert digest(folder, configuration={"transformers_version": "9"}) == digest(folder)


def test_other_weights_of_one_shape_are_another_model(folder: Path, tmp_path: Path) -> None:
    assert digest(with_weights(tmp_path / "tuned", b"weighty" * 1000)) != digest(folder)


def test_another_configuration_is_another_model(folder: Path) -> None:
    assert digest(folder, configuration={"hidden_size": 128}) != digest(folder)


def test_weights_that_are_quantized_when_they_are_loaded_are_another_model(folder: Path) -> None:
    """``--quantization fp8`` on one role only: the files are the same, and the keys are not."""
    assert digest(folder, quantization="fp8") != digest(folder)


def test_a_model_of_a_hub_is_told_by_its_name_and_revision(tmp_path: Path) -> None:
    hub = tmp_path / "no-folder"
    assert digest(hub, revision="main") == digest(hub, revision="main")
    assert digest(hub, revision="main") != digest(hub, revision="v2")
    assert digest(hub, model="org/one") != digest(hub, model="org/two")

"""Makes tiny LoRA adapters for the tiny models. Each seed gives other weights, which change KV and answers."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any, Final

RANK: Final = 8
_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_STD: Final = 0.15


def write_adapter(folder: Path, model: Path, *, seed: int) -> Path:
    """The adapter of ``seed`` is in ``folder``. Files that were there are replaced, as a deployment replaces them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(_PROJECTIONS)}
    _replace(folder / "adapter_config.json", json.dumps(settings).encode())
    _replace(folder / "adapter_model.safetensors", _weights(config, seed))
    return folder


def _weights(config: dict[str, Any], seed: int) -> bytes:
    torch, safetensors = importlib.import_module("torch"), importlib.import_module("safetensors.torch")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": torch.randn(
            *shape, generator=generator
        )
        * _STD
        for layer in range(config["num_hidden_layers"])
        for name in _PROJECTIONS
        for side, shape in _shapes(config, name).items()
    }
    packed: bytes = safetensors.save(tensors, metadata={"format": "pt"})
    return packed


def _shapes(config: dict[str, Any], name: str) -> dict[str, tuple[int, int]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    wide, narrow = heads * head_dim, config["num_key_value_heads"] * head_dim
    inner, outer = {"q_proj": (hidden, wide), "o_proj": (wide, hidden)}.get(name, (hidden, narrow))
    return {"A": (RANK, inner), "B": (outer, RANK)}


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)  # noqa: PTH105  # as mv does

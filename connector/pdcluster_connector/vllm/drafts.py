"""The draft model of an engine, and which layers keep its KV.

A layer's name decides, as vLLM has no other mark on layers. If a draft layer is taken for the model's own, prefill owes
that layer, and the handshake refuses a prefill engine that lacks it. The link refuses the opposite mistake too.

Source of truth: vLLM 0.32 ``config/speculative.py``, ``v1/spec_decode``, ``model_executor/models/*_mtp.py`` and
``*_eagle.py``.
"""

from __future__ import annotations

from typing import Final

from vllm.config import ModelConfig, VllmConfig

_NGRAM: Final = ("ngram", "ngram_gpu")
"""Prompt lookup, as vLLM 0.32's ``SpeculativeConfig.use_ngram`` says; older versions lack ``use_ngram``."""
_PARTS: Final = ("draft_model", "mtp")
"""Parts of the names of layers that only a draft model has."""


def models_of(config: VllmConfig) -> list[ModelConfig]:
    """The model, and, if there is one, the draft model that keeps KV of its own."""
    draft = draft_of(config)
    return [config.model_config, *([draft] if draft is not None else [])]


def draft_of(config: VllmConfig) -> ModelConfig | None:
    """The draft model with KV of its own, which may be MTP's layers or an EAGLE head; None: there is none."""
    speculative = config.speculative_config
    return speculative.draft_model_config if speculative and speculative.method not in _NGRAM else None


def is_draft_layer(config: VllmConfig, name: str) -> bool:
    """Whether the layer is the draft model's. The layers of MTP and of an EAGLE head are mostly numbered on after the
    model's last layer."""
    if draft_of(config) is None:
        return False
    parts = name.split(".")
    number = next((int(part) for part in parts if part.isdecimal()), 0)
    return not set(_PARTS).isdisjoint(parts) or number >= config.model_config.get_total_num_hidden_layers()

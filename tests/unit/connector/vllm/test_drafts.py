"""Which layers are a draft model's: by their names, for vLLM marks them in no other way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdcluster_connector.vllm.drafts import draft_of, is_draft_layer, models_of

MODEL, DRAFT = SimpleNamespace(get_total_num_hidden_layers=lambda: 32), SimpleNamespace()


def config(method: str | None) -> Any:
    """Of an engine with this method of speculation. Prompt lookup has a draft model too, to vLLM: the model itself."""
    speculative = SimpleNamespace(method=method, draft_model_config=DRAFT) if method else None
    return SimpleNamespace(model_config=MODEL, speculative_config=speculative)


@pytest.mark.parametrize(
    ("name", "is_draft"),
    [
        ("model.layers.0.self_attn.attn", False),
        ("model.layers.31.self_attn.attn", False),
        ("language_model.model.layers.31.self_attn.attn", False),
        ("model.layers.32.self_attn.attn", True),  # an EAGLE head's
        ("model.layers.33.mtp_block.self_attn.attn", True),  # DeepSeek's second MTP layer
        ("mtp.layers.0.self_attn.attn", True),  # Qwen3-Next's
        ("draft_model.model.layers.3.self_attn.attn", True),
        ("model.embed", False),
    ],
)
def test_a_draft_models_layers_are_known_by_their_names(name: str, *, is_draft: bool) -> None:
    assert is_draft_layer(config("eagle"), name) == is_draft
    assert not is_draft_layer(config(None), name)
    assert not is_draft_layer(config("ngram"), name)


@pytest.mark.parametrize(
    ("method", "has_draft"), [(None, False), ("ngram", False), ("ngram_gpu", False), ("mtp", True)]
)
def test_prompt_lookup_has_no_model_with_kv_of_its_own(method: str | None, *, has_draft: bool) -> None:
    assert draft_of(config(method)) is (DRAFT if has_draft else None)
    assert models_of(config(method)) == [MODEL, DRAFT][: 1 + has_draft]

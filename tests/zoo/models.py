"""The tiny models of the support matrix: one for each way in which vLLM 0.32 keeps KV and runs on a CPU.

Four layers, a vocabulary of 1,024, float32, 8 query heads of 32 unless an architecture wants otherwise.
"""

from __future__ import annotations

from typing import Any, Final

from zoo.weights import VOCAB, Recipe

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GEMMA: Final[dict[str, Any]] = {
    **_SIZES,
    "sliding_window": 200,
    "query_pre_attn_scalar": 1,
    "tie_word_embeddings": True,
}
"""Sharp attention, small embeddings: the output shares their weights, and usual sizes repeat the last word."""
_HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


def llama(kv_heads: int) -> Recipe:
    """Grouped heads: 8 query heads over 8, 4, 2 or 1 KV heads."""
    return Recipe(f"llama-{kv_heads}kv", "LlamaConfig", {**_SIZES, **_HEADS, "num_key_value_heads": kv_heads})


LLAMA_6KV: Final = Recipe(
    "llama-6kv",
    "LlamaConfig",
    {
        **_SIZES,
        "vocab_size": 1152,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 32,
    },
)
"""Divides by 3: TP 3 against TP 2."""
LONG_ROPE: Final = Recipe(
    "llama-longrope",
    "LlamaConfig",
    {
        **_SIZES,
        **_HEADS,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 16,
            "long_factor": [float(2 + half) for half in range(16)],
        },
    },
)
"""Keys of engines that take requests of more than 1,024 tokens are others, also for short prompts."""
DRAFT: Final = Recipe("draft", "LlamaConfig", {**_SIZES, **_HEADS, "num_hidden_layers": 2, "num_key_value_heads": 2})
"""A draft model beside ``llama(4)``: other KV heads, other layers, the same words."""
EAGLE: Final = Recipe(
    "eagle",
    "LlamaConfig",
    {**_SIZES, **_HEADS, "num_hidden_layers": 1, "num_key_value_heads": 2},
    is_eagle_head=True,
)
"""A head that guesses beside ``llama(4)``."""
MIXTRAL: Final = Recipe(
    "mixtral",
    "MixtralConfig",
    {**_SIZES, **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
)
QWEN3_MOE: Final = Recipe(
    "qwen3-moe",
    "Qwen3MoeConfig",
    {**_SIZES, **_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
)
MISTRAL: Final = Recipe("mistral", "MistralConfig", {**_SIZES, **_HEADS, "sliding_window": 200})
"""Every layer has a window of 200 tokens: one group."""
GEMMA2: Final = Recipe(
    "gemma2",
    "Gemma2Config",
    {**_GEMMA, **_HEADS},
    embedding_std=0.02,
)
"""Windows on every second layer: two groups that share memory."""
GEMMA3: Final = Recipe(
    "gemma3",
    "Gemma3TextConfig",
    {
        **_GEMMA,
        **_HEADS,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    embedding_std=0.02,
)
"""Two layers of three have a window: three groups of two layers that share memory."""
GEMMA3_SPLIT: Final = Recipe(
    "gemma3-split",
    "Gemma3TextConfig",
    {
        **_GEMMA,
        **_HEADS,
        "num_hidden_layers": 6,
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 3,
    },
    embedding_std=0.02,
)
"""In two pipeline stages each lacks the layers of the other's KV group."""
GEMMA3N: Final = Recipe(
    "gemma3n",
    "Gemma3nTextConfig",
    {
        **_GEMMA,
        **_HEADS,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 1024,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    embedding_std=0.02,
)
"""The last two layers read the KV of the first two."""
DEEPSEEK: Final = Recipe(
    "deepseek",
    "DeepseekV3Config",
    {
        **_SIZES,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
    },
    weight_std=0.03,
    mtp_layers=1,
)
"""MLA (the CPU kernel knows latents of 512 + 64 only), experts, and one layer for multi-token prediction."""
QWEN3_NEXT: Final = Recipe(
    "qwen3-next",
    "Qwen3NextConfig",
    {
        **_SIZES,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "full_attention_interval": 4,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    mtp_layers=1,
)
"""Three layers of gated delta net, one of attention, and one for multi-token prediction.

Every token goes to all experts: at other TP sizes a rounding of bfloat16 would choose another expert, and so another
answer (seen with two of four: a choice by 0.75 was turned).
"""
MAMBA2: Final = Recipe(
    "mamba2",
    "Mamba2Config",
    {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_heads": 16,
        "head_dim": 32,
        "state_size": 64,
        "n_groups": 1,
        "expand": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
)
"""State only, no attention."""
QWEN2_VL: Final = Recipe(
    "qwen2-vl",
    "Qwen2VLConfig",
    {
        "text_config": {
            **_SIZES,
            "vocab_size": VOCAB,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "hidden_size": 256,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    special_words={
        "vision_start_token_id": "<|vision_start|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    image_processor={
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 400,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    },
)
"""Takes images: one token for each 28 x 28 pixels, at most 400 for an image. Words behind an image have positions that
depend on its height and width (M-RoPE)."""

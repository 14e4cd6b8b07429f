"""Layers of vLLM 0.23 without weights: what vllm-ascend's model runner asks of them to make their KV tensors.

They are vLLM's own classes, made without their ``__init__``, which would make kernels of the device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
from vllm_ascend.attention.mla_v1 import AscendMLABackend
from vllm_ascend.attention.sfa_v1 import AscendSFABackend

BF16: Final = torch.bfloat16
LORA, ROPE, INDEX = 512, 64, 128
"""Of DeepSeek V3 and V3.2: numbers in a token's latent, rotated part and indexer key."""


def attention(
    heads: int = 4, size: int = 64, size_v: int | None = None, window: int | None = None, dtype: torch.dtype = BF16
) -> Attention:
    """A layer with ``heads`` KV heads on this rank. ``dtype``: int8 where a checkpoint of C8 says so, on decode."""
    said = {
        "attn_type": AttentionType.DECODER, "attn_backend": AscendAttentionBackend, "kv_cache_dtype": "auto",
        "kv_cache_torch_dtype": dtype, "kv_sharing_target_layer_name": None, "num_kv_heads": heads, "head_size": size,
        "head_size_v": size_v or size, "sliding_window": window,
    }  # fmt: skip
    return _bare(Attention, said)


def latent() -> MLAAttention:
    """A layer of DeepSeek V2 and V3."""
    return _latent(AscendMLABackend, fa_quant_layer=False)


def sparse_latent(*, has_indexer: bool = True, sfa_c8: bool = False, li_c8: bool = False) -> MLAAttention:
    """A layer of DeepSeek V3.2; some of its successors have layers that use another's choice of tokens."""
    impl = {"has_indexer": has_indexer, "enable_sparse_sfa_c8": sfa_c8, "enable_sparse_li_c8": li_c8}
    return _latent(AscendSFABackend, **impl)


def _latent(backend: type, **impl: object) -> MLAAttention:
    said = {
        "attn_backend": backend, "kv_cache_dtype": "auto", "head_size": LORA + ROPE, "kv_lora_rank": LORA,
        "qk_rope_head_dim": ROPE, "num_kv_heads": 1, "impl": SimpleNamespace(**impl),
    }  # fmt: skip
    return _bare(MLAAttention, said)


class GatedDeltaNet(MambaBase):  # type: ignore[misc]  # vllm is not followed by mypy
    """A layer of Qwen3-Next at TP 1, with few heads: their state is as long as one block's keys of ``attention``."""

    mamba_type = MambaAttentionBackendEnum.GDN_ATTN

    def get_state_shape(self) -> Any:
        return MambaStateShapeCalculator.gated_delta_net_state_shape(1, 2, 4, 128, 128, 4)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (BF16, BF16)


def _bare(cls: Any, said: dict[str, object]) -> Any:
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    for name, value in said.items():
        object.__setattr__(layer, name, value)
    return layer

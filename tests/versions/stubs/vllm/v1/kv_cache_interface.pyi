from dataclasses import dataclass
from enum import Enum

import torch

@dataclass(frozen=True)
class KVCacheSpec:
    block_size: int

@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    num_head_slots: int | None
    num_kv_heads: int
    tokens_per_state: int
    @property
    def real_page_size_bytes(self) -> int: ...
    @property
    def state_content_size_bytes(self) -> int: ...

@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec): ...

@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    compress_ratio: int

@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    attention_chunk_size: int

@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec): ...

@dataclass(frozen=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    compress_ratio: int

@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    dtypes: tuple[torch.dtype, ...]
    mamba_cache_mode: str
    mamba_type: Enum
    shapes: tuple[tuple[int, ...], ...]
    @property
    def state_content_size_bytes(self) -> int: ...

@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    kv_cache_specs: dict[str, KVCacheSpec]

class KVCacheGroupSpec:
    kv_cache_spec: KVCacheSpec
    layer_names: list[str]

class KVCacheConfig:
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_cache_layout: str | None
    num_blocks: int
    @property
    def transfer_group_ids(self) -> tuple[int, ...]: ...

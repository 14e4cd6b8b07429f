from collections.abc import Mapping
from enum import Enum

import torch
from transformers import PretrainedConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

class CUDAGraphMode(Enum):
    FULL = ...
    def mixed_mode(self) -> CUDAGraphMode: ...

class KVTransferConfig:
    engine_id: str
    kv_connector_extra_config: dict[str, object]
    kv_load_failure_policy: str
    kv_role: str

class ParallelConfig:
    data_parallel_backend: str
    data_parallel_index: int
    decode_context_parallel_size: int
    distributed_executor_backend: object
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    tensor_parallel_size: int
    @property
    def use_ubatching(self) -> bool: ...

class MultiModalConfig:
    mm_processor_cache_gb: float

class ModelConfig:
    dtype: torch.dtype
    enable_sleep_mode: bool
    hf_text_config: PretrainedConfig
    max_model_len: int
    model: str
    multimodal_config: MultiModalConfig | None
    original_max_model_len: int
    override_generation_config: dict[str, object]
    quantization: str | None
    revision: str | None
    @property
    def is_attention_free(self) -> bool: ...
    @property
    def use_mla(self) -> bool: ...
    def get_and_verify_max_len(self, max_model_len: int) -> int: ...
    def get_total_num_hidden_layers(self) -> int: ...
    def get_total_num_kv_heads(self) -> int: ...
    def try_get_generation_config(self) -> dict[str, object]: ...

class CacheConfig:
    cache_dtype: str
    calculate_kv_scales: bool
    enable_prefix_caching: bool

class CompilationConfig:
    cudagraph_mode: CUDAGraphMode
    # Other layers too: whether it is one of these is asked by `hasattr`.
    static_forward_context: Mapping[str, AttentionLayerBase]

class SpeculativeConfig:
    draft_model_config: ModelConfig | None
    method: str

class LoRAConfig:
    enable_mixed_moe_lora_format: bool
    enable_tower_connector_lora: bool
    lora_dtype: object
    target_modules: list[str] | None

class DeviceConfig:
    device_type: str

class VllmConfig:
    additional_config: object
    cache_config: CacheConfig
    compilation_config: CompilationConfig
    device_config: DeviceConfig
    kv_transfer_config: KVTransferConfig
    lora_config: LoRAConfig | None
    model_config: ModelConfig
    parallel_config: ParallelConfig
    speculative_config: SpeculativeConfig | None
    @property
    def max_concurrent_batches(self) -> int: ...

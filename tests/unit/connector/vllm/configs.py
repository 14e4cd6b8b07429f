"""vLLM's configuration, as far as facts are read from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode

WHOLE = {
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "use_ubatching": False,
}
OWN_PROCESSES = {"distributed_executor_backend": "mp", "data_parallel_backend": "mp"}


def a_config(kv_role: str, settings: dict[str, object]) -> Any:
    """Of an engine whose graphs are whole."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=settings, kv_role=kv_role, engine_id="e", kv_load_failure_policy="fail"
        ),
        parallel_config=SimpleNamespace(
            **WHOLE,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
            **OWN_PROCESSES,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(is_attention_free=True, enable_sleep_mode=False, multimodal_config=None),
        speculative_config=None,
        additional_config={},
    )

"""Upstream's MooncakeConnector on a CPU, for ``ttft.py``: unchanged except for two calls that ask for an accelerator.

vLLM loads it through ``kv_connector_module_path``. Source of truth: vLLM 0.32 ``kv_connector/v1/mooncake/
mooncake_connector.py``: the worker asks for the current device and binds its sender threads to it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.platforms import current_platform


class MooncakeCpuConnector(MooncakeConnector):  # type: ignore[misc]  # vllm is not followed by mypy
    """Device 0 is the only one, and binding to it does nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        torch.accelerator.current_device_index = lambda: 0
        type(current_platform).set_device = classmethod(lambda _cls, _device: None)
        super().__init__(vllm_config, role, kv_cache_config)

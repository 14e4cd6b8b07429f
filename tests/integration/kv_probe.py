"""A vLLM worker extension that lets a test look at the KV cache's bytes. Loaded by ``--worker-extension-cls``."""

from __future__ import annotations

import base64
from typing import Any

import torch

PROBE_ARGS = ("--worker-extension-cls", "integration.kv_probe.KvProbe")
PROBE_ENV = {"VLLM_SERVER_DEV_MODE": "1"}


class KvProbe:
    """Methods join vLLM's worker class; arguments arrive as strings from ``/collective_rpc``."""

    model_runner: Any

    def kv_blocks(self, first: str) -> list[list[str]]:
        """Per layer, the float32 values of each used block from position ``first`` on, in base64."""
        tensors = self._kv_tensors()
        used = [block for block in range(tensors[0].shape[0]) if bool(tensors[0][block].any())]
        return [[_encoded(tensor[block]) for block in used[int(first) :]] for tensor in tensors]

    def _kv_tensors(self) -> list[torch.Tensor]:
        context = self.model_runner.compilation_config.static_forward_context
        tensors = {
            layer.kv_cache.data_ptr(): layer.kv_cache for layer in context.values() if hasattr(layer, "kv_cache")
        }
        return list(tensors.values())


def _encoded(block: torch.Tensor) -> str:
    """``block``: of one layer, in whatever order the engine keeps it; borrowed."""
    return base64.b64encode(block.float().numpy().tobytes()).decode()

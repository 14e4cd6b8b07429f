"""A vLLM worker extension that lets a test look at the KV cache's bytes. Loaded by ``--worker-extension-cls``."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

PROBE_ARGS = ("--worker-extension-cls", "integration.kv_probe.KvProbe")
PROBE_ENV = {"VLLM_SERVER_DEV_MODE": "1"}


class KvProbe:
    """Methods join vLLM's worker class; arguments arrive as strings from ``/collective_rpc``."""

    model_runner: Any

    def kv_used_blocks(self) -> list[int]:
        """Blocks of the first layer that hold anything but zeros, ascending."""
        tensor = self._kv_tensors()[0]
        return [block for block in range(tensor.shape[0]) if bool(tensor[block].any())]

    def kv_digests(self, first: str, stop: str, last_tokens: str) -> list[list[str]]:
        """Per layer, a digest of each used block from position ``first`` to ``stop``.

        The slots of the last block from ``last_tokens`` on count as zeros: decode writes its own there.
        """
        blocks = self.kv_used_blocks()[int(first) : int(stop) or None]
        return [
            [_digest(tensor[block], block == blocks[-1], int(last_tokens)) for block in blocks]
            for tensor in self._kv_tensors()
        ]

    def _kv_tensors(self) -> list[torch.Tensor]:
        context = self.model_runner.compilation_config.static_forward_context
        tensors = {
            layer.kv_cache.data_ptr(): layer.kv_cache for layer in context.values() if hasattr(layer, "kv_cache")
        }
        return list(tensors.values())


def _digest(block: torch.Tensor, is_last: bool, last_tokens: int) -> str:
    """``block``: [KV heads, tokens, K and V], CPU, borrowed."""
    kept = block.clone()
    if is_last:
        kept[:, last_tokens:] = 0
    return hashlib.blake2b(kept.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()

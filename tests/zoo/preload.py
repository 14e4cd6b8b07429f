"""Imported once by the tests' zygote, before any engine is forked: many workers of vLLM 0.32 share two cores.

What vLLM assumes, and what is changed here, for speed only:
- an architecture is looked at in a process of its own, which imports everything again (15 s, then cached in the home
  directory): here the classes are imported once and registered as they are;
- at TP > 1 the masking of words is compiled at each worker's first request, for 2..5 s: here it runs as it is written;
- every worker has a core to itself, so it spins: for a second after each message, and at every all-reduce. Fourteen
  workers on two cores then do nothing else. Here they wait: all-reduce goes through gloo, as between machines.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_MODELS: Final = "vllm.model_executor.models."
ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "DeepSeekMTPModel": "deepseek_mtp",
    "Mamba2ForCausalLM": "mamba2",
}
"""Class to module; the tiny models of ``models.py``."""
_BUSY_LOOP_S: Final = 0.001
"""Instead of one second: shorter than a time slice."""
_RECHECK_MS: Final = 5
"""A sleeping reader may miss its wake-up message and then looks again only after 5 s: most of a TP engine's time."""


def register_models() -> None:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    for architecture, module in ARCHITECTURES.items():
        name = "DeepSeekMTP" if architecture == "DeepSeekMTPModel" else architecture
        registry.register_model(architecture, getattr(importlib.import_module(_MODELS + module), name))


def wait_instead_of_spinning() -> None:
    broadcast: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    broadcast.SpinCondition.__init__.__defaults__ = (_BUSY_LOOP_S,)
    broadcast.SHM_READER_RECHECK_INTERVAL_MS = _RECHECK_MS
    communicator: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    share_memory = communicator.CpuCommunicator._all_group_ranks_share_shm_group_name

    def only_pipelines_share_memory(self: Any) -> bool:
        return "tp" not in self.unique_name and bool(share_memory(self))

    communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = only_pipelines_share_memory


def leave_masking_as_it_is() -> None:
    embedding: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    embedding.get_masked_input_and_mask = embedding.get_masked_input_and_mask._torchdynamo_orig_callable


register_models()
leave_masking_as_it_is()
wait_instead_of_spinning()

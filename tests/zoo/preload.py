"""Imported once by the tests' zygote, before any engine is forked: many workers of vLLM 0.32 share two cores.

What vLLM assumes, and what is changed here, for speed only:
- an architecture is looked at in a process of its own, which imports everything again (15 s, then cached in the home
  directory): here the classes are imported once and registered as they are;
- each worker looks through every name of every module for kernels that the CPU replaces (0.3 s): here it is done once,
  for the forks hold the same modules;
- each process of an engine configures logging, which touches every logger (0.1 s): here it finds it done;
- at TP > 1 the masking of words is compiled at each worker's first request, for 2..5 s, and so is the counting of ranks
  at the first log probability, for 1..2 s: here they run as they are written;
- every worker has a core to itself, so it spins: for a second after each message, and at every all-reduce. Fourteen
  workers on two cores then do nothing else. Here they wait: all-reduce goes through gloo, as between machines.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from pdcluster_cli.processes.zygote_process import import_if_there

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
    "EagleLlamaForCausalLM": "llama_eagle",
    "Mamba2ForCausalLM": "mamba2",
}
"""Class to module; the tiny models of ``models.py``."""
VISION: Final = {"Qwen2VLForConditionalGeneration": "qwen2_vl"}
"""Those that need torchvision, which the environments of other versions of vLLM lack (``make versions``)."""
MODULES: Final = (
    "model_hosting_container_standards.sagemaker",
    "transformers.integrations.mistral.tokenizer",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "pdcluster_connector.plugin",
    "pdcluster_connector.vllm.connector",
    "pdcluster_connector.transport.mooncake",
    "pdcluster_router.front.server",
)
"""What engines and routers import at their start beside what the zygote of ``pdcluster local`` has: half a second."""
_COMPILED: Final = {
    "vllm.model_executor.layers.vocab_parallel_embedding": "get_masked_input_and_mask",
    "vllm.v1.sample.sampler": "batched_count_greater_than",
}
"""Small functions that vLLM compiles at their first call, and where they are called from."""
_BUSY_LOOP_S: Final = 0.001
"""Instead of one second: shorter than a time slice."""
_RECHECK_MS: Final = 5
"""A sleeping reader may miss its wake-up message and then looks again only after 5 s: most of a TP engine's time."""


VERSION: Final = tuple(map(int, importlib.import_module("vllm").__version__.split(".")[:2]))


def register_models() -> None:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    vision = VISION if importlib.util.find_spec("torchvision") else {}
    for architecture, module in {**ARCHITECTURES, **vision}.items():
        name = "DeepSeekMTP" if architecture == "DeepSeekMTPModel" else architecture
        registry.register_model(architecture, getattr(importlib.import_module(_MODELS + module), name))


def wait_instead_of_spinning() -> None:
    broadcast: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    broadcast.SpinCondition.__init__.__defaults__ = (_BUSY_LOOP_S,)
    if hasattr(broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        broadcast.SHM_READER_RECHECK_INTERVAL_MS = _RECHECK_MS
    communicator: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    share_memory = communicator.CpuCommunicator._all_group_ranks_share_shm_group_name

    def only_pipelines_share_memory(self: Any) -> bool:
        return "tp" not in self.unique_name and bool(share_memory(self))

    communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = only_pipelines_share_memory


def leave_as_written() -> None:
    for name, function in _COMPILED.items():
        module: Any = importlib.import_module(name)
        compiled = getattr(module, function)
        setattr(module, function, getattr(compiled, "_torchdynamo_orig_callable", compiled))


def replace_kernels_once() -> None:
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def configure_logging_once() -> None:
    logger: Any = importlib.import_module("vllm.logger")
    logger.configure_logging(importlib.import_module("vllm.config.logging").LoggingConfig())
    for name in ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"):
        module: Any = importlib.import_module(name)
        module.configure_logging = getattr(logger, "configure_logging_if_needed", logger.configure_logging)


register_models()
for _module in MODULES:
    import_if_there(_module)
leave_as_written()
wait_instead_of_spinning()
if VERSION >= (0, 31):
    replace_kernels_once()
    configure_logging_once()

"""Imported first by a zygote whose engines run as CUDA's do: vLLM's V2 model runner, and one step ahead.

The V2 runner (vLLM 0.32 ``v1/worker/gpu/model_runner.py``; ``v1/worker/cpu/model_runner.py`` is the same class) keeps
block tables and positions in Triton kernels. Triton interprets them on a CPU (``TRITON_INTERPRET=1``) with the same
results, some hundred times slower. What is changed for that:

- vLLM takes Triton on a CPU only with a backend of that name, which PyPI's Triton lacks: here it finds one, which no
  interpreted kernel asks for anything;
- the CPU platform schedules each step after the one before it has ended, whatever is asked. Here asynchronous
  scheduling stays as vLLM chose it: on, unless something else forbids it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class InterpretingDriver:
    """As ``triton.backends.driver.DriverBase`` as far as vLLM asks."""

    @staticmethod
    def is_active() -> bool:
        return True


class InterpretingBackend:
    """As ``triton.backends.Backend``."""

    compiler = None
    driver = InterpretingDriver


def offer_a_cpu_backend() -> None:
    backends: Any = import_module("triton.backends")
    backends.backends.setdefault("cpu", InterpretingBackend)


def schedule_ahead() -> None:
    platform: Any = import_module("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config.__func__

    def keep_the_choice(cls: Any, vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen
        print(f"asynchronous scheduling: {chosen}", flush=True)

    platform.check_and_update_config = classmethod(keep_the_choice)


offer_a_cpu_backend()
schedule_ahead()

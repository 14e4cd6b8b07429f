"""Command line, environment and modules of one vLLM engine or of the router on this machine. Pure: starts nothing.

Source of truth: vLLM 0.32 (``entrypoints/launchers/api_server/entry.py``, ``platforms/cpu.py``); the connector's
settings are in ``connector/pdcluster_connector/settings.py``. vLLM is named, never imported.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from pdcluster_cli.processes.parallelism import ONE_RANK, ParallelSizes
from pdcluster_cli.processes.zygote import EngineSpec
from pdcluster_protocol import labels, launch
from pdcluster_protocol.launch import ConnectorSettings, TransferProtocol, router_flag
from pdcluster_protocol.secret import SECRET_VARIABLE

ENGINE_MODULE: Final = "vllm.entrypoints.openai.api_server"
ROUTER_MODULE: Final = "pdcluster_router"
LOOPBACK: Final = "127.0.0.1"


class PoolRole(Enum):
    """An engine's part in a pool. Logs and file names have the value; PREFILL and DECODE have the protocol's."""

    PREFILL = "prefill"
    DECODE = "decode"
    SINGLE = "single"


class LocalDevice(Enum):
    """The kind of device on which engines compute."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


VISIBLE: Final[Mapping[LocalDevice, str]] = {
    LocalDevice.CUDA: "CUDA_VISIBLE_DEVICES",
    LocalDevice.NPU: "ASCEND_RT_VISIBLE_DEVICES",
}
"""The variable that says which accelerators a process has."""


PRELOAD: Final[tuple[str, ...]] = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.launchers.render.entry",
    "vllm.renderers.hf",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)
"""Modules that an engine imports on the CPU, without ``ENGINE_MODULE`` itself, which must run as ``__main__``."""

_CPU_OVERRIDES: Final = {"vllm.envs.VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""vLLM's CPU platform sets this variable to ``spawn``, so that OpenMP threads can be bound to cores. But ``spawn``
imports everything again, 10 s for an engine, and several engines on few cores cannot bind threads anyway."""

CORE_TIMEOUT_VARIABLE: Final = "VLLM_ENGINE_READY_TIMEOUT_S"

SCRATCH: Final = ("VLLM_RPC_BASE_PATH",)
"""Variables with the folder of vLLM's sockets, which a killed engine leaves. Default: the system's temporary folder."""

CPU_ARGS: Final = ("--enforce-eager", "--kv-cache-memory-bytes", str(512 << 20))
"""A try-out does not need to compile, which takes 25 s. By default an engine's KV cache is a share of all memory."""

CPU_STAGE_ARGS: Final = ("--no-enforce-eager", "--compilation-config", '{"mode": 2, "backend": "eager"}')
"""For pipeline stages: without a compilation mode vLLM 0.32's CPU worker skips the warm-up, and then a later stage has
no buffer to receive into."""

_TRANSFER_PROTOCOL: Final = {
    LocalDevice.CPU: TransferProtocol.TCP,
    LocalDevice.CUDA: TransferProtocol.TCP,
    LocalDevice.NPU: TransferProtocol.ASCEND,
}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One vLLM engine to be started. ``connector`` adds to or replaces the connector's settings."""

    name: str
    role: PoolRole
    model: Path | str
    """The value of vLLM's ``--model``: a folder, or a model's name on a hub."""
    port: int
    log_path: Path
    device: LocalDevice = LocalDevice.CPU
    parallelism: ParallelSizes = ONE_RANK
    num_threads: int = 1
    """Compute threads of each rank, CPU only."""
    args: tuple[str, ...] = ()
    """Words at the end of vLLM's command line, so they win over ours."""
    trace_file: Path | None = None
    connector: Mapping[str, object] = field(default_factory=dict)
    load_failure_policy: str = "fail"
    kv_transfer: Mapping[str, object] = field(default_factory=dict)
    """Adds to or replaces keys of vLLM's ``KVTransferConfig`` itself, such as the connector's class."""
    env: Mapping[str, str | None] = field(default_factory=dict)


def preload_modules(device: LocalDevice) -> tuple[str, ...]:
    """The modules that the zygote imports once for all engines.

    Empty on an accelerator: when vLLM is imported it asks the driver for the devices, which leaves threads behind (two
    on an H200 with vLLM 0.26), and no fork is safe after that.
    """
    return PRELOAD if device is LocalDevice.CPU else ()


OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
"""For the tiny model, which needs no hub. A user's model, its tokenizer or its draft model may need one."""


def zygote_env(device: LocalDevice) -> dict[str, str | None]:
    """Variables to set before the first import, for the zygote and so for every engine, which it forks."""
    env: dict[str, str | None] = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_CPU_KVCACHE_SPACE": None,  # would override --kv-cache-memory-bytes
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # Mooncake refuses over 2,048 in flight otherwise
        "OPENBLAS_NUM_THREADS": "1",  # NumPy and SciPy start a thread for each further core at import: no fork is safe
        "PYTHONWARNINGS": "ignore",
    }
    if device is LocalDevice.CPU:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several engines share the cores
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or the CPU platform turns the executor "uni" into "mp"
        env["OMP_NUM_THREADS"] = "1"  # read by OpenMP at its first use, after the fork: engines set their own
    return env


def patience_env(environ: Mapping[str, str], start_timeout_s: float) -> dict[str, str]:
    """The variable by which vLLM waits for its engine cores as long as we wait for vLLM. The user's own value wins."""
    asked = environ.get(CORE_TIMEOUT_VARIABLE)
    return {CORE_TIMEOUT_VARIABLE: asked or str(math.ceil(start_timeout_s))}


def secret_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The cluster's secret for every process of one pool: the one that is set already, else a fresh one of 32 bytes.

    It is passed by environment, never on a command line, which every user of the machine can read.
    """
    return {SECRET_VARIABLE: environ.get(SECRET_VARIABLE) or secrets.token_hex(32)}


def engine_spec(plan: EnginePlan) -> EngineSpec:
    """How to start the process that runs the planned engine."""
    env: dict[str, str | None] = {"OMP_NUM_THREADS": str(plan.num_threads)} if plan.device is LocalDevice.CPU else {}
    return EngineSpec(
        name=plan.name,
        module=ENGINE_MODULE,
        argv=engine_argv(plan),
        env={**env, **plan.env},
        log_path=plan.log_path,
        overrides=_CPU_OVERRIDES if plan.device is LocalDevice.CPU else {},
    )


def engine_argv(plan: EnginePlan) -> tuple[str, ...]:
    """vLLM's command line, without the interpreter and the module."""
    argv = ["--model", str(plan.model), "--host", LOOPBACK, "--port", str(plan.port)]
    if plan.device is LocalDevice.CPU:
        argv += [*CPU_ARGS, *(CPU_STAGE_ARGS if plan.parallelism.pipeline > 1 else ())]
    argv += plan.parallelism.argv()
    if plan.role is not PoolRole.SINGLE:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer_config(plan))]
    return (*argv, *plan.args)


def kv_transfer_config(plan: EnginePlan) -> dict[str, object]:
    """vLLM's ``KVTransferConfig`` for the planned engine."""
    ours: ConnectorSettings = {"host": LOOPBACK, "transfer_protocol": _TRANSFER_PROTOCOL[plan.device].value}
    if plan.trace_file:
        ours["trace_file"] = str(plan.trace_file)
    role, settings = labels.Role(plan.role.value), {**ours, **plan.connector}
    return {**launch.kv_transfer_config(role, plan.name, settings, plan.load_failure_policy), **plan.kv_transfer}


def router_argv(
    *,
    prefill: list[str],
    decode: list[str],
    port: int,
    internal_port: int = 0,
    trace_file: Path | None,
    args: tuple[str, ...],
) -> tuple[str, ...]:
    """The router's command line, without the interpreter and the module. ``internal_port`` 0: any free one."""
    return (
        *(router_flag("--prefill", url) for url in prefill),
        *(router_flag("--decode", url) for url in decode),
        router_flag("--port", port),
        router_flag("--internal-port", internal_port),
        *([router_flag("--trace-file", trace_file)] if trace_file else []),
        *args,
    )

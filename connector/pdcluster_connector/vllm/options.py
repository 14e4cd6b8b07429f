"""Refuses the options with which an engine cannot take part in a hand-over. Each refusal names option and cure.

Source of truth: vLLM 0.32 ``config/``, ``v1/worker/gpu_model_runner.py``; ``versions.py`` says how others differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import CacheConfig, CUDAGraphMode, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.settings import PushTiming, Settings
from pdcluster_connector.vllm.ascend import require_plain_kv
from pdcluster_connector.vllm.media import require_named_media
from pdcluster_connector.vllm.versions import DEFERS_FREES, DEFERS_WINDOW_FREES, Minor, VllmRelease, said
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role


def require_startable(
    config: VllmConfig, role: Role, settings: Settings, groups: Sequence[KvGroup], release: VllmRelease
) -> None:
    """An engine of this role, with a model of these KV groups, may be started with these options on this vLLM.

    Raises:
        ConfigError: It may not. The message names the option, its value and the cure.
    """
    parallel = config.parallel_config
    _require_whole_steps(parallel)
    _require_own_processes(parallel)
    _require_awake(config.model_config)
    _require_fixed_scales(config.cache_config)
    require_plain_kv(config.additional_config)
    require_named_media(config)
    if role is Role.PREFILL and settings.push is PushTiming.LAYERWISE:
        _require_hooks(config.compilation_config.cudagraph_mode)
    if role is Role.DECODE and not release.defers_frees:
        _require_one_step_at_a_time(config.max_concurrent_batches, release, "blocks", DEFERS_FREES)
    if role is Role.DECODE and not release.defers_window_frees and any(group.is_windowed for group in groups):
        _require_one_step_at_a_time(
            config.max_concurrent_batches, release, "blocks before a window", DEFERS_WINDOW_FREES
        )
    if role is Role.PREFILL:
        _require_ends_of_steps(parallel.pipeline_parallel_size, config.speculative_config)


def _require_whole_steps(parallel: ParallelConfig) -> None:
    """Refuses options that spread a token's KV over ranks, or that split a step.

    Raises:
        ConfigError: Something spreads a prompt's tokens over ranks, or splits a step.
    """
    sizes = {
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    for option, size in sizes.items():
        if size != 1:
            raise ConfigError(f"{option} is {size}: PDClusterConnector 0.1 needs 1")
    if parallel.use_ubatching:
        raise ConfigError("--enable-dbo or --ubatch-size splits each step: PDClusterConnector 0.1 needs whole steps")


def _require_own_processes(parallel: ParallelConfig) -> None:
    """The engine and its workers are started by vLLM's own processes.

    Raises:
        ConfigError: Ray starts them. ``--data-parallel-backend`` is named first: it also gives an engine its executor,
            unless the engine has one of its own.
    """
    for option, backend, over_nodes in (
        (
            "--data-parallel-backend",
            parallel.data_parallel_backend,
            "--data-parallel-address, --data-parallel-size-local and --headless",
        ),
        (
            "--distributed-executor-backend",
            parallel.distributed_executor_backend,
            "--nnodes, --node-rank and --master-addr",
        ),
    ):
        if backend == "ray":
            raise ConfigError(
                f"{option} is ray, with which PDClusterConnector 0.1 was never run: start with {option} mp, over "
                f"several nodes with {over_nodes}"
            )


def _require_awake(model_config: ModelConfig) -> None:
    """KV stays where it is for the engine's life: other engines write into it.

    Raises:
        ConfigError: The engine may be put to sleep, which gives its memory back.
    """
    if model_config.enable_sleep_mode:
        raise ConfigError("--enable-sleep-mode unmaps the KV cache, into which other engines write: start without it")


def _require_fixed_scales(cache_config: CacheConfig) -> None:
    """Quantised KV has the same scales on all ranks of both engines: those of the checkpoint, or 1.

    Raises:
        ConfigError: Each rank takes its own from the heads and the tokens of its first step (vLLM 0.23 to 0.27,
            ``model_executor/layers/attention/attention.py``, ``calc_kv_scales``).
    """
    if getattr(cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            f"--calculate-kv-scales with --kv-cache-dtype {cache_config.cache_dtype}: each rank takes its scales from "
            "its own first tokens, and KV of one engine would mean something else on the other: start prefill and "
            "decode without --calculate-kv-scales"
        )


def _require_one_step_at_a_time(num_batches: int, release: VllmRelease, blocks: str, first: Minor) -> None:
    """Blocks that a step uses go to a request whose KV is pushed only after the step has ended.

    ``blocks``: which of them vLLM gives away earlier; ``first``: the oldest version that does not.

    Raises:
        ConfigError: ``num_batches`` steps are under way at once: the older one could write over pushed KV, or read it.
    """
    if num_batches > 1:
        raise ConfigError(
            f"vLLM {release.version} runs {num_batches} steps at once on this decode engine, and gives {blocks} away "
            "that the older one still uses: start decode with --no-async-scheduling and --pipeline-parallel-size 1, "
            f"or use vLLM {said(first)} or newer"
        )


def _require_ends_of_steps(num_stages: int, speculative: SpeculativeConfig | None) -> None:
    """Every worker hears when a step has ended.

    Raises:
        ConfigError: There are several stages and a draft model. vLLM 0.32's ``v1/worker/gpu_model_runner.py`` tells a
            worker of a step's end after the draft model has run, and only the last stage has that model. The layers of
            the other stages would never be whole.
    """
    if num_stages > 1 and speculative is not None:
        raise ConfigError(
            f"--speculative-config with --pipeline-parallel-size {num_stages}: stages before the last one never hear "
            "that a step has ended: start prefill with only one of these two options"
        )


def _require_hooks(cudagraph_mode: CUDAGraphMode) -> None:
    """Python runs between the layers of a prefill step.

    Raises:
        ConfigError: One graph replays the whole step: no layer would leave before all of them are done.
    """
    if cudagraph_mode.mixed_mode() is CUDAGraphMode.FULL:
        raise ConfigError(
            f"cudagraph_mode is {cudagraph_mode.name}, which replays a prefill step as one graph: start prefill with "
            '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\', or with push: serial'
        )

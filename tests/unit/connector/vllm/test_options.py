"""What an engine may not be started with is said at its start, with the option, its value and the cure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.settings import PushTiming, Settings
from pdcluster_connector.vllm.facts import read_engine_facts
from pdcluster_connector.vllm.options import (
    _require_awake,
    _require_ends_of_steps,
    _require_fixed_scales,
    _require_hooks,
    _require_one_step_at_a_time,
    _require_own_processes,
    _require_whole_steps,
    require_startable,
)
from pdcluster_connector.vllm.versions import DEFERS_FREES, release_of
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from unit.connector.vllm.configs import OWN_PROCESSES, WHOLE, a_config

OLD = release_of("0.23.0")
WINDOW, SERIAL = KvGroup(16, is_windowed=True), Settings(push=PushTiming.SERIAL)


def whole_steps(**changed: object) -> SimpleNamespace:
    return SimpleNamespace(**{**WHOLE, **changed})


def processes(**changed: str) -> SimpleNamespace:
    return SimpleNamespace(**{**OWN_PROCESSES, **changed})


@pytest.mark.parametrize(
    ("require", "accepted", "refused", "told"),
    [
        (_require_whole_steps, [whole_steps()], [whole_steps(use_ubatching=True)], "--enable-dbo"),
        (
            _require_whole_steps,
            [whole_steps()],
            [whole_steps(decode_context_parallel_size=2)],
            "--decode-context-parallel-size is 2.*needs 1",
        ),
        (
            _require_whole_steps,
            [whole_steps()],
            [whole_steps(prefill_context_parallel_size=2)],
            "--prefill-context-parallel-size is 2.*needs 1",
        ),
        (
            _require_awake,
            [SimpleNamespace(enable_sleep_mode=False)],
            [SimpleNamespace(enable_sleep_mode=True)],
            "--enable-sleep-mode",
        ),
        (
            _require_fixed_scales,
            [SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=False)],
            [SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True)],
            "--calculate-kv-scales with --kv-cache-dtype fp8.*start prefill and decode without",
        ),
        (
            _require_fixed_scales,
            [SimpleNamespace(cache_dtype="fp8")],
            [SimpleNamespace(cache_dtype="auto", calculate_kv_scales=True)],
            "--calculate-kv-scales with --kv-cache-dtype auto",
        ),
        (
            _require_one_step_at_a_time,
            [1, OLD, "blocks", DEFERS_FREES],
            [2, OLD, "blocks", DEFERS_FREES],
            "runs 2 steps at once.*--no-async-scheduling",
        ),
        (
            _require_ends_of_steps,
            [1, object()],
            [2, object()],
            "--speculative-config with --pipeline-parallel-size 2.*only one of these two",
        ),
        (_require_ends_of_steps, [2, None], [2, object()], "only one of these two"),
        (
            _require_hooks,
            [CUDAGraphMode.PIECEWISE],
            [CUDAGraphMode.FULL],
            "cudagraph_mode is FULL.*FULL_AND_PIECEWISE.*push: serial",
        ),
        (
            _require_own_processes,
            [processes()],
            [processes(distributed_executor_backend="ray")],
            "--distributed-executor-backend is ray.*start with --distributed-executor-backend mp.*--nnodes",
        ),
        (
            _require_own_processes,
            [processes()],
            [processes(data_parallel_backend="ray")],
            "--data-parallel-backend is ray.*start with --data-parallel-backend mp.*--data-parallel-address",
        ),
        (
            _require_own_processes,
            [processes()],
            [processes(data_parallel_backend="ray", distributed_executor_backend="ray")],
            "^--data-parallel-backend is ray",
        ),
    ],
)
def test_what_an_engine_may_not_be_is_refused_by_the_name_of_its_option(
    require: Callable[..., object], accepted: list[object], refused: list[object], told: str
) -> None:
    require(*accepted)
    with pytest.raises(ConfigError, match=told):
        require(*refused)


@pytest.mark.parametrize("mode", [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.FULL])
def test_graphs_that_leave_prefill_steps_to_python_are_accepted(mode: CUDAGraphMode) -> None:
    _require_hooks(mode)


@pytest.mark.parametrize(
    ("kv_role", "push", "is_refused"),
    [("kv_producer", "layerwise", True), ("kv_producer", "serial", False), ("kv_consumer", "layerwise", False)],
)
def test_only_an_engine_that_pushes_layer_by_layer_is_refused_whole_graphs(
    kv_role: str, push: str, *, is_refused: bool
) -> None:
    config = a_config(kv_role, {"push": push, "host": "127.0.0.1"})
    with pytest.raises(ConfigError, match="cudagraph_mode is FULL") if is_refused else nullcontext():
        read_engine_facts(config, SimpleNamespace(kv_cache_groups=[]))


@pytest.mark.parametrize("option", OWN_PROCESSES)
@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
def test_no_engine_starts_with_ray(kv_role: str, option: str) -> None:
    config = a_config(kv_role, {"host": "127.0.0.1", "push": "serial"})
    setattr(config.parallel_config, option, "ray")
    with pytest.raises(ConfigError, match=f"^--{option.replace('_', '-')} is ray"):
        read_engine_facts(config, SimpleNamespace(kv_cache_groups=[]))


@pytest.mark.parametrize(
    ("version", "role", "group", "num_batches", "is_refused"),
    [
        pytest.param("0.24.0", Role.DECODE, WINDOW, 2, True, id="0.24"),
        pytest.param("0.25.1", Role.DECODE, WINDOW, 2, True, id="0.25"),
        pytest.param("0.26.0", Role.DECODE, WINDOW, 2, False, id="0.26 keeps them until the step has ended"),
        pytest.param("0.25.1", Role.DECODE, WINDOW, 1, False, id="one step at a time"),
        pytest.param("0.25.1", Role.DECODE, KvGroup(16), 2, False, id="no window"),
        pytest.param("0.25.1", Role.PREFILL, WINDOW, 2, False, id="nothing is pushed into prefill"),
    ],
)
def test_blocks_before_a_window_go_to_no_push_while_a_step_uses_them(
    version: str, role: Role, group: KvGroup, num_batches: int, *, is_refused: bool
) -> None:
    config = a_config("", {})
    config.max_concurrent_batches = num_batches
    told = f"vLLM {version} runs 2 steps at once.*before a window.*--no-async-scheduling.*vLLM 0.26 or newer"
    with pytest.raises(ConfigError, match=told) if is_refused else nullcontext():
        require_startable(config, role, SERIAL, [group], release_of(version))


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
def test_no_engine_starts_that_works_out_scales_of_its_kv_by_itself(kv_role: str) -> None:
    config = a_config(kv_role, {"host": "127.0.0.1", "push": "serial"})
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match=r"^--calculate-kv-scales with --kv-cache-dtype auto"):
        read_engine_facts(config, SimpleNamespace(kv_cache_groups=[]))

"""The command line and environment of one engine, without starting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdcluster_cli.processes.engines import (
    ENGINE_MODULE,
    OFFLINE,
    PRELOAD,
    EnginePlan,
    LocalDevice,
    PoolRole,
    engine_argv,
    engine_spec,
    kv_transfer_config,
    patience_env,
    preload_modules,
    router_argv,
    secret_env,
    zygote_env,
)
from pdcluster_cli.processes.parallelism import ParallelSizes, take_parallelism
from pdcluster_cli.processes.zygote import MAX_MESSAGE_BYTES, decode_spec, encode_spec
from pdcluster_protocol.secret import SECRET_VARIABLE, load_secret


def plan(role: PoolRole = PoolRole.PREFILL, **settings: Any) -> EnginePlan:
    return EnginePlan("prefill-0", role, Path("/models/m"), 8100, Path("/logs/p.log"), **settings)


def value_of(argv: tuple[str, ...], option: str) -> str:
    assert argv.count(option) == 1
    return argv[argv.index(option) + 1]


def test_an_engine_listens_on_loopback_only() -> None:
    argv = engine_argv(plan())
    assert argv[:6] == ("--model", "/models/m", "--host", "127.0.0.1", "--port", "8100")


@pytest.mark.parametrize(("role", "kv_role"), [(PoolRole.PREFILL, "kv_producer"), (PoolRole.DECODE, "kv_consumer")])
def test_the_role_becomes_vllms_role(role: PoolRole, kv_role: str) -> None:
    config = json.loads(value_of(engine_argv(plan(role)), "--kv-transfer-config"))
    assert config == {
        "kv_connector": "PDClusterConnector",
        "kv_role": kv_role,
        "engine_id": "prefill-0",
        "kv_connector_extra_config": {"host": "127.0.0.1", "transfer_protocol": "tcp"},
        "kv_load_failure_policy": "fail",
    }


def test_a_single_engine_has_no_connector() -> None:
    assert "--kv-transfer-config" not in engine_argv(plan(PoolRole.SINGLE))


def test_the_users_arguments_come_last_so_that_they_win() -> None:
    assert engine_argv(plan(args=("--port", "9", "--enforce-eager")))[-3:] == ("--port", "9", "--enforce-eager")


def test_the_plans_settings_replace_ours() -> None:
    config = kv_transfer_config(
        plan(
            trace_file=Path("/logs/p.trace"),
            connector={"push": "serial", "host": "10.0.0.1"},
            load_failure_policy="recompute",
            kv_transfer={"kv_connector": "Broken"},
        )
    )
    assert config["kv_connector"] == "Broken"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {
        "host": "10.0.0.1",
        "transfer_protocol": "tcp",
        "trace_file": "/logs/p.trace",
        "push": "serial",
    }


@pytest.mark.parametrize(
    ("device", "protocol"), [(LocalDevice.CPU, "tcp"), (LocalDevice.CUDA, "tcp"), (LocalDevice.NPU, "ascend")]
)
def test_the_device_chooses_the_transfer_protocol(device: LocalDevice, protocol: str) -> None:
    config = json.loads(value_of(engine_argv(plan(device=device)), "--kv-transfer-config"))
    assert config["kv_connector_extra_config"]["transfer_protocol"] == protocol


@pytest.mark.parametrize("parallelism", [ParallelSizes(), ParallelSizes(tensor=2), ParallelSizes(2, 2, 2)])
def test_no_executor_is_ours_for_vllms_own_choice_fits_the_number_of_ranks(parallelism: ParallelSizes) -> None:
    argv = engine_argv(plan(parallelism=parallelism))
    assert not [word for word in argv if "executor" in word]
    assert take_parallelism(argv)[0] == parallelism


def test_pipeline_stages_on_a_cpu_are_compiled_by_name() -> None:
    argv = engine_argv(plan(parallelism=ParallelSizes(pipeline=2), args=("--mine",)))
    assert argv.index("--enforce-eager") < argv.index("--no-enforce-eager") < argv.index("--mine")
    assert "--compilation-config" not in engine_argv(
        plan(parallelism=ParallelSizes(pipeline=2), device=LocalDevice.CUDA)
    )


def test_cpu_engines_get_their_own_number_of_threads() -> None:
    assert zygote_env(LocalDevice.CPU)["OMP_NUM_THREADS"] == "1"
    assert engine_spec(plan(num_threads=3)).env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("device", [LocalDevice.CUDA, LocalDevice.NPU])
def test_what_only_the_cpu_needs_stays_away_from_accelerators(device: LocalDevice) -> None:
    spec = engine_spec(plan(device=device, num_threads=3))
    assert not spec.overrides
    assert not [name for name in spec.env if name.startswith(("OMP_", "VLLM_CPU_OMP", "VLLM_ENABLE_V1"))]
    assert preload_modules(device) == (), "vLLM's import asks the driver for devices, which leaves threads behind"


def test_every_engine_is_silent_towards_vllms_makers_and_asks_a_hub_only_for_a_users_model() -> None:
    for device in LocalDevice:
        env = zygote_env(device)
        assert ("HF_HUB_OFFLINE" in env, env["VLLM_NO_USAGE_STATS"]) == (False, "1")
    assert OFFLINE == {"HF_HUB_OFFLINE": "1"}


def test_vllm_waits_for_its_cores_as_long_as_the_start_may_take() -> None:
    assert patience_env({}, 90.5) == {"VLLM_ENGINE_READY_TIMEOUT_S": "91"}
    assert patience_env({"VLLM_ENGINE_READY_TIMEOUT_S": "7"}, 90.5) == {"VLLM_ENGINE_READY_TIMEOUT_S": "7"}


def test_the_plans_environment_wins_and_none_unsets() -> None:
    env = engine_spec(plan(env={"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": None})).env
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("8", None)


def test_the_module_that_runs_is_not_imported_before() -> None:
    assert engine_spec(plan()).module == ENGINE_MODULE
    assert all(ENGINE_MODULE not in preload_modules(device) for device in LocalDevice)
    assert preload_modules(LocalDevice.CPU) == PRELOAD


def test_a_spec_fits_into_one_message_to_the_zygote() -> None:
    spec = engine_spec(plan(args=tuple(f"--option-{number}=value" for number in range(1000))))
    wire = encode_spec(spec)
    assert len(wire) < MAX_MESSAGE_BYTES
    assert decode_spec(wire) == spec


def test_the_router_is_told_of_every_engine_by_role() -> None:
    argv = router_argv(
        prefill=["http://p:1", "http://p:2"],
        decode=["http://d:3"],
        port=8000,
        internal_port=8001,
        trace_file=Path("/t"),
        args=("--x", "y"),
    )
    assert argv == (
        *("--prefill=http://p:1", "--prefill=http://p:2", "--decode=http://d:3"),
        *("--port=8000", "--internal-port=8001", "--trace-file=/t", "--x", "y"),
    )
    without = router_argv(prefill=["p"], decode=["d"], port=1, trace_file=None, args=())
    assert not [word for word in without if word.startswith("--trace-file")]


def test_each_pool_has_a_fresh_secret_of_its_own() -> None:
    first, second = secret_env({}), secret_env({SECRET_VARIABLE: ""})
    assert first != second
    for env in (first, second):
        assert load_secret(env, host="0.0.0.0")  # Long enough for a network.


def test_a_secret_that_is_set_already_is_kept() -> None:
    environ = {SECRET_VARIABLE: "one that the user chose"}
    assert secret_env(environ) == environ

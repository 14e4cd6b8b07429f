"""What the options of ``pdcluster local`` mean for each engine on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_cli.local.options import Options, parse_options
from pdcluster_cli.local.plan import (
    TINY_MODEL_ARGS,
    Machine,
    device_env,
    engine_args,
    plan_engines,
    problems_here,
    remarks,
    split_problems,
)
from pdcluster_cli.processes.engines import EnginePlan, LocalDevice, PoolRole
from pdcluster_cli.processes.parallelism import ParallelSizes

CPU = Machine(LocalDevice.CPU, num_cores=8)


def machine_with(device: LocalDevice, num_accelerators: int) -> Machine:
    return Machine(device, 8, tuple(map(str, range(num_accelerators))))


SHARED = ("--gpu-memory-utilization", "0.4")


def parse(*words: str) -> Options:
    return parse_options(words)


def plans(options: Options, machine: Machine = CPU) -> list[EnginePlan]:
    ports = range(9000, 9000 + options.num_engines)
    return plan_engines(options, machine, model="/m", folder=Path("/logs"), ports=ports)


def test_prefill_engines_come_first_each_with_its_own_port_log_and_trace() -> None:
    planned = plans(parse("--prefill", "2", "--decode", "1"))
    assert [(plan.name, plan.role, plan.port) for plan in planned] == [
        ("prefill-0", PoolRole.PREFILL, 9000),
        ("prefill-1", PoolRole.PREFILL, 9001),
        ("decode-0", PoolRole.DECODE, 9002),
    ]
    assert [plan.log_path for plan in planned] == [Path(f"/logs/{plan.name}.log") for plan in planned]
    assert [plan.trace_file for plan in planned] == [Path(f"/logs/{plan.name}.trace") for plan in planned]


@pytest.mark.parametrize(("num_cores", "num_threads"), [(8, 4), (3, 1), (1, 1)])
def test_engines_share_the_cores_and_each_has_one(num_cores: int, num_threads: int) -> None:
    machine = Machine(LocalDevice.CPU, num_cores)
    assert [plan.num_threads for plan in plans(parse(), machine)] == [num_threads, num_threads]


def test_the_users_arguments_follow_ours() -> None:
    options = parse("--prefill-args", "--of-prefill", "--decode-args", "--of-decode")
    assert engine_args(options, PoolRole.PREFILL, CPU) == (*TINY_MODEL_ARGS, "--of-prefill")
    assert engine_args(options, PoolRole.DECODE, CPU) == (*TINY_MODEL_ARGS, "--of-decode")


def test_ones_own_model_is_served_as_it_is() -> None:
    assert engine_args(parse("--model", "/m"), PoolRole.PREFILL, CPU) == ()


@pytest.mark.parametrize(("count", "expected"), [(1, SHARED), (2, ()), (8, ())])
def test_memory_is_shared_only_when_accelerators_are_too_few(count: int, expected: tuple[str, ...]) -> None:
    machine = machine_with(LocalDevice.CUDA, count)
    assert engine_args(parse("--model", "/m"), PoolRole.DECODE, machine) == expected


def test_more_engines_on_one_accelerator_get_less_of_it_each() -> None:
    options = parse("--model", "/m", "--prefill", "2", "--decode-tp", "2")
    assert engine_args(options, PoolRole.DECODE, machine_with(LocalDevice.CUDA, 2)) == SHARED
    assert engine_args(options, PoolRole.DECODE, machine_with(LocalDevice.CUDA, 1)) == (
        "--gpu-memory-utilization",
        "0.2",
    )


def test_each_rank_gets_an_accelerator_round_robin() -> None:
    planned = plans(parse("--prefill", "2", "--decode", "1"), machine_with(LocalDevice.CUDA, 2))
    assert [plan.env for plan in planned] == [{"CUDA_VISIBLE_DEVICES": number} for number in "010"]
    planned = plans(parse("--prefill-tp", "2", "--decode", "2"), machine_with(LocalDevice.NPU, 4))
    assert [plan.env for plan in planned] == [{"ASCEND_RT_VISIBLE_DEVICES": dealt} for dealt in ("0,1", "2", "3")]


def test_an_engine_of_more_ranks_than_accelerators_is_refused_in_one_line() -> None:
    options = parse("--prefill-tp", "2", "--prefill-pp", "2")
    assert problems_here(options, machine_with(LocalDevice.CUDA, 3)) == [
        "a prefill engine of 4 ranks needs 4 accelerators, this machine has 3 accelerators: split it less"
    ]
    assert problems_here(options, machine_with(LocalDevice.CUDA, 4)) == []


@pytest.mark.parametrize("machine", [CPU, machine_with(LocalDevice.CUDA, 0)])
def test_without_accelerators_nothing_is_hidden(machine: Machine) -> None:
    assert device_env(parse(), machine, PoolRole.PREFILL, 0) == {}


def test_sizes_reach_the_engines_of_their_role_and_ranks_share_the_cores() -> None:
    planned = plans(parse("--prefill-tp", "2", "--prefill-pp", "2", "--decode", "2"))
    assert [plan.parallelism for plan in planned] == [ParallelSizes(2, 2), ParallelSizes(), ParallelSizes()]
    assert {plan.num_threads for plan in planned} == {8 // 6}


def test_kv_caches_that_do_not_fit_are_refused_with_both_values() -> None:
    machine = Machine(LocalDevice.CPU, 2, free_bytes=2 << 30)
    assert problems_here(parse("--prefill-tp", "2", "--decode-tp", "2"), machine) == []
    (problem,) = problems_here(
        parse("--prefill-tp", "2", "--decode-args", "--kv-cache-memory-bytes 2147483648"), machine
    )
    assert problem == (
        "KV caches of 3 ranks need 3.0 GiB, and 2.0 GiB of memory are free: give --kv-cache-memory-bytes less "
        "(--prefill-args, --decode-args), or start fewer engines"
    )
    unknown = ["--prefill-args", "--kv-cache-memory-bytes=99G", "--decode-args", "--kv-cache-memory-bytes=99G"]
    assert problems_here(parse(*unknown), machine) == []  # vLLM knows its own units.


def test_more_ranks_than_cores_are_a_remark_and_no_refusal() -> None:
    assert remarks(parse("--prefill-tp", "2"), Machine(LocalDevice.CPU, 2)) == [
        "3 ranks share 2 cores: everything takes longer"
    ]
    assert remarks(parse(), Machine(LocalDevice.CPU, 2)) == []


QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("words", "config", "told"),
    [
        (["--prefill-tp", "3"], QWEN, ["prefill TP 3 cannot split the model's 28 attention heads and 4 KV heads: give "
                                       "--prefill-tp one of 1, 2, 4, 28"]),
        (["--decode-args", "-tp 7"], QWEN, ["decode TP 7 cannot split the model's 28 attention heads and 4 KV heads: "
                                            "give --decode-tp one of 1, 2, 4, 28"]),
        (["--prefill-tp", "8"], {"text_config": {"num_attention_heads": 4}, "num_attention_heads": 16},
         ["prefill TP 8 cannot split the model's 4 attention heads: give --prefill-tp one of 1, 2, 4"]),
        (["--prefill-tp", "3", "--decode-tp", "5"], {"num_attention_heads": 1},
         ["prefill TP 3 cannot split the model's 1 attention head: give --prefill-tp one of 1",
          "decode TP 5 cannot split the model's 1 attention head: give --decode-tp one of 1"]),
    ],
)  # fmt: skip
def test_a_tp_size_that_the_heads_cannot_be_split_by_is_refused_with_those_that_can(
    words: list[str], config: dict[str, object], told: list[str]
) -> None:
    assert split_problems(parse(*words), config) == told


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["--prefill-tp", "4", "--decode-tp", "28"], QWEN),
        (["--prefill-pp", "3", "--decode-dp", "3"], QWEN),
        (["--prefill-tp", "7"], {**QWEN, "kv_lora_rank": 512}),  # a latent, which each rank has whole
        (["--prefill-tp", "3"], {}),
        (["--prefill-tp", "3"], {"num_attention_heads": None, "num_key_value_heads": [4, 2]}),
        (["--prefill-tp", "3"], {"text_config": {}, "num_attention_heads": 8}),
        (["--prefill-tp", "3", "--prefill-args", "--hf_overrides.num_attention_heads=6"], QWEN),
        (["--decode-tp", "3", "--decode-args", "--revision old"], QWEN),
    ],
)
def test_where_the_configuration_does_not_say_otherwise_vllm_judges_the_tp_size(
    words: list[str], config: dict[str, object]
) -> None:
    assert split_problems(parse(*words), config) == []

"""The options of ``pdcluster local``, and the engines that follow from them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pdcluster_cli.engines import Device, EnginePlan, Role
from pdcluster_cli.local.options import (
    CPU_ARGS,
    SHARED_ACCELERATOR_ARGS,
    TINY_MODEL_ARGS,
    Machine,
    Options,
    add_arguments,
    device_env,
    engine_args,
    join_args,
    parse_options,
    plan_engines,
)

CPU = Machine(Device.CPU, num_cores=8, num_accelerators=0)


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parse_options(parser.parse_args(join_args(words)))


def plans(options: Options, machine: Machine = CPU) -> list[EnginePlan]:
    ports = range(9000, 9000 + options.prefill + options.decode)
    return plan_engines(options, machine, model=Path("/m"), folder=Path("/logs"), ports=ports)


def test_without_options_it_is_one_engine_of_each_role_and_the_tiny_model() -> None:
    assert parse() == Options(
        model=None,
        prefill=1,
        decode=1,
        port=8000,
        prefill_args=(),
        decode_args=(),
        device=None,
        is_once=False,
        question=None,
    )


def test_every_option_arrives() -> None:
    words = ["--model", "/m", "--prefill", "2", "--decode", "3", "--port", "9", "--device", "npu"]
    options = parse(*words, "--prefill-args", "--a 'b c'", "--decode-args", "--x", "--once", "Why?")
    assert options == Options(
        model=Path("/m"),
        prefill=2,
        decode=3,
        port=9,
        prefill_args=("--a", "b c"),
        decode_args=("--x",),
        device=Device.NPU,
        is_once=True,
        question="Why?",
    )


def test_once_alone_asks_the_built_in_question() -> None:
    options = parse("--once")
    assert (options.is_once, options.question) == (True, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefill", "0"], "0 engines: use 1 to 64"),
        (["--decode", "65"], "65 engines: use 1 to 64"),
        (["--port", "0"], "port 0: use 1 to 65535"),
        (["--port", "65536"], "port 65536: use 1 to 65535"),
        (["--prefill-args", "--a 'b"], "No closing quotation: check the quotes"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--decode", "many"], "invalid"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert words[0] in last
    assert message in last


def test_only_the_word_after_engine_arguments_is_joined() -> None:
    assert join_args(["--prefill-args", "--x", "--once", "--decode-args=--y"]) == [
        "--prefill-args=--x",
        "--once",
        "--decode-args=--y",
    ]
    assert join_args(["--decode-args"]) == ["--decode-args"]


def test_prefill_engines_come_first_each_with_its_own_port_log_and_trace() -> None:
    planned = plans(parse("--prefill", "2", "--decode", "1"))
    assert [(plan.name, plan.role, plan.port) for plan in planned] == [
        ("prefill-0", Role.PREFILL, 9000),
        ("prefill-1", Role.PREFILL, 9001),
        ("decode-0", Role.DECODE, 9002),
    ]
    assert [plan.log_path for plan in planned] == [Path(f"/logs/{plan.name}.log") for plan in planned]
    assert [plan.trace_file for plan in planned] == [Path(f"/logs/{plan.name}.trace") for plan in planned]


@pytest.mark.parametrize(("num_cores", "num_threads"), [(8, 4), (3, 1), (1, 1)])
def test_engines_share_the_cores_and_each_has_one(num_cores: int, num_threads: int) -> None:
    machine = Machine(Device.CPU, num_cores, 0)
    assert [plan.num_threads for plan in plans(parse(), machine)] == [num_threads, num_threads]


def test_the_users_arguments_follow_ours() -> None:
    options = parse("--prefill-args", "--p", "--decode-args", "--d")
    assert engine_args(options, Role.PREFILL, CPU) == (*CPU_ARGS, *TINY_MODEL_ARGS, "--p")
    assert engine_args(options, Role.DECODE, CPU) == (*CPU_ARGS, *TINY_MODEL_ARGS, "--d")


def test_ones_own_model_is_served_as_it_is() -> None:
    assert engine_args(parse("--model", "/m"), Role.PREFILL, CPU) == CPU_ARGS


@pytest.mark.parametrize(("count", "expected"), [(1, SHARED_ACCELERATOR_ARGS), (2, ()), (8, ())])
def test_memory_is_shared_only_when_accelerators_are_too_few(count: int, expected: tuple[str, ...]) -> None:
    machine = Machine(Device.CUDA, 8, count)
    assert engine_args(parse("--model", "/m"), Role.DECODE, machine) == expected


def test_accelerators_are_dealt_round_robin() -> None:
    planned = plans(parse("--prefill", "2", "--decode", "1"), Machine(Device.CUDA, 8, 2))
    assert [plan.env for plan in planned] == [{"CUDA_VISIBLE_DEVICES": number} for number in "010"]
    assert device_env(Machine(Device.NPU, 8, 4), 3, 4) == {"ASCEND_RT_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize("machine", [CPU, Machine(Device.CUDA, 8, 0)])
def test_without_accelerators_nothing_is_hidden(machine: Machine) -> None:
    assert device_env(machine, 0, 2) == {}


def test_one_engine_sees_every_accelerator() -> None:
    assert device_env(Machine(Device.CUDA, 8, 4), 0, 1) == {}

"""The options of ``pdcluster local``, and what they mean for each engine. Pure but for argparse's own error exit."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdcluster_cli.engines import Device, EnginePlan, Role

SHARED_ACCELERATOR_ARGS: Final = ("--gpu-memory-utilization", "0.4")
"""Two engines on one accelerator must leave room for each other."""

CPU_ARGS: Final = ("--enforce-eager", "--kv-cache-memory-bytes", str(512 << 20))
"""Compiling takes 25 s that a try-out does not need. vLLM's default KV cache is a share of all memory, per engine."""

TINY_MODEL_ARGS: Final = ("--dtype", "float32", "--max-model-len", "8192")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked. ``question`` None: the built-in one."""

    model: Path | None
    prefill: int
    decode: int
    port: int
    prefill_args: tuple[str, ...]
    decode_args: tuple[str, ...]
    device: Device | None
    is_once: bool
    question: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="PATH", help="model folder (default: a tiny model, made once)")
    parser.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill engines (default: 1)")
    parser.add_argument("--decode", type=_count, default=1, metavar="N", help="decode engines (default: 1)")
    parser.add_argument("--port", type=_port, default=8000, help="port of the OpenAI endpoint (default: 8000)")
    vllm = "more arguments for vLLM, in one string"
    parser.add_argument("--prefill-args", type=_words, default=(), metavar="ARGS", help=f"prefill engines: {vllm}")
    parser.add_argument("--decode-args", type=_words, default=(), metavar="ARGS", help=f"decode engines: {vllm}")
    devices = ["auto", *(device.value for device in Device)]
    parser.add_argument("--device", choices=devices, default="auto", help="where engines compute (default: auto)")
    parser.add_argument(
        "--once", nargs="?", const="", metavar="PROMPT", help="ask one question, print the answer, and end"
    )


def parse_options(arguments: argparse.Namespace) -> Options:
    """The checked options."""
    return Options(
        model=arguments.model,
        prefill=arguments.prefill,
        decode=arguments.decode,
        port=arguments.port,
        prefill_args=tuple(arguments.prefill_args),
        decode_args=tuple(arguments.decode_args),
        device=None if arguments.device == "auto" else Device(arguments.device),
        is_once=arguments.once is not None,
        question=arguments.once or None,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engines may use. ``num_accelerators`` is 0 on the CPU."""

    device: Device
    num_cores: int
    num_accelerators: int


def join_args(words: Sequence[str]) -> list[str]:
    """``--prefill-args --x`` as ``--prefill-args=--x``: argparse takes a lone ``--x`` for an option of its own."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--prefill-args", "--decode-args"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def plan_engines(
    options: Options, machine: Machine, *, model: Path, folder: Path, ports: Sequence[int]
) -> list[EnginePlan]:
    """One plan for each engine, prefill engines first, on ``ports`` in this order."""
    roles = [Role.PREFILL] * options.prefill + [Role.DECODE] * options.decode
    names = [f"{Role.PREFILL.value}-{number}" for number in range(options.prefill)]
    names += [f"{Role.DECODE.value}-{number}" for number in range(options.decode)]
    return [
        EnginePlan(
            name=name,
            role=role,
            model=model,
            port=port,
            log_path=folder / f"{name}.log",
            device=machine.device,
            num_threads=max(1, machine.num_cores // len(roles)),
            args=engine_args(options, role, machine),
            trace_file=folder / f"{name}.trace",
            env=device_env(machine, index, len(roles)),
        )
        for index, (role, name, port) in enumerate(zip(roles, names, ports, strict=True))
    ]


def engine_args(options: Options, role: Role, machine: Machine) -> tuple[str, ...]:
    """vLLM arguments: our defaults first, the user's last, so that the user's win."""
    num_engines = options.prefill + options.decode
    ours: tuple[str, ...]
    if machine.device is Device.CPU:
        ours = CPU_ARGS
    else:
        ours = SHARED_ACCELERATOR_ARGS if machine.num_accelerators < num_engines else ()
    tiny = TINY_MODEL_ARGS if options.model is None else ()
    own = options.prefill_args if role is Role.PREFILL else options.decode_args
    return (*ours, *tiny, *own)


def device_env(machine: Machine, index: int, num_engines: int) -> dict[str, str | None]:
    """One accelerator for each engine, round robin. A single engine sees all of them."""
    if machine.device is Device.CPU or num_engines == 1 or machine.num_accelerators == 0:
        return {}
    variable = {Device.CUDA: "CUDA_VISIBLE_DEVICES", Device.NPU: "ASCEND_RT_VISIBLE_DEVICES"}[machine.device]
    return {variable: str(index % machine.num_accelerators)}


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError(f"{number} engines: use 1 to 64")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"port {number}: use 1 to 65535")
    return number


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}: check the quotes") from error

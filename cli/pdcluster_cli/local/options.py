"""Parses and checks the options of ``pdcluster local``. Pure, except ``main`` and argparse's error exit.

``plan.py`` makes each engine's plan from these options.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from pdcluster_cli import numbers
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_cli.processes.engines import LocalDevice
from pdcluster_cli.processes.parallelism import (
    ParallelSizes,
    checked_size,
    executor_problem,
    merge,
    take_parallelism,
)
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import HTTP_PORT, RouterPolicy

ROLES: Final = ("prefill", "decode")
DEFAULT_START_TIMEOUT_S: Final = 600.0
"""Seconds from the start to a pool that serves. 600, as vLLM waits for its own engine cores
(``VLLM_ENGINE_READY_TIMEOUT_S``): enough for tens of GiB of weights on a disk, not for hundreds or a download."""
MAX_START_TIMEOUT_S: Final = 86400.0
_SIZES: Final = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
_ADDRESSES: Final = frozenset({
    "--host", "--port", "--uds", "--headless", "--grpc", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs",
})  # fmt: skip
"""vLLM's options by which an engine would answer at another address than the one that we ask."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's choices, checked. ``question`` None: the built-in one."""

    model: str | None
    """As for ``vllm serve``: a folder, or a model's name on a hub. None: the tiny model."""
    prefill: int
    decode: int
    port: int
    prefill_parallelism: ParallelSizes
    decode_parallelism: ParallelSizes
    prefill_args: tuple[str, ...]
    """Further words for vLLM's command line."""
    decode_args: tuple[str, ...]
    device: LocalDevice | None
    policy: RouterPolicy | None
    """None: the router's own default."""
    start_timeout_s: float
    is_once: bool
    question: str | None

    @property
    def num_engines(self) -> int:
        return self.prefill + self.decode

    @property
    def num_ranks(self) -> int:
        """Workers of all engines together."""
        return self.prefill * self.prefill_parallelism.num_ranks + self.decode * self.decode_parallelism.num_ranks


def main(words: Sequence[str]) -> int:
    """Run ``command.main``, which needs modules of an extra. Help and argparse's errors come before, without them."""
    make_parser().parse_args(_join_args(words))
    status: int = import_module("pdcluster_cli.local.command").main(words)
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster local", description=SUBCOMMANDS["local"].help)
    model_help = "what vllm serve takes: a folder or a hub's name (default: a tiny model, made once)"
    parser.add_argument("--model", metavar="MODEL", help=model_help)
    for role in ROLES:
        add_role_arguments(parser, role)
    parser.add_argument(
        "--port", type=numbers.port, default=HTTP_PORT, help=f"port of the OpenAI endpoint (default: {HTTP_PORT})"
    )
    devices = ["auto", *(device.value for device in LocalDevice)]
    parser.add_argument("--device", choices=devices, default="auto", help="where engines compute (default: auto)")
    policies = [policy.value for policy in RouterPolicy]
    policy_help = f"{RouterPolicy.explained()} (default: {RouterPolicy.LEAST_TOKENS.value})"
    parser.add_argument("--policy", choices=policies, help=policy_help)
    parser.add_argument(
        "--start-timeout",
        type=numbers.seconds(1, MAX_START_TIMEOUT_S),
        default=DEFAULT_START_TIMEOUT_S,
        metavar="SECONDS",
        help=f"for the whole start; large weights or a download take more (default: {DEFAULT_START_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--once", nargs="?", const="", metavar="PROMPT", help="ask one question, print the answer, and end"
    )
    return parser


def add_role_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    """Add the options of one role: number of engines, parallel sizes, further words for vLLM."""
    add = parser.add_argument
    add(
        f"--{role}",
        type=numbers.whole("{} engines", 1, 64),
        default=1,
        metavar="N",
        help=f"{role} engines (default: 1)",
    )
    for flag, kind in _SIZES.items():
        add(f"--{role}-{flag}", type=_size, default=1, metavar="N", help=f"{role} engines: {kind} parallel size")
    add(
        f"--{role}-args", type=_words, default=(), metavar="ARGS", help=f"{role} engines: more of vLLM's, in one string"
    )


def parse_options(words: Sequence[str]) -> Options:
    """The checked options. Words that argparse itself refuses end the process with status 2.

    Raises:
        ConfigError: Options contradict each other or can never run. The message names the option.
    """
    arguments = make_parser().parse_args(_join_args(words))
    prefill, prefill_args = _role_options(arguments, "prefill")
    decode, decode_args = _role_options(arguments, "decode")
    return Options(
        model=arguments.model,
        prefill=arguments.prefill,
        decode=arguments.decode,
        port=arguments.port,
        prefill_parallelism=prefill,
        decode_parallelism=decode,
        prefill_args=prefill_args,
        decode_args=decode_args,
        device=None if arguments.device == "auto" else LocalDevice(arguments.device),
        policy=None if arguments.policy is None else RouterPolicy(arguments.policy),
        start_timeout_s=arguments.start_timeout,
        is_once=arguments.once is not None,
        question=arguments.once or None,
    )


def _role_options(arguments: argparse.Namespace, role: str) -> tuple[ParallelSizes, tuple[str, ...]]:
    given = {kind: getattr(arguments, f"{role}_{flag}") for flag, kind in _SIZES.items()}
    try:
        in_words, words = take_parallelism(getattr(arguments, f"{role}_args"))
        parallelism = merge(ParallelSizes(**given), in_words)
    except ConfigError as error:
        raise ConfigError(f"--{role}-args: {error}") from error
    if problem := executor_problem(parallelism, words):
        raise ConfigError(f"--{role}-args: {problem}")
    if moved := [name for name in map(_name_of, words) if _is_address(name)]:
        where = "each engine answers plain HTTP on a port that is chosen for it (--port is the router's)"
        raise ConfigError(f"--{role}-args: {moved[0]} cannot be given, {where}: leave it out")
    return parallelism, words


def _is_address(name: str) -> bool:
    """Whether vLLM takes the name for an option of its address, or refuses it as a shortened one of several options."""
    return name.startswith("--") and len(name) > 2 and any(option.startswith(name) for option in _ADDRESSES)


def _name_of(word: str) -> str:
    """The option's name as vLLM reads it: with ``-`` for ``_``."""
    return word.partition("=")[0].replace("_", "-")


def _join_args(words: Sequence[str]) -> list[str]:
    """Joins ``--prefill-args --x`` to ``--prefill-args=--x``: argparse would take ``--x`` for an option of its own."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--prefill-args", "--decode-args"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _size(text: str) -> int:
    try:
        return checked_size(text, "parallel size")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}: check the quotes") from error

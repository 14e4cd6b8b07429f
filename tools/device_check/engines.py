"""Checks with real vLLM engines on the device that a pool behind the router answers like a single engine.

    python -m tools.device_check.engines --device cuda --dtype bfloat16 --kill graphs
    python -m tools.device_check.engines --device cuda --adapters graphs

Two prefill and two decode engines and a single one share the one device; the content of each push is compared in full.
The single engine is asked twice. The second time its prefix cache has all of a prompt but the last token, which it then
computes alone, as decode does. So the pool must give the second answer in every dtype. In bfloat16 the first answer may
differ, because matrices of another shape round differently. ``--kill``: also kills engines under load (``kills.py``).
``--adapters``: asks for LoRA adapters instead, of which one changes (``adapters.py``).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

from tools.device_check import adapters
from tools.device_check.asking import ANSWER_TOKENS, Answer, answer_of, answers_at_once
from tools.device_check.kills import all_pushed, kill_each, push_figures

from pdcluster_cli.local.pool import PoolProcess, RouterPlan, start_members, wait_ready
from pdcluster_cli.models.tiny_model import TINY, ModelShape, ensure_tiny_model
from pdcluster_cli.processes.engines import (
    OFFLINE,
    SCRATCH,
    EnginePlan,
    LocalDevice,
    PoolRole,
    engine_spec,
    preload_modules,
    secret_env,
    zygote_env,
)
from pdcluster_cli.processes.last_words import last_lines
from pdcluster_cli.processes.waiting import EngineDied, NotReady, held_ports
from pdcluster_cli.processes.zygote import Zygote

SHAPES: Final = {
    LocalDevice.CPU: TINY,
    LocalDevice.CUDA: ModelShape(16, 8, 4, 128, hidden=1024, intermediate=2816, weight_std=0.045),
}
LENGTHS: Final = (1, 17, 33, 129, 641, 1537, 2049, 3073, 4097)
"""Lengths of prompts in tokens: a multiple of 16 and one more. ``ROUNDS`` prompts have each length."""
ROUNDS: Final = {LocalDevice.CPU: 1, LocalDevice.CUDA: 6}
AT_ONCE: Final = 16
START_S: Final = 300.0
ROLES: Final = (PoolRole.PREFILL, PoolRole.PREFILL, PoolRole.DECODE, PoolRole.DECODE, PoolRole.SINGLE)
SHARED: Final = ("--max-model-len", "8192", "--kv-cache-memory-bytes", str(2 << 30))
CACHED: Final = {True: "--enable-prefix-caching", False: "--no-enable-prefix-caching"}
ON_DEVICE: Final = ("--gpu-memory-utilization", "0.1", "--max-num-batched-tokens", "2048", "--max-num-seqs", "32")


@dataclass(frozen=True, slots=True)
class Setup:
    """Arguments and variables of all engines of one comparison."""

    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    load_failure_policy: str = "fail"

    def with_adapters(self, logs: Path, model: Path) -> Setup:
        """Also serves adapters. Decode computes a prompt itself whose KV it may not use."""
        args = (*self.args, *adapters.arguments(logs, model))
        return Setup(args, (*self.env, *adapters.ENV), load_failure_policy="recompute")


SETUPS: Final = {
    "eager": Setup(("--enforce-eager",)),
    "graphs": Setup(()),
    "sync-graphs": Setup(("--no-async-scheduling",)),
    "triton": Setup(("--enforce-eager", "--attention-backend", "TRITON_ATTN")),
    "v1-eager": Setup(("--enforce-eager",), (("VLLM_USE_V2_MODEL_RUNNER", "0"),)),
    "v2-eager": Setup(("--enforce-eager",), (("VLLM_USE_V2_MODEL_RUNNER", "1"),)),
    "v1-graphs": Setup((), (("VLLM_USE_V2_MODEL_RUNNER", "0"),)),
    "v2-graphs": Setup((), (("VLLM_USE_V2_MODEL_RUNNER", "1"),)),
}


def main() -> int:
    given = _parser().parse_args()
    device = LocalDevice(given.device)
    folder = given.logs or Path(tempfile.mkdtemp(prefix="engines-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = ensure_tiny_model(SHAPES[device])
    env = {**zygote_env(device), **secret_env(os.environ), **OFFLINE}
    zygote = Zygote(preload_modules(device), env=env, log_path=folder / "import.log", scratch=SCRATCH)
    try:
        failed = [name for name in given.setups if not compare(zygote, name, given, model, folder)]
    finally:
        zygote.stop()
    print(f"{', '.join(failed)}: FAILED" if failed else "like a single engine", flush=True)
    return len(failed)


def compare(zygote: Zygote, name: str, given: argparse.Namespace, model: Path, folder: Path) -> bool:
    """Run one setup and print lines about it. Returns whether the pool's answers were equal and whole."""
    logs, device = folder / name, LocalDevice(given.device)
    logs.mkdir(exist_ok=True)
    for trace in logs.glob("*.trace"):
        trace.unlink()  # of an earlier run
    began = time.monotonic()
    try:
        setup = SETUPS[name].with_adapters(logs, model) if given.adapters else SETUPS[name]
        with _started(zygote, setup, given.dtype, device, model, logs) as pool:
            print(f"{name} {given.dtype}: ready after {time.monotonic() - began:.0f} s", flush=True)
            prompts = list(_prompts(SHAPES[device].vocab, given.rounds or ROUNDS[device], given.longest))
            if given.adapters:
                return adapters.change_one(pool, prompts, logs, model)
            answers = pool.compared(prompts)
            print(push_figures(logs), flush=True)
            if answers is None or not all_pushed(logs, 2 * sum(len(prompt) > 1 for prompt in prompts)):
                return False
            return not given.kill or kill_each(pool, prompts, answers)
    except (EngineDied, NotReady, OSError, TimeoutError) as error:
        print(f"{name} {given.dtype}: {error}")
        for log in sorted(logs.glob("*.log")):
            print(f"--- {log.name}\n{last_lines(log, 25)}")
        return False


@dataclass(frozen=True, slots=True)
class Pool:
    """All engines of a setup, which run, and the router before them."""

    front: int
    """The router's port."""
    members: Mapping[str, PoolProcess]

    def compared(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        """The pool's answers, one prompt after the other; None: one differs from the single engine's, or is torn."""
        single = self.members[PoolRole.SINGLE.value].port
        for port in (single, self.front, self.front):
            answer_of(port, prompts[-1][::-1])  # so that the first request's compiling and measuring is not timed
        first, alone, seconds = list[Answer](), list[Answer](), {single: 0.0, self.front: 0.0}
        for prompt in prompts:
            began = time.monotonic()
            first.append(answer_of(single, prompt))
            seconds[single] += time.monotonic() - began
            alone.append(answer_of(single, prompt))
        began = time.monotonic()
        ours = [answer_of(self.front, prompt) for prompt in prompts]
        seconds[self.front] = time.monotonic() - began
        crowd = answers_at_once(self.front, prompts, AT_ONCE)
        lengths = list(map(len, prompts))
        differ, told, moved = (differing(lengths, ours, theirs) for theirs in (alone, first, crowd))
        whole = sum(len(answer) == ANSWER_TOKENS for answer in crowd)
        said = len({token for answer in ours for token in answer})
        print(
            f"{len(prompts)} prompts one by one ({said} different tokens said; {seconds[single]:.1f} s single, "
            f"{seconds[self.front]:.1f} s pool). Answers unlike the single engine's: where it computes the last token "
            f"alone {len(differ)} {differ or ''}, where not {len(told)} {told or ''}. "
            f"{AT_ONCE} at once: {whole} whole, {len(crowd) - len(moved)} as one by one",
            flush=True,
        )
        return ours if not differ and whole == len(prompts) else None


def differing(lengths: Sequence[int], ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[int]:
    """The lengths of the prompts whose two answers differ. Pure."""
    return [length for length, one, two in zip(lengths, ours, theirs, strict=True) if one != two]


@contextmanager
def _started(zygote: Zygote, setup: Setup, dtype: str, device: LocalDevice, model: Path, logs: Path) -> Iterator[Pool]:
    with held_ports(2 + len(ROLES)) as (front, internal, *ports):
        plans = [
            _plan(
                f"{role.value}-{number}" if role is not PoolRole.SINGLE else role.value,
                role,
                port,
                setup,
                dtype,
                device,
                model,
                logs,
            )
            for number, (role, port) in enumerate(zip(ROLES, ports, strict=True))
        ]
        router = RouterPlan(front, logs / "router.log", logs / "router.trace", internal_port=internal)
        with _running(zygote, plans, router) as members:
            yield Pool(front, {member.name: member for member in members})


@contextmanager
def _running(zygote: Zygote, plans: Sequence[EnginePlan], router: RouterPlan) -> Iterator[list[PoolProcess]]:
    """All engines and the router run until the block ends. The last of ``plans`` is the single engine's."""
    alone, members = plans[-1], list[PoolProcess]()
    try:
        members.append(PoolProcess(alone.name, alone.port, zygote.start_engine(engine_spec(alone))))
        members += start_members(zygote, plans[:-1], router, _say, timeout_s=START_S)
        wait_ready(members[:1], members, _say, deadline=time.monotonic() + START_S)
        yield members
    finally:
        for member in members:
            member.handle.signal(signal.SIGTERM)
        for member in members:
            member.handle.stop(5.0)


def _plan(
    name: str, role: PoolRole, port: int, setup: Setup, dtype: str, device: LocalDevice, model: Path, logs: Path
) -> EnginePlan:
    plan = EnginePlan(name, role, model, port, logs / f"{name}.log", device)
    there = () if device is LocalDevice.CPU else ON_DEVICE
    args = (*SHARED, CACHED[role is PoolRole.SINGLE], *there, "--dtype", dtype, *setup.args)
    trace, settings = logs / f"{name}.trace", {"content_check": "full"}
    plan = replace(plan, args=args, env=dict(setup.env), load_failure_policy=setup.load_failure_policy)
    return replace(plan, trace_file=trace, connector=settings)


def _prompts(vocab: int, rounds: int, longest: int) -> Iterator[list[int]]:
    random = Random(1)  # noqa: S311 - the same prompts each time
    numbers = count()
    for _ in range(rounds):
        for length in (one for one in LENGTHS if one <= longest):
            yield [next(numbers) % 256 + 16, *(random.randrange(16, vocab) for _ in range(length - 1))]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.device_check.engines")
    parser.add_argument("setups", nargs="*", default=["eager", "graphs"], choices=SETUPS)
    parser.add_argument("--device", default="cpu", choices=[device.value for device in SHAPES])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="tokens of the longest prompt")
    parser.add_argument("--rounds", type=int, help="prompts of each length")
    parser.add_argument("--kill", action="store_true", help="then kill engines under load")
    parser.add_argument("--adapters", action="store_true", help="serve LoRA adapters, of which one changes")
    parser.add_argument("--logs", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Checks with real vLLM engines on the device that a pair behind the router answers like a single engine.

    python -m tools.device_check.engines --device cuda --dtype bfloat16 eager graphs

All engines of a setup share the one device, and the content of each push is compared in full.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

from pdcluster_cli.local.pool import PoolProcess, RouterPlan, start_members, wait_ready
from pdcluster_cli.models.tiny_model import TINY, ModelShape, ensure_tiny_model
from pdcluster_cli.processes.engines import (
    LOOPBACK,
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
LENGTHS: Final = (1, 15, 16, 17, 127, 600, 1500, 2049, 3000, 4100)
"""Lengths of prompts in tokens; each is asked ``ROUNDS`` times."""
ROUNDS: Final = {LocalDevice.CPU: 1, LocalDevice.CUDA: 6}
AT_ONCE: Final = 16
ANSWER_TOKENS: Final = 32
START_S: Final = 300.0
ANSWER_S: Final = 120.0
SHARED: Final = ("--max-model-len", "8192", "--kv-cache-memory-bytes", str(2 << 30), "--no-enable-prefix-caching")
ON_DEVICE: Final = ("--gpu-memory-utilization", "0.2", "--max-num-batched-tokens", "2048", "--max-num-seqs", "32")


@dataclass(frozen=True, slots=True)
class Setup:
    """Arguments and variables of all engines of one comparison."""

    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


SETUPS: Final = {
    "eager": Setup(("--enforce-eager",)),
    "graphs": Setup(()),
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
        failed = [name for name in given.setups if not compare(zygote, name, given.dtype, device, model, folder)]
    finally:
        zygote.stop()
    print(f"{', '.join(failed)}: not like a single engine" if failed else "like a single engine", flush=True)
    return len(failed)


def compare(zygote: Zygote, name: str, dtype: str, device: LocalDevice, model: Path, folder: Path) -> bool:
    """Run one setup and print a line about it. Returns whether all answers were equal and whole."""
    logs = folder / name
    logs.mkdir(exist_ok=True)
    began = time.monotonic()
    try:
        with _started(zygote, SETUPS[name], dtype, device, model, logs) as (single, router):
            ready_s = time.monotonic() - began
            prompts = list(_prompts(SHAPES[device].vocab, ROUNDS[device]))
            return _compared(f"{name} {dtype}, ready after {ready_s:.0f} s", single, router, prompts)
    except (EngineDied, NotReady, OSError, TimeoutError) as error:
        print(f"{name} {dtype}: {error}")
        for log in sorted(logs.glob("*.log")):
            print(f"--- {log.name}\n{last_lines(log, 25)}")
        return False


def _compared(title: str, single: int, router: int, prompts: Sequence[list[int]]) -> bool:
    for port in (single, router):
        _answer(port, prompts[-1])  # so that the first request's compiling and measuring is not timed
    took, alone = {single: 0.0, router: 0.0}, {}
    for port in (single, router):
        began = time.monotonic()
        alone[port] = [_answer(port, prompt) for prompt in prompts]
        took[port] = time.monotonic() - began
    differ = [len(p) for p, one, two in zip(prompts, alone[single], alone[router], strict=True) if one != two]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        crowd = list(threads.map(lambda prompt: _answer(router, prompt), prompts))
    whole = sum(len(answer) == ANSWER_TOKENS for answer in crowd)
    equal = sum(one == two for one, two in zip(alone[single], crowd, strict=True))
    distinct = len({token for answer in alone[single] for token in answer})
    print(
        f"{title}: {len(prompts)} prompts one by one, {len(differ)} answers differ {differ or ''} "
        f"({distinct} different tokens said; {took[single]:.1f} s single, {took[router]:.1f} s pair); "
        f"{AT_ONCE} at once: {whole} whole, {equal} equal",
        flush=True,
    )
    return not differ and whole == len(prompts)


@contextmanager
def _started(
    zygote: Zygote, setup: Setup, dtype: str, device: LocalDevice, model: Path, logs: Path
) -> Iterator[tuple[int, int]]:
    """Ports of a running single engine, and of a running router before a pair."""
    roles = (PoolRole.PREFILL, PoolRole.DECODE, PoolRole.SINGLE)
    with held_ports(2 + len(roles)) as (front, internal, *ports):
        plans = [_plan(*one, setup, dtype, device, model, logs) for one in zip(roles, ports, strict=True)]
        router = RouterPlan(front, logs / "router.log", logs / "router.trace", internal_port=internal)
        with _running(zygote, plans, router):
            yield plans[-1].port, front


@contextmanager
def _running(zygote: Zygote, plans: Sequence[EnginePlan], router: RouterPlan) -> Iterator[None]:
    """All engines and the router run until the block ends. The last of ``plans`` is the single engine's."""
    alone, members = plans[-1], list[PoolProcess]()
    try:
        members.append(PoolProcess(alone.name, alone.port, zygote.start_engine(engine_spec(alone))))
        members += start_members(zygote, plans[:-1], router, _say, timeout_s=START_S)
        wait_ready(members[:1], members, _say, deadline=time.monotonic() + START_S)
        yield
    finally:
        for member in members:
            member.handle.stop(5.0)


def _plan(
    role: PoolRole, port: int, setup: Setup, dtype: str, device: LocalDevice, model: Path, logs: Path
) -> EnginePlan:
    plan = EnginePlan(role.value, role, model, port, logs / f"{role.value}.log", device)
    there = () if device is LocalDevice.CPU else ON_DEVICE
    args = (*SHARED, *there, "--dtype", dtype, *setup.args)
    trace, settings = logs / f"{role.value}.trace", {"content_check": "full"}
    return replace(plan, args=args, env=dict(setup.env), trace_file=trace, connector=settings)


def _prompts(vocab: int, rounds: int) -> Iterator[list[int]]:
    random = Random(1)  # noqa: S311 - the same prompts each time
    numbers = count()
    for _ in range(rounds):
        for length in LENGTHS:
            yield [next(numbers) % 256 + 16, *(random.randrange(16, vocab) for _ in range(length - 1))]


def _answer(port: int, prompt: list[int]) -> tuple[int, ...]:
    """The token ids of a greedy answer."""
    asked = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    body = {"prompt": prompt, **asked}
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:  # noqa: S310 - the same
        return tuple(json.loads(response.read())["choices"][0]["token_ids"])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.device_check.engines")
    parser.add_argument("setups", nargs="*", default=["eager", "graphs"], choices=SETUPS)
    parser.add_argument("--device", default="cpu", choices=[device.value for device in SHAPES])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--logs", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())

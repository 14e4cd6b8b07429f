"""Starts a pool's processes, says how far they are, and notices when one of them ends. One thread owns all of it.

Everything is a fork of one zygote, the router too: one way to start, to stop and to die (see ``zygote.py``).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdcluster_cli.engines import LOOPBACK, ROUTER_MODULE, EnginePlan, Role, engine_spec, router_argv
from pdcluster_cli.waiting import EngineDied, is_healthy, last_lines
from pdcluster_cli.zygote import EngineHandle, EngineSpec, Zygote

NEWS_INTERVAL_S: Final = 10.0
"""How often a slow start says that it goes on. A tiny model is ready before that; a large one takes minutes."""
POLL_S: Final = 0.05
IMPORT_TIMEOUT_S: Final = 600.0
"""The import takes 6 s; on a cold network disk minutes."""
ENGINES_TIMEOUT_S: Final = 3600.0
"""Loading hundreds of GiB of weights takes this long; an engine that fails ends by itself long before."""
ROUTER_TIMEOUT_S: Final = 30.0
"""The router is ready when it has seen its engines: about a second after them."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the pool."""

    name: str
    port: int
    handle: EngineHandle


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """The router to be started in front of the engines."""

    port: int
    log_path: Path
    trace_file: Path
    args: tuple[str, ...] = ()


def start_members(zygote: Zygote, plans: Sequence[EnginePlan], router: RouterPlan, say: Say) -> list[Member]:
    """All engines and the router answer.

    Raises:
        EngineDied: One of them ended instead.
        TimeoutError: One of them does neither.
        ZygoteError: The import failed.
    """
    _import_once(zygote, say)
    engines = [Member(plan.name, plan.port, zygote.start_engine(engine_spec(plan))) for plan in plans]
    say(f"starting {', '.join(engine.name for engine in engines)} and the router")
    front = Member("router", router.port, zygote.start_engine(router_spec(plans, router)))
    _wait_ready(engines, say, [*engines, front], ENGINES_TIMEOUT_S)
    _wait_ready([front], say, [*engines, front], ROUTER_TIMEOUT_S)
    return [*engines, front]


def router_spec(plans: Sequence[EnginePlan], router: RouterPlan) -> EngineSpec:
    """The router's process."""
    argv = router_argv(
        prefill=[_url_of(plan) for plan in plans if plan.role is Role.PREFILL],
        decode=[_url_of(plan) for plan in plans if plan.role is Role.DECODE],
        port=router.port,
        trace_file=router.trace_file,
        args=router.args,
    )
    return EngineSpec("router", ROUTER_MODULE, argv, {}, router.log_path)


def find_dead(members: Sequence[Member], timeout_s: float | None) -> EngineDied | None:
    """The first member that has ended; waits for one up to ``timeout_s`` (None: for ever)."""
    poll = select.poll()
    by_fd = {member.handle.status_fd: member for member in members}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000):
        handle = by_fd[fd].handle
        return EngineDied(handle.spec.name, handle.wait(0) or 0, handle.spec.log_path)
    return None


def _import_once(zygote: Zygote, say: Say) -> None:
    say("importing vLLM once, for all engines")
    deadline = time.monotonic() + IMPORT_TIMEOUT_S
    while (ready := zygote.wait_ready(NEWS_INTERVAL_S)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"importing vLLM takes more than {IMPORT_TIMEOUT_S:.0f} s: see {zygote.log_path}")
        say("still importing")
    say(f"imported in {ready.import_s:.1f} s")


def _wait_ready(members: Sequence[Member], say: Say, watched: Sequence[Member], timeout_s: float) -> None:
    began = time.monotonic()
    next_news = began + NEWS_INTERVAL_S
    waiting = list(members)
    while waiting:
        if time.monotonic() > began + timeout_s:
            raise TimeoutError(_not_ready(waiting[0], timeout_s))
        if (dead := find_dead(watched, POLL_S)) is not None:
            raise dead
        for member in [member for member in waiting if is_healthy(member.port)]:
            waiting.remove(member)
            say(f"{member.name} is ready on port {member.port} after {time.monotonic() - began:.1f} s")
        if time.monotonic() > next_news:
            next_news += NEWS_INTERVAL_S
            _say_news(waiting, time.monotonic() - began, say)


def _not_ready(member: Member, timeout_s: float) -> str:
    log = member.handle.spec.log_path
    return f"{member.name} is not ready after {timeout_s:.0f} s; the end of {log}:\n{last_lines(log)}"


def _say_news(waiting: Sequence[Member], elapsed_s: float, say: Say) -> None:
    for member in waiting:
        newest = last_lines(member.handle.spec.log_path, 1).strip()
        say(f"{member.name} still starts ({elapsed_s:.0f} s): {newest[:160]}")


def _url_of(plan: EnginePlan) -> str:
    return f"http://{LOOPBACK}:{plan.port}"

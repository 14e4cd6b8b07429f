"""Starts a pool's processes, tells of their progress, and notices when one of them ends. One thread owns everything.

Every process is a fork of one zygote, the router too: so all start, stop and die in one way (see ``zygote.py``).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdcluster_cli.processes.engines import LOOPBACK, ROUTER_MODULE, EnginePlan, PoolRole, engine_spec, router_argv
from pdcluster_cli.processes.last_words import last_lines
from pdcluster_cli.processes.waiting import EngineDied, NotReady, is_healthy
from pdcluster_cli.processes.zygote import EngineHandle, EngineSpec, Zygote

NEWS_INTERVAL_S: Final = 10.0
"""Seconds between two lines about a slow start. A tiny model is ready before the first; a large one takes minutes."""
POLL_S: Final = 0.05
ROUTER_GRACE_S: Final = 60.0
"""Least seconds for the router once the engines are ready, even if the start's time is over. It needs about one."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PoolProcess:
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
    internal_port: int = 0
    """0: any free port, which the router then tells only to the engines."""


def start_members(
    zygote: Zygote, plans: Sequence[EnginePlan], router: RouterPlan, say: Say, *, timeout_s: float
) -> list[PoolProcess]:
    """Start all engines and the router, and wait until they answer. ``timeout_s``: for all of it, import included.

    Raises:
        EngineDied: A process has ended.
        NotReady: A process does not answer in time.
        ZygoteError: The import failed.
        TimeoutError: The import takes too long, or the zygote hangs.
    """
    deadline = time.monotonic() + timeout_s
    _await_zygote(zygote, say, timeout_s)
    engines = [PoolProcess(plan.name, plan.port, zygote.start_engine(engine_spec(plan))) for plan in plans]
    say(f"starting {', '.join(engine.name for engine in engines)} and the router")
    front = PoolProcess("router", router.port, zygote.start_engine(router_spec(plans, router)))
    wait_ready(engines, [*engines, front], say, deadline=deadline)
    wait_ready([front], [*engines, front], say, deadline=max(deadline, time.monotonic() + ROUTER_GRACE_S))
    return [*engines, front]


def router_spec(plans: Sequence[EnginePlan], router: RouterPlan) -> EngineSpec:
    """How to start the router's process."""
    argv = router_argv(
        prefill=[_url_of(plan) for plan in plans if plan.role is PoolRole.PREFILL],
        decode=[_url_of(plan) for plan in plans if plan.role is PoolRole.DECODE],
        port=router.port,
        internal_port=router.internal_port,
        trace_file=router.trace_file,
        args=router.args,
    )
    return EngineSpec("router", ROUTER_MODULE, argv, {}, router.log_path)


def find_dead(
    members: Sequence[PoolProcess], timeout_s: float | None, *, have_served: bool = False
) -> EngineDied | None:
    """The first member that has ended. Waits for one up to ``timeout_s`` seconds (None: for ever).

    ``have_served``: the log of one that has may hold errors that it has survived; its end says why it ended.
    """
    poll = select.poll()
    by_fd = {member.handle.status_fd: member for member in members}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000):
        handle = by_fd[fd].handle
        return EngineDied(handle.spec.name, handle.wait(0) or 0, handle.spec.log_path, has_served=have_served)
    return None


def wait_ready(members: Sequence[PoolProcess], watched: Sequence[PoolProcess], say: Say, *, deadline: float) -> None:
    """Wait until ``members`` answer, while none of ``watched`` ends. ``deadline``: monotonic seconds.

    Raises:
        EngineDied: One of ``watched`` has ended.
        NotReady: One of ``members`` does not answer by the deadline.
    """
    began = time.monotonic()
    next_news = began + NEWS_INTERVAL_S
    waiting = list(members)
    while waiting:
        if (dead := find_dead(watched, POLL_S)) is not None:
            raise dead
        for member in [member for member in waiting if is_healthy(member.port)]:
            waiting.remove(member)
            say(f"{member.name} is ready on port {member.port} after {time.monotonic() - began:.1f} s")
        if waiting and time.monotonic() > deadline:
            raise NotReady(waiting[0].name, time.monotonic() - began, waiting[0].handle.spec.log_path)
        if time.monotonic() > next_news:
            next_news += NEWS_INTERVAL_S
            _say_news(waiting, say, time.monotonic() - began)


def _await_zygote(zygote: Zygote, say: Say, timeout_s: float) -> None:
    """Wait until it has imported what it imports for all engines. Where that is nothing, nothing is said of it."""
    began = time.monotonic()
    say = say if zygote.imports_once else _say_nothing
    say("importing vLLM once, for all engines")
    elapsed_s = 0.0
    while (ready := zygote.wait_ready(min(NEWS_INTERVAL_S, timeout_s - elapsed_s))) is None:
        elapsed_s = time.monotonic() - began
        if elapsed_s >= timeout_s:
            what = "importing vLLM" if zygote.imports_once else "the start of the process that starts engines"
            raise TimeoutError(f"{what} takes more than {timeout_s:.0f} s (--start-timeout): see {zygote.log_path}")
        say(f"still importing ({elapsed_s:.0f} s)")
    say(f"imported in {ready.import_s:.1f} s")


def _say_nothing(_: str) -> None: ...


def _say_news(waiting: Sequence[PoolProcess], say: Say, elapsed_s: float) -> None:
    for member in waiting:
        newest = last_lines(member.handle.spec.log_path, 1).strip()
        say(f"{member.name} still starts ({elapsed_s:.0f} s): {newest[:160]}")


def _url_of(plan: EnginePlan) -> str:
    return f"http://{LOOPBACK}:{plan.port}"

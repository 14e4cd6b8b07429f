"""The processes of a campaign: a single engine first, then prefill and decode engines, the router, and their proxies.

    clients --> router --> proxy --> prefill / decode engine --> proxy (metaserver) --> router

Every member keeps its ports over all its lives. Knows which ends were ours: a member that ends otherwise is an
unexpected death, is written down, and is started again so that the campaign goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from campaign.proxy import FaultProxy
from campaign.schedule import Site
from integration.processes import descendants, is_running
from pdcluster_cli.local.options import DEFAULT_START_TIMEOUT_S
from pdcluster_cli.processes.last_words import last_lines
from pdcluster_cli.processes.waiting import is_healthy
from pdcluster_cli.processes.zygote import EngineHandle, EngineSpec, Zygote

START_TIMEOUT_S: Final = DEFAULT_START_TIMEOUT_S
_POLL_S: Final = 0.1
_EXIT_S: Final = 10.0
_STABLE_PORTS: Final = range(30000, 32000)
"""Above Mooncake's, below those that the kernel gives to outgoing connections: a port stays ours while its member is
down."""


class CannotStart(Exception):
    """A member does not serve; the campaign ends. It is among the deaths."""


@dataclass(frozen=True, slots=True)
class Death:
    """A member ended, or could not be started, and nobody had asked for it."""

    name: str
    at: float
    how: str


@dataclass(slots=True)
class Member:
    """One engine or the router. ``deeds`` serialises stops and kills of its process."""

    name: str
    site: Site
    spec: EngineSpec
    port: int
    proxy: FaultProxy | None = None
    num_ranks: int = 1
    handle: EngineHandle | None = None
    lives: int = 0
    internal_port: int = 0
    """The router's, with its metrics; engines have none."""
    out_since: float | None = 0.0
    """Since when it is away with our knowledge (monotonic seconds); None: it must run."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it was."""
    deeds: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.handle is not None and self.handle.wait(0) is None

    def was_out(self, begin: float, end: float) -> bool:
        """Whether an outage met ``[begin, end]``."""
        is_out = self.out_since is not None and self.out_since <= end
        return is_out or any(began <= end and begin <= ended for began, ended in self.outages)

    def is_back(self) -> None:
        """It serves: from now on its end is a surprise."""
        if self.out_since is not None:
            self.outages.append((self.out_since, time.monotonic()))
            self.out_since = None

    def pids(self, *, core_only: bool = False) -> set[int]:
        """All its processes, or those below the main one."""
        if self.handle is None or not self.is_running:
            return set()
        main = self.handle.pid
        return descendants(main) | (set() if core_only else {main})


class Cluster:
    """Starts, kills and starts again. One event loop owns it."""

    def __init__(self, zygote: Zygote, exit_s: float = _EXIT_S) -> None:
        """``exit_s``: how long what is left of a killed member may take to end by itself."""
        self.members: list[Member] = []
        self.deaths: list[Death] = []
        self.pids: set[tuple[int, str]] = set()
        """Every process that was seen below the zygote, with its start time: ids come again."""
        self._zygote = zygote
        self._exit_s = exit_s

    def of(self, site: Site) -> list[Member]:
        """The members at one site."""
        return [member for member in self.members if member.site is site]

    @property
    def router(self) -> Member:
        (router,) = self.of(Site.ROUTER)
        return router

    @property
    def engines(self) -> list[Member]:
        return [*self.of(Site.PREFILL), *self.of(Site.DECODE)]

    async def start(self, *members: Member) -> None:
        """They serve.

        Raises:
            CannotStart: One does not.
        """
        await asyncio.gather(*(self._start(member) for member in members))
        for member in members:
            member.is_back()

    async def kill(self, member: Member, pids: set[int], *, down_s: float) -> int:
        """``pids``, of the member's, got SIGKILL; it was away for at least ``down_s`` and serves again, on the same
        ports. Returns how many of them are seen to have ended."""
        member.out_since = time.monotonic()
        self._remember_processes()
        whole = member.pids()
        send(signal.SIGKILL, pids)
        if member.handle and member.handle.pid in pids and member.proxy:
            await member.proxy.stop_listening()
        await _until_gone(pids, self._exit_s)
        num_ended = sum(not is_running(pid) for pid in pids)
        await self._wait_gone(member, whole)
        if member.proxy:
            await member.proxy.stop_listening()
        await asyncio.sleep(down_s)
        await self.start(member)
        return num_ended

    @asynccontextmanager
    async def stopped(self, pids: set[int]) -> AsyncIterator[None]:
        """These processes do nothing within the ``with``."""
        send(signal.SIGSTOP, pids)
        try:
            yield
        finally:
            send(signal.SIGCONT, pids)

    async def watch(self) -> None:
        """Write down every end that we did not ask for, and start that member again. Runs until cancelled."""
        while True:
            for member in self.members:
                if member.out_since is None and not member.is_running:
                    await self._died(member)
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Proxies are gone. The processes belong to the zygote."""
        self._remember_processes()
        await asyncio.gather(*(member.proxy.close() for member in self.members if member.proxy))

    async def _died(self, member: Member) -> None:
        code = member.handle.wait(0) if member.handle else None
        member.out_since = time.monotonic()
        self._write_down(member, f"ended with status {code}")
        async with member.deeds:
            await self.start(member)

    def _write_down(self, member: Member, how: str) -> None:
        tail = last_lines(member.spec.log_path, 30)
        self.deaths.append(Death(member.name, time.monotonic(), f"{how}; the end of its log:\n{tail}"))

    async def _start(self, member: Member) -> None:
        member.handle = await asyncio.to_thread(self._zygote.start_engine, member.spec)
        member.lives += 1
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await asyncio.to_thread(is_healthy, member.port):
            if not member.is_running or time.monotonic() > deadline:
                self._write_down(member, "did not start")
                raise CannotStart(f"{member.name} does not start: see {member.spec.log_path}")
            await asyncio.sleep(_POLL_S)
        if member.proxy:
            await member.proxy.listen()

    async def _wait_gone(self, member: Member, whole: set[int]) -> None:
        """The whole member has ended; an API server without its core is given some seconds to notice, and then the
        ranks that outlive it, as a pod's end would."""
        handle, deadline = member.handle, time.monotonic() + self._exit_s
        assert handle is not None
        while handle.wait(0) is None:
            if time.monotonic() > deadline:
                handle.signal(signal.SIGKILL)
            await asyncio.sleep(_POLL_S)
        await _until_gone(whole, self._exit_s)
        send(signal.SIGKILL, set(filter(is_running, whole)))
        await _until_gone(whole, self._exit_s)

    def _remember_processes(self) -> None:
        self.pids |= {(pid, started_at(pid)) for pid in descendants(self._zygote.pid)}


def send(number: signal.Signals, pids: set[int]) -> None:
    """Those of the processes that are still there have got the signal."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _until_gone(pids: set[int], limit_s: float) -> None:
    """None of them runs, or ``limit_s`` is over."""
    deadline = time.monotonic() + limit_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


def started_at(pid: int) -> str:
    """When the kernel started the process, in its own ticks; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stable_ports(lengths: Sequence[int], rng: random.Random) -> list[range]:
    """For each length a run of so many ports on which no process listens, and that no outgoing connection will take."""
    runs: list[range] = []
    while len(runs) < len(lengths):
        first = rng.choice(_STABLE_PORTS)
        run = range(first, first + lengths[len(runs)])
        if not any(set(run) & set(taken) for taken in runs) and all(map(_is_free, run)):
            runs.append(run)
    return runs


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False

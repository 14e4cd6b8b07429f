"""Carries the faults of a schedule out, each in its own task, and keeps a log of what was really done when."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Final

from campaign.cluster import Cluster, Member
from campaign.leftovers import ask_pids
from campaign.proxy import FaultProxy
from campaign.schedule import Deed, Fault, Site
from campaign.wire import FRAME_TROUBLE, RANK_TROUBLE, WRITE_TROUBLE, Storm, read_troubles
from integration.harness import HttpError
from integration.processes import is_running, is_stopped

_KILLS: Final = (Deed.KILL, Deed.KILL_CORE, Deed.KILL_RANK)
_STOPS: Final = (Deed.STOP, Deed.STOP_CORE, Deed.STOP_RANK)
_SPARES_MAIN: Final = (Deed.KILL_CORE, Deed.STOP_CORE)
_AT_RANK: Final = (Deed.KILL_RANK, Deed.STOP_RANK, Deed.WRITES_OF_RANK)
_TROUBLES: Final = {
    Deed.FRAMES: FRAME_TROUBLE,
    Deed.WRITES: WRITE_TROUBLE,
    Deed.WRITES_OF_RANK: RANK_TROUBLE,
}
_STALLS_S: Final = 0.8
_UNTIL_MET_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault as it was carried out; monotonic seconds. ``num_met``: requests and connections it met at a
    proxy, processes that the kernel showed stopped or ended, or frames and writes that an engine wrote down."""

    fault: Fault
    target: str
    begin: float
    end: float
    num_met: int = 0

    @property
    def kind(self) -> str:
        """For counting: ``prefill: SIGKILL``."""
        return f"{self.fault.site.value}: {self.fault.deed.value}"

    @property
    def has_struck(self) -> bool:
        return self.num_met > 0


class Injector:
    """Knows how to do each deed. ``inject`` may run many times at once."""

    def __init__(self, cluster: Cluster, metaserver: FaultProxy, storm_file: Path, trouble_log: Path) -> None:
        self.log: list[Injected] = []
        self._cluster = cluster
        self._metaserver = metaserver
        self._metaserver_deeds = asyncio.Lock()
        self._storm_file = storm_file
        self._trouble_log = trouble_log
        self._ranks_until: dict[str, float] = {}
        self._until = dict.fromkeys((Deed.FRAMES, Deed.WRITES, Deed.STOP), 0.0)

    async def inject(self, fault: Fault) -> None:
        """The fault began and is over."""
        if fault.site is Site.WIRE:
            await self._storm(fault, "all engines", None)
        elif fault.site is Site.METASERVER:
            async with self._metaserver_deeds:
                await self._at_proxy(fault, "metaserver", self._metaserver)
        else:
            members = self._cluster.of(fault.site)
            member = members[fault.engine_of(len(members))]
            async with member.deeds:
                if fault.deed in _AT_RANK:
                    await self._at_rank(fault, member, fault.rank_of(len(members), member.num_ranks))
                else:
                    await self._at_member(fault, member)

    async def _at_member(self, fault: Fault, member: Member) -> None:
        if fault.deed in _KILLS or fault.deed in _STOPS:
            await self._stall_writes()
            await self._at_processes(fault, member, member.name, member.pids(core_only=fault.deed in _SPARES_MAIN))
        else:
            assert member.proxy is not None
            await self._at_proxy(fault, member.name, member.proxy)

    async def _at_rank(self, fault: Fault, member: Member, rank: int) -> None:
        """Nothing is done, and nothing met, when the engine does not say which process the rank is."""
        name, begin = f"{member.name} rank {rank}", time.monotonic()
        try:
            pid = (await asyncio.to_thread(ask_pids, member.url))[rank]
        except (OSError, HTTPException, HttpError):
            self.log.append(Injected(fault, name, begin, time.monotonic()))
            return
        if fault.deed is Deed.WRITES_OF_RANK:
            await self._storm(fault, name, pid)
        else:
            await self._stall_writes()
            await self._at_processes(fault, member, name, {pid})

    async def _at_processes(self, fault: Fault, member: Member, name: str, pids: set[int]) -> None:
        begin = time.monotonic()
        if fault.deed in _KILLS:
            num_met = await self._cluster.kill(member, pids, down_s=fault.seconds)
        else:
            async with self._cluster.stopped(pids):
                await asyncio.sleep(fault.seconds)
                num_met = await _num_stopped(pids)
        self.log.append(Injected(fault, name, begin, time.monotonic(), num_met))

    async def _at_proxy(self, fault: Fault, name: str, proxy: FaultProxy) -> None:
        begin, met_before = time.monotonic(), proxy.num_met
        async with proxy.doing(fault.deed):
            await asyncio.sleep(fault.seconds)
        self.log.append(Injected(fault, name, begin, time.monotonic(), proxy.num_met - met_before))

    async def _storm(self, fault: Fault, name: str, pid: int | None) -> None:
        """``pid``: of the rank that alone is in it. One rank may push nothing for seconds: that storm waits for it."""
        begin, end = time.monotonic(), time.monotonic() + fault.seconds
        while True:
            self._raise_storm(fault.deed, end, pid)
            await asyncio.sleep(end - time.monotonic())
            num_met = self._num_troubled(fault.deed, pid, begin)
            if num_met or pid is None or end > begin + _UNTIL_MET_S:
                break
            end = time.monotonic() + 1.0
        self.log.append(Injected(fault, name, begin, time.monotonic(), num_met))

    def _num_troubled(self, deed: Deed, pid: int | None, begin: float) -> int:
        """Frames or writes that this storm met, in one process or all."""
        kinds = {trouble.value for trouble in _TROUBLES[deed]}
        told = [one for one in read_troubles(self._trouble_log) if one.trouble in kinds and one.at >= begin]
        return sum(pid in (None, one.pid) for one in told)

    async def _stall_writes(self) -> None:
        """What comes now meets pushes in the middle: otherwise they are over in some milliseconds."""
        self._raise_storm(Deed.STOP, time.monotonic() + _STALLS_S)
        await asyncio.sleep(_STALLS_S / 2)

    def _raise_storm(self, deed: Deed, until: float, pid: int | None = None) -> None:
        """Storms may overlap: the later end counts. No engine needs to be told of the end."""
        if pid is None:
            self._until[deed] = max(self._until[deed], until)
        else:
            self._ranks_until[str(pid)] = until
        storm = Storm(self._until[Deed.FRAMES], self._until[Deed.WRITES], self._until[Deed.STOP], self._ranks_until)
        storm.write(self._storm_file)


def faults_around(log: list[Injected], begin: float, end: float, *, before_s: float = 5.0) -> list[Injected]:
    """What was broken during a request, or shortly before it, oldest first."""
    found = [injected for injected in log if injected.begin <= end and begin - before_s <= injected.end]
    return sorted(found, key=lambda injected: injected.begin)


def shown(injected: Injected, zero: float) -> str:
    """One line for a report; times in seconds since ``zero``."""
    began, ended = injected.begin - zero, injected.end - zero
    return f"{began:.2f}-{ended:.2f} s {injected.target}: {injected.fault.deed.value}"


async def _num_stopped(pids: set[int]) -> int:
    """The processes that the kernel shows as stopped: on a crowded machine each when it would have run next."""
    until = time.monotonic() + _UNTIL_MET_S
    while not all(map(is_stopped, pids)) and any(map(is_running, pids)) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    return sum(map(is_stopped, pids))

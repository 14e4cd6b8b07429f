"""Carries the faults of a schedule out, each in its own task, and keeps a log of what was really done when."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from campaign.cluster import Cluster, Member
from campaign.proxy import FaultProxy
from campaign.schedule import Deed, Fault, Site
from campaign.wire import Storm

_KILLS: Final = {Deed.KILL: False, Deed.KILL_CORE: True}
_STOPS: Final = {Deed.STOP: False, Deed.STOP_CORE: True}
"""Deed to whether it spares the main process."""
_STALLS_S: Final = 0.8


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault as it happened; monotonic seconds. ``num_met``: requests it met at a proxy."""

    fault: Fault
    target: str
    begin: float
    end: float
    num_met: int = 0


class Injector:
    """Knows how to do each deed. ``inject`` may run many times at once."""

    def __init__(self, cluster: Cluster, metaserver: FaultProxy, storm_file: Path) -> None:
        self.log: list[Injected] = []
        self._cluster = cluster
        self._metaserver = metaserver
        self._metaserver_deeds = asyncio.Lock()
        self._storm_file = storm_file
        self._until = dict.fromkeys((Deed.FRAMES, Deed.WRITES, Deed.STOP), 0.0)

    async def inject(self, fault: Fault) -> None:
        """The fault began and is over."""
        if fault.site is Site.WIRE:
            await self._storm(fault)
        elif fault.site is Site.METASERVER:
            async with self._metaserver_deeds:
                await self._at_proxy(fault, "metaserver", self._metaserver)
        else:
            members = self._cluster.of(fault.site)
            member = members[int(fault.draw * len(members))]
            async with member.deeds:
                await self._at_member(fault, member)

    async def _at_member(self, fault: Fault, member: Member) -> None:
        if fault.deed in _KILLS or fault.deed in _STOPS:
            await self._stall_writes()
        begin = time.monotonic()
        if fault.deed in _KILLS:
            await self._cluster.kill(member, core_only=_KILLS[fault.deed], down_s=fault.seconds)
        elif fault.deed in _STOPS:
            await _hold(self._cluster.stopped(member, core_only=_STOPS[fault.deed]), fault.seconds)
        else:
            assert member.proxy is not None
            await self._at_proxy(fault, member.name, member.proxy)
            return
        self.log.append(Injected(fault, member.name, begin, time.monotonic()))

    async def _at_proxy(self, fault: Fault, name: str, proxy: FaultProxy) -> None:
        begin, met_before = time.monotonic(), proxy.num_met
        await _hold(proxy.doing(fault.deed), fault.seconds)
        self.log.append(Injected(fault, name, begin, time.monotonic(), proxy.num_met - met_before))

    async def _storm(self, fault: Fault) -> None:
        begin = time.monotonic()
        self._raise_storm(fault.deed, begin + fault.seconds)
        await asyncio.sleep(fault.seconds)
        self.log.append(Injected(fault, "all engines", begin, time.monotonic()))

    async def _stall_writes(self) -> None:
        """What comes now meets pushes in the middle: otherwise they are over in some milliseconds."""
        self._raise_storm(Deed.STOP, time.monotonic() + _STALLS_S)
        await asyncio.sleep(_STALLS_S / 2)

    def _raise_storm(self, deed: Deed, until: float) -> None:
        """Storms may overlap: the later end counts. No engine needs to be told of the end."""
        self._until[deed] = max(self._until[deed], until)
        storm = Storm(self._until[Deed.FRAMES], self._until[Deed.WRITES], self._until[Deed.STOP])
        storm.write(self._storm_file)


def faults_around(log: list[Injected], begin: float, end: float, *, before_s: float = 5.0) -> list[Injected]:
    """What was broken during a request, or shortly before it, oldest first."""
    found = [injected for injected in log if injected.begin <= end and begin - before_s <= injected.end]
    return sorted(found, key=lambda injected: injected.begin)


def shown(injected: Injected, zero: float) -> str:
    """One line for a report; times in seconds since ``zero``."""
    began, ended = injected.begin - zero, injected.end - zero
    return f"{began:.2f}-{ended:.2f} s {injected.target}: {injected.fault.deed.value}"


async def _hold(deed: AbstractAsyncContextManager[None], seconds: float) -> None:
    async with deed:
        await asyncio.sleep(seconds)

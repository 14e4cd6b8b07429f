"""Whether the engines are well: asked in the background, so that ``/health`` itself never waits.

Each engine that may get work, now or later, has one task. A probe that finds no answer in time makes its engine
unhealthy until one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_protocol.errors import Unavailable
from pdcluster_protocol.labels import Role
from pdcluster_router.core.membership import EngineState
from pdcluster_router.core.placement import serving_revisions
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Roster
from pdcluster_router.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """``missing``: roles without one serving, healthy engine."""

    missing: tuple[Role, ...]
    is_split: bool = False
    """No role is missing, but no revision has both."""

    @property
    def problem(self) -> str:
        """Empty when all is well."""
        if self.is_split:
            return "no revision has a prefill and a decode engine that answer their /health"
        missing = " and no ".join(role.value for role in self.missing)
        return f"no {missing} engine answers its /health" if missing else ""


def health_of(roster: Roster) -> Health:
    """One healthy engine of each role, of one revision, is enough."""
    well = [engine for engine in roster.all_engines() if engine.state is EngineState.SERVING and engine.is_healthy]
    missing = tuple(role for role in Role if not any(engine.role is role for engine in well))
    return Health(missing, is_split=not missing and not serving_revisions(well))


class Probes:
    """One task for each engine that is worth asking, within the application's task group. Event loop only."""

    def __init__(self, tasks: asyncio.TaskGroup, roster: Roster, settings: Settings) -> None:
        self._tasks = tasks
        self._roster = roster
        self._settings = settings
        self._probing: dict[Engine, asyncio.Task[None]] = {}
        self._firsts: dict[Engine, asyncio.Event] = {}
        """Of the same engines: set when the first probe is over."""

    def follow(self) -> None:
        """Engines that came are probed from now on, those that go no longer. Call it when the pool has changed."""
        wanted = {engine for engine in self._roster.all_engines() if engine.state.is_probed}
        for engine in self._probing.keys() - wanted:
            self._probing.pop(engine).cancel()
            self._firsts.pop(engine).set()
        for engine in wanted - self._probing.keys():
            self._firsts[engine] = asyncio.Event()
            self._probing[engine] = self._tasks.create_task(self._watch(engine), name=f"probes: {engine.name}")

    async def has_asked_all(self) -> None:
        """Each engine that is followed now has answered a probe, or let its time pass. Waits for it."""
        while waiting := [first for first in self._firsts.values() if not first.is_set()]:
            await waiting[0].wait()

    def stop(self) -> None:
        """No engine is probed any more."""
        for task in self._probing.values():
            task.cancel()

    async def _watch(self, engine: Engine) -> None:
        await watch_engine(
            engine,
            interval_s=self._settings.probe_interval_s,
            timeout_s=self._settings.probe_timeout_s,
            on_change=self._roster.refresh,
            first=self._firsts[engine],
        )


async def watch_engine(
    engine: Engine, *, interval_s: float, timeout_s: float, on_change: Callable[[], None], first: asyncio.Event
) -> None:
    """Probe one engine for ever. One task owns this. ``on_change``: its health is not what it was. ``first``: set when
    the first probe is over."""
    while True:
        is_healthy = await _probe(engine, timeout_s)
        if is_healthy != engine.is_healthy:
            engine.is_healthy = is_healthy
            state = "healthy" if is_healthy else "unhealthy"
            logger.info("engine %s role=%s engine=%s", state, engine.role.value, engine.name)
            on_change()
        first.set()
        await asyncio.sleep(interval_s)


async def _probe(engine: Engine, timeout_s: float) -> bool:
    try:
        answer = await engine.fetch("/health", timeout_s=timeout_s, is_probe=True)
    except Unavailable:
        return False
    return answer.head.status == 200

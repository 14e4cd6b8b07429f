"""Asks the engines in the background whether they are well, so that ``/health`` itself never waits.

A task of its own asks each engine that may get work, now or later, and each that leaves but still has a request. A
prefill engine that terminates may get work too: it is the last resort of its revision. An engine is healthy if it has
answered its last probe with 200 in time. Before it counts as healthy it is asked which models it serves, and later now
and then, for adapters come and go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pdcluster_protocol.errors import Unavailable
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.catalog import namesakes
from pdcluster_router.core.engines.listing import ReadList, read_list
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.outage import Sign
from pdcluster_router.core.engines.placement import serving_revisions
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Roster
from pdcluster_router.settings.router_settings import Settings

logger = logging.getLogger(__name__)

PROBES_FOR_LIST: Final = 30
"""Probes from one reading of an engine's models to the next, unless a client asks for a model that is not known: half a
minute where probes come each second. A reading costs an engine less than a millisecond."""
PROBES_FOR_UNKNOWN: Final = 5
"""The same after a client has asked for such a model, and for an engine that has not told its models. Whatever clients
ask for, engines must not feel it."""


def missing_engines(roster: Roster) -> str:
    """The engines that are missing; empty when there is one healthy engine of each role, of one revision.

    An engine that is not ready any more counts: requests go there if no better engine is left.
    """
    well = [engine for engine in roster.all_engines() if engine.state.was_ready and engine.is_healthy]
    missing = [role.value for role in Role if not any(engine.role is role for engine in well)]
    if missing:
        return f"no {' and no '.join(missing)} engine answers its /health"
    return "" if serving_revisions(well) else "no revision has a prefill and a decode engine that answer their /health"


def _may_get_work(engine: Engine) -> bool:
    is_last_resort = engine.role is Role.PREFILL and engine.state is EngineState.FINISHING
    return engine.state.is_probed or is_last_resort


class Probes:
    """One task for each engine that is worth asking, within the application's task group. Event loop only."""

    def __init__(
        self, tasks: asyncio.TaskGroup, roster: Roster, settings: Callable[[], Settings], engine_line: bytes = b""
    ) -> None:
        """``settings``: returns those that hold now. ``engine_line``: the header line with the engines' key; empty when
        they want none."""
        self._engine_line = engine_line
        self._tasks = tasks
        self._roster = roster
        self._settings = settings
        self._probing: dict[Engine, asyncio.Task[None]] = {}
        self._firsts: dict[Engine, asyncio.Event] = {}
        """One for each engine in ``_probing``: set when its first probe is over."""
        self._hiding: set[tuple[str, str]] = set()
        """The aliases, with the model of each, that an engine's own model was seen to have as its name."""

    def match_roster(self) -> None:
        """Begins to probe engines that came, and stops for those that went. Call it when the pool has changed."""
        wanted = {engine for engine in self._roster.all_engines() if _may_get_work(engine) or engine.is_busy}
        for engine in self._probing.keys() - wanted:
            self._probing.pop(engine).cancel()
            self._firsts.pop(engine).set()
        for engine in wanted - self._probing.keys():
            self._firsts[engine] = asyncio.Event()
            self._probing[engine] = self._tasks.create_task(self._watch(engine), name=f"probes: {engine.name}")

    async def has_asked_all(self) -> None:
        """Waits until each engine that is probed has answered a probe, or let its time pass."""
        while waiting := [first for first in self._firsts.values() if not first.is_set()]:
            await waiting[0].wait()

    def stop(self) -> None:
        """No engine is probed any more."""
        for task in self._probing.values():
            task.cancel()

    async def _watch(self, engine: Engine) -> None:
        """Probes one engine until it is cancelled. One task owns this."""
        first = self._firsts[engine]
        num_probes, num_unknown, slept_s = 0, 0, 0.0
        while True:
            timeout_s, interval_s = self._settings().probe_timeout_s, self._settings().probe_interval_s
            sign = await engine.probe(timeout_s=timeout_s)
            num_probes += 1
            is_known = engine.listing is not None and num_unknown == self._roster.num_unknown
            most = PROBES_FOR_LIST if is_known else PROBES_FOR_UNKNOWN
            if sign is Sign.WELL and (num_probes >= most or not engine.is_healthy):
                num_probes, num_unknown = 0, self._roster.num_unknown
                await self._read_models(engine)
            if engine.found(sign, most_s=timeout_s + max(slept_s, interval_s)):
                state = "healthy" if engine.is_healthy else "unhealthy"
                logger.info("engine %s role=%s engine=%s", state, engine.role.value, engine.name)
                self._roster.refresh()
            first.set()
            slept_s = interval_s
            await asyncio.sleep(slept_s)

    async def _read_models(self, engine: Engine) -> None:
        """Reads the models that the engine serves. If a healthy engine gives no list, its last one stays."""
        read = await self._listing_of(engine)
        if read.surplus and not engine.lists_too_much:
            logger.warning("engine lists too many models engine=%s reason=%s", engine.name, read.surplus)
        if read.surplus or read.listing is not None:
            engine.lists_too_much = bool(read.surplus)
        if read.listing is not None or not engine.is_healthy:
            self._roster.listed(engine, read.listing)
            self._tell_namesakes(engine)

    async def _listing_of(self, engine: Engine) -> ReadList:
        timeout_s = self._settings().probe_timeout_s
        try:
            answer = await engine.fetch("/v1/models", timeout_s=timeout_s, headers=self._engine_line)
        except Unavailable:
            return ReadList(None)
        return read_list(answer.body) if answer.head.status == 200 else ReadList(None)

    def _tell_namesakes(self, engine: Engine) -> None:
        """Logs each alias that hides a model of the engine's own, once."""
        aliases = self._settings().models_by_alias
        for alias in namesakes(aliases, [engine]):
            if (alias, aliases[alias]) not in self._hiding:
                self._hiding.add((alias, aliases[alias]))
                told = "alias hides a model alias=%s alias_of=%s engine=%s: clients that ask for it get alias_of"
                logger.warning(told, alias, aliases[alias], engine.name)

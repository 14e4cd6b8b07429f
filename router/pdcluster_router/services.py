"""What every request needs and shares: engines, running transfers, clock, metrics, trace. One per process.

Built by ``Router``; holds no rule about requests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.metaserver import Outcome
from pdcluster_protocol.params import DecodeParams, Reservation
from pdcluster_router.core.openai_errors import ApiError
from pdcluster_router.core.placement import LeastTokens, Policy, eligible
from pdcluster_router.cycle import HotCycle
from pdcluster_router.engine import Engine, Role
from pdcluster_router.metrics import Metrics
from pdcluster_router.pool import PoolLimits
from pdcluster_router.settings import Settings
from pdcluster_router.trace import TraceFile


class Running(Protocol):
    """A request that has not ended."""

    def reserve(self, reservation: Reservation, cycle: HotCycle) -> Outcome | None:
        """The outcome if it is known or the reservation is refused; None: ``cycle`` waits for it."""
        ...

    def stop(self, error: ApiError) -> None:
        """End it now; whoever waits for it gets ``error``."""
        ...


class Services:
    """Shared by all requests of one router. Event loop only; ``close`` ends what it started."""

    def __init__(self, settings: Settings) -> None:
        limits = PoolLimits(settings.max_engine_connections, settings.connect_timeout_s, settings.engine_idle_s)
        self.settings = settings
        self.engines = {
            Role.PREFILL: [Engine(Role.PREFILL, url, limits) for url in settings.prefill_urls],
            Role.DECODE: [Engine(Role.DECODE, url, limits) for url in settings.decode_urls],
        }
        self.metrics = Metrics()
        self.trace = TraceFile(settings.trace_file)
        self.transfers: dict[TransferId, Running] = {}
        """Requests by transfer id: what the metaserver can find."""
        self.running: set[Running] = set()
        self._policy: Policy = LeastTokens()
        self._metaserver_url = settings.metaserver_url
        self._loop = asyncio.get_running_loop()
        self.metrics.watch_in_flight(lambda: len(self.running))
        for engine in self.all_engines():
            self._watch(engine)

    def all_engines(self) -> list[Engine]:
        return [engine for engines in self.engines.values() for engine in engines]

    def place(self, role: Role, excluded: Sequence[Engine] = ()) -> Engine | None:
        """The engine of ``role`` for the next request; None when all of them are excluded."""
        engines = self.engines[role]
        if len(engines) == 1 and not excluded:
            return engines[0]
        indexes = eligible([engine.is_healthy for engine in engines], [engine in excluded for engine in engines])
        if not indexes:
            return None
        return engines[indexes[self._policy.choose([engines[index].load for index in indexes])]]

    def new_transfer_id(self) -> TransferId:
        """Never given before, and not to be guessed."""
        return TransferId(os.urandom(16).hex())

    def decode_params(self, transfer_id: TransferId, attempt: Attempt, deadline_ms: int) -> DecodeParams:
        return DecodeParams(
            metaserver=self._metaserver_url, transfer_id=transfer_id, attempt=attempt, deadline_ms=deadline_ms
        )

    def now(self) -> float:
        """Monotonic seconds. Not the loop's own time: uvloop's has steps of a millisecond."""
        return time.monotonic()

    def call_at(self, deadline: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """``callback`` at ``deadline``, or a little before: it must look at the clock."""
        return self._loop.call_later(max(0.0, deadline - time.monotonic()), callback)

    async def close(self) -> None:
        for engine in self.all_engines():
            await engine.close()
        self.trace.close()

    def _watch(self, engine: Engine) -> None:
        self.metrics.watch_engine(engine.role.value, engine.url, lambda: float(engine.is_healthy))

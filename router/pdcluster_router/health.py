"""Whether the engines are well: asked in the background, so that ``/health`` itself never waits.

Each engine has one task. A probe that finds no answer in time makes its engine unhealthy until one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_protocol.errors import Unavailable
from pdcluster_router.engine import Engine, Role
from pdcluster_router.services import Services

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """``missing``: roles without one healthy engine."""

    missing: tuple[Role, ...]

    @property
    def is_ok(self) -> bool:
        return not self.missing


def health_of(services: Services) -> Health:
    """One healthy engine of each role is enough."""
    roles = services.engines.items()
    return Health(tuple(role for role, engines in roles if not any(engine.is_healthy for engine in engines)))


async def watch_engine(engine: Engine, *, interval_s: float, timeout_s: float, on_change: Callable[[], None]) -> None:
    """Probe one engine for ever. One task owns this. ``on_change``: its health is not what it was."""
    while True:
        is_healthy = await _probe(engine, timeout_s)
        if is_healthy != engine.is_healthy:
            engine.is_healthy = is_healthy
            state = "healthy" if is_healthy else "unhealthy"
            logger.info("engine %s role=%s engine=%s", state, engine.role.value, engine.name)
            on_change()
        await asyncio.sleep(interval_s)


async def _probe(engine: Engine, timeout_s: float) -> bool:
    try:
        answer = await engine.fetch("/health", timeout_s=timeout_s)
    except Unavailable:
        return False
    return answer.head.status == 200

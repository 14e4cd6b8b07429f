"""The internal port's pages of a router with one process or with several: then each is a sum over all of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import msgspec

from pdcluster_protocol.kept import KeptAnswer
from pdcluster_protocol.pool_page import PoolPage
from pdcluster_protocol.status_page import StatusPage
from pdcluster_router.core.processes.page_sums import joined_answers, joined_pools, joined_status
from pdcluster_router.front.engines_page import describe_pool
from pdcluster_router.front.requests_page import answer_about
from pdcluster_router.front.router import Router
from pdcluster_router.front.status_page import NUM_RECENT, describe_status
from pdcluster_router.processes.seat import Seat
from pdcluster_router.processes.siblings import METRICS, Siblings

logger = logging.getLogger(__name__)

P = TypeVar("P")
_POOL: Final = "pool"
_STATUS: Final = "status"
_REQUESTS: Final = "requests"
_MOST_BY_FATE: Final = {fate.value: num for fate, num in NUM_RECENT.items()}


@asynccontextmanager
async def beside_siblings(router: Router, seat: Seat | None) -> AsyncIterator[None]:
    """The router's processes answer each other until the context ends, if there are several."""
    if seat is None:
        yield
        return
    siblings = Siblings(seat.folder, seat.life, partial(_own_page, router))
    await siblings.open()
    router.siblings = siblings
    try:
        yield
    finally:
        router.siblings = None
        await siblings.close()


async def metrics(router: Router) -> bytes:
    """The metrics in Prometheus' text format."""
    if router.siblings is None:
        return router.services.metrics.render()
    return await router.siblings.metrics()


async def pool(router: Router) -> PoolPage:
    """Every engine, and the requests there."""
    if router.siblings is None:
        return describe_pool(router.services)
    return joined_pools(_decoded(await router.siblings.ask_all(_POOL), PoolPage))


async def status(router: Router) -> bytes:
    """The document of the status page, JSON."""
    if router.siblings is None:
        return describe_status(router.services)
    pages = _decoded(await router.siblings.ask_all(_STATUS), StatusPage)
    return msgspec.json.encode(joined_status(pages, _MOST_BY_FATE))


async def requests_named(router: Router, name: str) -> bytes:
    """The requests with this id that are remembered, JSON."""
    if router.siblings is None:
        return answer_about(router, name)
    return msgspec.json.encode(joined_answers(_decoded(await router.siblings.ask_all(_REQUESTS, name), KeptAnswer)))


def _decoded(pages: Sequence[bytes], kind: type[P]) -> list[P]:
    """The pages, without those that a process of another release has written in another form."""
    found = []
    for page in pages:
        try:
            found.append(msgspec.json.decode(page, type=kind))
        except msgspec.DecodeError as error:
            logger.warning("the page of another process cannot be read reason=%s", error)
    return found


def _own_page(router: Router, page: str, argument: str) -> bytes:
    """The page of this process alone. Raises: ValueError: There is no such page."""
    pages: dict[str, Callable[[], bytes]] = {
        METRICS: router.services.metrics.render,
        _POOL: lambda: msgspec.json.encode(describe_pool(router.services)),
        _STATUS: lambda: describe_status(router.services),
        _REQUESTS: lambda: answer_about(router, argument),
    }
    if page not in pages:
        raise ValueError(f"no page {page}")
    return pages[page]()

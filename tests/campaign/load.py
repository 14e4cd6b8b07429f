"""The clients of a campaign: a steady stream of requests, a bounded number at a time, each judged when it has ended.

A fault begins with the request that its schedule names. While the router is away with our knowledge no new request is
sent: a thousand refused connections would say nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeAlias

from campaign.build import REQUEST_TIMEOUT_S
from campaign.client import Order, ask
from campaign.cluster import Member
from campaign.findings import Ended
from campaign.outcomes import judge
from campaign.questions import Answer, Question
from campaign.schedule import Fault

MARGIN_S: Final = 15.0
"""Past its deadline a request is hung. More than the longest SIGSTOP of a router, and a slow machine's delays."""
_POLL_S: Final = 0.05

Inject: TypeAlias = Callable[[Fault], Coroutine[Any, Any, None]]
"""Does what a fault says; back when it is over."""


class Load:
    """Asks the router, and judges. One event loop owns it."""

    def __init__(self, router: Member, expected: Mapping[Question, Answer], name: str) -> None:
        self.ended: list[Ended] = []
        self._router = router
        self._expected = expected
        self._name = name

    async def run(self, orders: Sequence[Order], concurrency: int, faults: Sequence[Fault], inject: Inject) -> None:
        """Every order has ended, and so has every fault."""
        at_request = {fault.at_request: fault for fault in faults}
        room = asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as tasks:
            for order in orders:
                await room.acquire()
                if fault := at_request.get(order.index):
                    tasks.create_task(inject(fault))
                await asyncio.sleep(order.gap_s)
                await self._wait_for_router()
                tasks.create_task(self._one(order, room))

    async def run_all(self, orders: Sequence[Order], *, concurrency: int) -> None:
        """Every order has ended; ``concurrency`` at a time, as fast as they go."""
        room = asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as tasks:
            for order in orders:
                await room.acquire()
                tasks.create_task(self._one(order, room))

    async def _one(self, order: Order, room: asyncio.Semaphore) -> None:
        try:
            self.ended.append(await self.ask(order, self._router.port))
        finally:
            room.release()

    async def ask(self, order: Order, port: int) -> Ended:
        """The end of one request at any port."""
        begin, request_id = time.monotonic(), f"{self._name}-{order.index}"
        give_up_s = min(order.timeout_s or REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S) + MARGIN_S
        observed = await ask(port, order, request_id, give_up_s=give_up_s)
        end = time.monotonic()
        is_lost = self._router.was_out(begin, end)
        expected = self._expected[order.question]
        verdict = judge(expected, observed, is_stream=order.is_stream, is_router_lost=is_lost)
        return Ended(order, request_id, verdict, begin, end)

    async def _wait_for_router(self) -> None:
        while self._router.out_since is not None:
            await asyncio.sleep(_POLL_S)

"""Clients that ask a pool all the time, and judge every answer. Questions and verdicts are the fault campaign's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from campaign.client import Order, ask
from campaign.outcomes import End, Verdict, judge
from campaign.questions import Answer, Question

CLIENTS: Final = 4
CROWD: Final = 8
_CROWD_WHOLE_EVERY: Final = 4
ONE_IS_A_STREAM: Final = CROWD // _CROWD_WHOLE_EVERY + 1
"""Of so many answers of a crowd at the same time one is a stream: each client takes either whole answers or streams."""
GIVE_UP_S: Final = 120.0
"""Far above what the slowest answer takes here: nobody hangs by accident."""
PAUSE_S: Final = 0.25
"""Clients without rest would take both cores from the engine that starts meanwhile."""
FINE: Final = (End.OK,)


@dataclass(frozen=True, slots=True)
class Told:
    """One request. Times in seconds of the monotonic clock."""

    request_id: str
    began_at: float
    ended_at: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Place:
    """Where the pool answers."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def crowd(place: Place, expected: Mapping[Question, Answer]) -> Load:
    """Many clients without rest, so that whoever is killed has work in its hands. Three of four answers are streams."""
    return Load(place, expected, clients=CROWD, pause_s=0.0, whole_every=_CROWD_WHOLE_EVERY)


class Load:
    """Clients that ask the next question when they have their answer. One answer of ``whole_every`` comes whole, the
    others are streams."""

    def __init__(
        self,
        place: Place,
        expected: Mapping[Question, Answer],
        clients: int = CLIENTS,
        pause_s: float = PAUSE_S,
        whole_every: int = 2,
    ) -> None:
        self._place = place
        self._expected = [*expected.items()]
        self._clients = clients
        self._pause_s = pause_s
        self._whole_every = whole_every
        self._told: list[Told] = []
        self._stopped = threading.Event()
        self._router_lost = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> list[Told]:
        """Every request that was begun, ended. Waits for the last answers."""
        self._stopped.set()
        self._thread.join()
        return [*self._told]

    def forgive_router(self) -> None:
        """From now on a cut without a word is a killed router's (``End.ROUTER_LOST``)."""
        self._router_lost.set()

    def resent_router(self) -> None:
        """The opposite."""
        self._router_lost.clear()

    def is_stream(self, turn: int) -> bool:
        """Whether the answer to this turn's question comes as a stream."""
        return turn % self._whole_every != 0

    def wait_for(self, more: int, limit_s: float) -> None:
        """So many requests more have ended well.

        Raises:
            TimeoutError: They have not within ``limit_s``.
        """
        wanted = self._num_fine() + more
        deadline = time.monotonic() + limit_s
        while self._num_fine() < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {more} answers within {limit_s:.0f} s; so far {summary(self._told)}")
            time.sleep(0.1)

    def _num_fine(self) -> int:
        return sum(told.verdict.end in FINE for told in self._told)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for client in range(self._clients):
                tasks.create_task(self._client(client))

    async def _client(self, client: int) -> None:
        turn = client
        while not self._stopped.is_set():
            await self._ask(f"e2e-{client}-{turn}", turn)
            turn += self._clients
            await asyncio.sleep(self._pause_s)

    async def _ask(self, request_id: str, turn: int) -> None:
        question, expected = self._expected[turn * 7 % len(self._expected)]
        order = Order(turn, question, is_stream=self.is_stream(turn))
        began_at, was_lost = time.monotonic(), self._router_lost.is_set()
        observed = await ask(self._place.port, order, request_id, give_up_s=GIVE_UP_S, host=self._place.host)
        is_lost = was_lost or self._router_lost.is_set()
        verdict = judge(expected, observed, is_stream=order.is_stream, is_router_lost=is_lost)
        self._told.append(Told(request_id, began_at, time.monotonic(), verdict))


def summary(told: list[Told]) -> str:
    """``412 ok, 1 error (503 no_decode)``."""
    ends = Counter((one.verdict.end.value, one.verdict.code) for one in told)
    return ", ".join(f"{number} {end}{f' ({code})' if code else ''}" for (end, code), number in ends.most_common())


def lost(told: list[Told], *allowed: End) -> list[str]:
    """Those that ended in no way that is ``allowed`` or fine, as sentences."""
    ways = (*FINE, *allowed)
    bad = [one for one in told if one.verdict.end not in ways]
    return [f"{one.request_id}: {one.verdict.end.value} {one.verdict.code} {one.verdict.detail}" for one in bad]

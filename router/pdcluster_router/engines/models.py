"""The list of models: a decode engine's own, asked for by one call at a time and remembered for some seconds.

Where decode engines serve different models, it is one list of them all. A client may ask for it as often as it likes:
engines must not feel it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final
from weakref import WeakKeyDictionary

from pdcluster_protocol.errors import NO_JSON, Unavailable
from pdcluster_router.core.apis.openai_errors import NO_DECODE
from pdcluster_router.core.engines.catalog import lists_that_differ
from pdcluster_router.core.engines.listing import joined, read_listing, with_aliases
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Roster
from pdcluster_router.http.answers import Fetched

TIMEOUT_S: Final = 10.0
"""Seconds for one engine. No request on the hot path waits for it."""
KEPT_S: Final = 5.0
"""Seconds for which a list is kept: a newly loaded adapter is seen within this time."""
_MAX_KEPT: Final = 16
"""The most lists kept of one engine: one for each key that was sent with the question."""


class Models:
    """The models that decode engines serve. Event loop only."""

    def __init__(
        self, roster: Roster, now: Callable[[], float], aliases: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """``now``: monotonic seconds. ``aliases``: the model of each."""
        self._aliases = aliases
        self._roster = roster
        self._now = now
        self._lists: WeakKeyDictionary[Engine, _ModelLists] = WeakKeyDictionary()
        self._joined: tuple[list[Fetched], Fetched] | None = None
        """The answers that were joined last, and the joined one. Kept, because to scan them takes milliseconds."""
        self._renamed: tuple[Fetched, Fetched] | None = None
        """The answer to which aliases were added last, and the one with them."""

    def set_aliases(self, aliases: Mapping[str, str]) -> None:
        """``aliases`` hold from now on: the model of each."""
        self._aliases, self._renamed = aliases, None

    async def read(self, line: bytes) -> Fetched:
        """An engine's answer; where engines list different models, one answer made of theirs. Aliases are added.
        ``line``: the header with a key, which the engine may want; empty for none.

        Raises:
            Unavailable: No decode engine answers.
        """
        answer = await self._read(line)
        if not self._aliases or answer.head.status != 200:
            return answer
        if self._renamed is None or self._renamed[0] is not answer:
            self._renamed = answer, _with_aliases(answer, self._aliases)
        return self._renamed[1]

    async def _read(self, line: bytes) -> Fetched:
        well = [engine for engine in self._roster.all_engines() if engine.is_healthy and engine.state.is_probed]
        different = lists_that_differ(well)
        return await self._read_one(line) if len(different) <= 1 else await self._read_all(different, line)

    async def _read_all(self, different: list[list[Engine]], line: bytes) -> Fetched:
        """The lists of all engines that answer, in one. A list that cannot be read is left out."""
        asked = [self._ask_or_none(engines[0], line) for engines in different]
        answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        if self._joined is None or [*map(id, self._joined[0])] != [*map(id, answers)]:
            lists = [answer for answer in answers if answer.head.status == 200 and read_listing(answer.body)]
            if not lists:
                return await self._read_one(line)
            self._joined = answers, Fetched(lists[0].head, joined([answer.body for answer in lists]))
        return self._joined[1]

    async def _ask_or_none(self, engine: Engine, line: bytes) -> Fetched | None:
        try:
            return await self._ask(engine, line)
        except Unavailable:
            return None

    async def _read_one(self, line: bytes) -> Fetched:
        tried: list[Engine] = []
        reason = NO_DECODE
        while (engine := self._roster.other_decode(tried)) is not None:
            tried.append(engine)
            try:
                return await self._ask(engine, line)
            except Unavailable as error:
                reason = str(error)
        raise Unavailable(reason)

    async def _ask(self, engine: Engine, line: bytes) -> Fetched:
        lists = self._lists.setdefault(engine, _ModelLists())
        if known := lists.find(line, self._now()):
            return known  # It does not wait behind questions with other keys.
        try:
            async with asyncio.timeout(TIMEOUT_S), lists.lock:
                known = lists.find(line, self._now())
                return known or await self._fetch(engine, line, lists)
        except TimeoutError as error:
            raise Unavailable(f"{engine.name} sent no list of models within {TIMEOUT_S:g} s") from error

    async def _fetch(self, engine: Engine, line: bytes, lists: _ModelLists) -> Fetched:
        answer = await engine.fetch("/v1/models", timeout_s=TIMEOUT_S, headers=line)
        if answer.head.status == 200:
            lists.keep(line, answer, until=self._now() + KEPT_S)
        return answer


def _with_aliases(answer: Fetched, aliases: Mapping[str, str]) -> Fetched:
    try:
        return Fetched(answer.head, with_aliases(answer.body, aliases))
    except NO_JSON:
        return answer  # It is for the client to read.


class _ModelLists:
    """The lists of one engine. ``lock``: only its holder may ask the engine."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._kept: dict[bytes, tuple[float, Fetched]] = {}

    def find(self, line: bytes, now: float) -> Fetched | None:
        until, answer = self._kept.get(line, (now, None))
        return answer if now < until else None

    def keep(self, line: bytes, answer: Fetched, *, until: float) -> None:
        self._kept.pop(line, None)
        while len(self._kept) >= _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[line] = (until, answer)

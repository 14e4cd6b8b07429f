"""Compares the caches with the API server: at the start, every ``resync_s`` after that, and when a watch began anew.

It drops objects whose deletion no watch has told (see ``caches``). It also finds out when a watch has gone blind: two
comparisons in a row find an object that no event has told of. A list that began after a view was there, and does not
show the object, proves that the object is gone, for lists are read from the newest state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.errors import KubeError
from pdcluster_operator.http_kube import HttpKube, Listed
from pdcluster_operator.kinds import Kind, selector_of

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_GATHER_S: Final = 1.0
"""After a restart of the API server all watches begin anew, one after the other: not a comparison for each object."""
_MAX_WAIT_S: Final = 60.0
"""Between tries that fail."""


class Auditor:
    """One task runs ``run``; anybody may ask what it found."""

    def __init__(
        self,
        kube: HttpKube,
        caches: Caches,
        kinds: Iterable[Kind],
        namespaces: Iterable[str | None],
        *,
        interval_s: float,
        on_news: Callable[[Key], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``sleep`` takes seconds. The auditor calls it before it drops what is gone, never for its own pause."""
        self._kube = kube
        self._caches = caches
        self._where: Final = [(kind, namespace) for kind in kinds for namespace in namespaces]
        self._interval_s = interval_s
        self._on_news = on_news
        self._sleep = sleep
        self._unseen: frozenset[str] | None = None
        """Of the comparison before. None: there was none."""
        self.is_complete = False
        """Whether the caches have once shown everything that there is."""
        self.blind_to: frozenset[str] = frozenset()
        """Uids that two comparisons in a row have found and no watch has shown."""
        self._is_suspicious = asyncio.Event()

    def suspect(self) -> None:
        """A watch began anew with a list: it does not tell what went before it. Objects that are gone are looked for
        soon."""
        self._is_suspicious.set()

    async def run(self) -> None:
        """Until it is cancelled. Often until the caches are complete, then now and then."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._try(self.compare)
            pause_s = self._interval_s if self.is_complete else min(2 * pause_s, self._interval_s)
            await self._watch_out(pause_s * random.uniform(0.9, 1.1))  # noqa: S311 - spreads load

    async def compare(self) -> None:
        """Once, all kinds.

        Raises:
            KubeError: A list failed; nothing is known of what comes after it.
        """
        unseen: set[str] = set()
        for kind, namespace in self._where:
            unseen |= await self._compare(kind, namespace)
        # News of an object that is new since the last time may still be on its way: on a busy cluster some always is.
        still_unseen = unseen if self._unseen is None else unseen & self._unseen
        self.blind_to = frozenset(still_unseen) if self.is_complete else frozenset()
        self._unseen = frozenset(unseen)
        self.is_complete = self.is_complete or not still_unseen
        if self.blind_to:
            logger.error("watches are blind objects=%d", len(self.blind_to))

    async def drop_gone(self) -> None:
        """The caches show nothing that is gone. It says nothing of blindness: watches may just be catching up.

        Raises:
            KubeError: As ``compare``.
        """
        for kind, namespace in self._where:
            await self._compare(kind, namespace)

    async def _watch_out(self, pause_s: float) -> None:
        """Pause, and drop what is gone whenever there is a reason to."""
        wait_s = _GATHER_S
        try:
            async with asyncio.timeout(pause_s):
                while True:
                    await self._is_suspicious.wait()
                    await self._sleep(wait_s)
                    self._is_suspicious.clear()
                    is_done = await self._try(self.drop_gone)
                    wait_s = _GATHER_S if is_done else min(2 * wait_s, _MAX_WAIT_S)
        except TimeoutError:
            return

    async def _try(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether it was done. Else it is suspected that something is gone."""
        try:
            await work()
        except KubeError as error:
            logger.warning("caches not compared reason=%s", error)
            self.suspect()
            return False
        return True

    async def _compare(self, kind: Kind, namespace: str | None) -> set[str]:
        """Drops what is gone. Returns uids of what the caches do not show."""
        before = [view for view in self._caches.of_kind(kind) if namespace in (None, view.ref.namespace)]
        listed = await self._kube.list_metadata(kind, namespace, selector_of(kind))
        there = _uids(listed)
        for view in before:
            if view.uid not in there and (key := self._caches.drop(view.ref, view.uid)):
                logger.warning("watch missed a deletion object=%s", view.ref)
                self._on_news(key)
        return _uids(listed) - {view.uid for view in self._caches.of_kind(kind)}


def _uids(listed: Iterable[Listed]) -> set[str]:
    return {one.uid for one in listed}

"""Compares the caches with the API server: at the start, every ``resync_s`` after that, and when a watch began anew.

The auditor drops objects whose deletion no watch has reported (see ``caches``). It also finds out whether a
watch has gone blind. That is so if two comparisons in a row find an object that no event has reported. Lists are read
from the newest state. So an object that was in the caches before a list began, and is not in that list, is gone.
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
_MAX_FIRST_PAUSE_S: Final = 10.0
"""Seconds between two comparisons at most until the caches are complete: a replica that waits for it leads nothing."""
_GATHER_S: Final = 1.0
"""Seconds to wait before ``drop_gone``: if the API server restarts, all watches begin anew, and one call is enough."""
_MAX_WAIT_S: Final = 60.0
"""The longest wait after tries of ``drop_gone`` that failed, in seconds."""


class Auditor:
    """The comparisons and what they found. One task runs ``run``; any task may read the findings."""

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
        """``sleep`` takes seconds. It makes the waits before ``drop_gone``, not the pauses between comparisons."""
        self._kube = kube
        self._caches = caches
        self._where: Final = [(kind, namespace) for kind in kinds for namespace in namespaces]
        self._interval_s = interval_s
        self._on_news = on_news
        self._sleep = sleep
        self._unseen: frozenset[str] | None = None
        """Uids that the last comparison found and the caches did not show. None: no comparison was made yet."""
        self._completed = asyncio.Event()
        self.blind_to: frozenset[str] = frozenset()
        """Uids that two comparisons in a row have found and no watch has shown."""
        self.trouble = ""
        """Why the last comparison failed; empty: it did not."""
        self._is_suspicious = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether the caches have once caught up with the API server."""
        return self._completed.is_set()

    async def wait_until_complete(self) -> None:
        """Return when the caches have caught up with the API server. May wait for ever."""
        await self._completed.wait()

    def suspect(self) -> None:
        """A watch began anew with a list, which does not tell of deletions before it. ``run`` looks for them soon."""
        self._is_suspicious.set()

    async def run(self) -> None:
        """Compare until cancelled: often until the caches are complete, then every ``interval_s``."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._try(self.compare)
            pause_s = self._interval_s if self.is_complete else min(2 * pause_s, _MAX_FIRST_PAUSE_S, self._interval_s)
            await self._watch_out(pause_s * random.uniform(0.9, 1.1))  # noqa: S311 - spreads load

    async def compare(self) -> None:
        """Compare all kinds once.

        Raises:
            KubeError: A list failed. All others were compared, but blindness was not judged.
        """
        unseen = await self._compare_all()
        # On a busy cluster the event of some new object is always still on its way. So an object counts as unseen only
        # if two comparisons in a row have missed it.
        still_unseen = unseen if self._unseen is None else unseen & self._unseen
        self.blind_to = frozenset(still_unseen) if self.is_complete else frozenset()
        self._unseen = frozenset(unseen)
        if not still_unseen:
            self._completed.set()
        if self.blind_to:
            logger.error("watches are blind objects=%d", len(self.blind_to))

    async def drop_gone(self) -> None:
        """Drop from the caches each object that is gone. Does not judge blindness: watches may just be catching up.

        Raises:
            KubeError: A list failed. All others were compared.
        """
        await self._compare_all()

    async def _watch_out(self, pause_s: float) -> None:
        """Pause for ``pause_s`` seconds. When ``suspect`` was called, call ``drop_gone`` meanwhile."""
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
        """Do ``work``. Returns whether it succeeded; if not, ``drop_gone`` is called soon."""
        try:
            await work()
        except KubeError as error:
            logger.warning("caches not compared reason=%s", error)
            self.trouble = str(error)
            self.suspect()
            return False
        self.trouble = ""
        return True

    async def _compare_all(self) -> set[str]:
        """Compare each kind in each namespace, also after a list that failed: a namespace may be gone for good.

        Raises:
            KubeError: The first error, when all have been compared.
        """
        unseen: set[str] = set()
        failures: list[KubeError] = []
        for kind, namespace in self._where:
            try:
                unseen |= await self._compare(kind, namespace)
            except KubeError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return unseen

    async def _compare(self, kind: Kind, namespace: str | None) -> set[str]:
        """Drop objects that are gone. Returns uids of listed objects that the caches do not show."""
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

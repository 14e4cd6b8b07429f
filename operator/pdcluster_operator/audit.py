"""Compares the caches with the API server: at the start, and every ``resync_s`` after that.

Drops what a watch did not tell the end of (see ``caches``), and finds out when a watch has gone blind: an object that
two comparisons in a row found and no event told of. A list that began after a view was there and does not show it
proves that the object is gone, for lists are read from the newest state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Final

from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.errors import KubeError
from pdcluster_operator.handlers import selector_of
from pdcluster_operator.kinds import Kind
from pdcluster_operator.kube import Kube, Listed

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5


class Auditor:
    """One task runs ``run``; anybody may ask what it found."""

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        kinds: Iterable[Kind],
        namespaces: Iterable[str | None],
        *,
        interval_s: float,
        on_news: Callable[[Key], None],
    ) -> None:
        self._kube = kube
        self._caches = caches
        self._where: Final = [(kind, namespace) for kind in kinds for namespace in namespaces]
        self._interval_s = interval_s
        self._on_news = on_news
        self._unseen: frozenset[str] | None = None
        """Of the comparison before. None: there was none."""
        self.is_complete = False
        """Whether the caches have once shown everything that there is."""
        self.blind_to: frozenset[str] = frozenset()
        """Uids that two comparisons in a row have found and no watch has shown."""

    async def run(self) -> None:
        """Until it is cancelled. Often until the caches are complete, then now and then."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._try_to_compare()
            pause_s = self._interval_s if self.is_complete else min(2 * pause_s, self._interval_s)
            await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))  # noqa: S311 - spreads load

    async def compare(self) -> None:
        """Once, all kinds.

        Raises:
            KubeError: A list failed; nothing is known of what comes after it.
        """
        unseen: set[str] = set()
        for kind, namespace in self._where:
            unseen |= await self._compare(kind, namespace)
        # What is new since the last time may still be on its way: on a busy cluster something always is.
        still_unseen = unseen if self._unseen is None else unseen & self._unseen
        self.blind_to = frozenset(still_unseen) if self.is_complete else frozenset()
        self._unseen = frozenset(unseen)
        self.is_complete = self.is_complete or not still_unseen
        if self.blind_to:
            logger.error("watches are blind objects=%d", len(self.blind_to))

    async def _try_to_compare(self) -> None:
        try:
            await self.compare()
        except KubeError as error:
            logger.warning("caches not compared error=%s", error)

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

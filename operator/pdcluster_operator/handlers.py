"""What kopf is asked to watch, and what becomes of each event: a view in the caches, and a key in the queue.

Of kopf's stages only two are used. Its indexing stage runs for all objects of all kinds before any event handler does:
there views are put into the caches, so that no look sees a part of a picture. Its event handlers then say whose
PDCluster has news. kopf's other handlers (create, update, delete) are edge-triggered and keep state in annotations.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import kopf

from pdcluster_kube.access import Access
from pdcluster_kube.session import open_session
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.views import view_of
from pdcluster_operator.kinds import PDCLUSTER, Kind, ref_of
from pdcluster_protocol.labels import MANAGED_BY, MANAGER

USER_AGENT: Final = "pdcluster-operator"
OURS: Final = f"{MANAGED_BY}={MANAGER}"
"""Label selector of everything that the operator makes."""

_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0


def selector_of(kind: Kind) -> str:
    """Which objects of a kind are watched: all PDClusters, and of others those that are ours."""
    return "" if kind == PDCLUSTER else OURS


class Handlers:
    """Event loop only. ``on_news``: told whose PDCluster to look at. ``on_list``: told of each object that a list
    showed: at the start, and when a watch begins anew because its history is gone."""

    def __init__(self, caches: Caches, on_news: Callable[[Key], None], on_list: Callable[[], None]) -> None:
        self._caches = caches
        self._on_news = on_news
        self._on_list = on_list
        self._news: dict[str, Key] = {}
        """By uid, what the indexing stage found and the event stage has not told yet."""
        self.is_warm = False
        """Whether every kind was listed: only then kopf calls an event handler."""

    async def keep(self, body: kopf.Body, **_: Any) -> None:
        """Indexing stage: not for deletions. Returns nothing, so kopf itself stores nothing."""
        view = view_of(dict(body))
        if key := self._caches.put(view):
            self._news[view.uid] = key

    async def tell(self, body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002 - kopf's own name
        """Event stage."""
        self.is_warm = True
        if type is None:  # kopf's word for "listed"; of deletions that it missed it says nothing.
            self._on_list()
        uid = str(body["metadata"]["uid"])
        key = self._news.pop(uid, None)
        if type == "DELETED":
            key = self._caches.drop(ref_of(dict(body)), uid) or key
        if key:
            self._on_news(key)


def make_registry(handlers: Handlers, kinds: Iterable[Kind], access: Access) -> kopf.OperatorRegistry:
    """All that kopf has to know of us."""
    registry = kopf.OperatorRegistry()

    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=access.url, aiohttp_session=open_session(access, USER_AGENT))

    kopf.on.login(registry=registry, id="log_in")(log_in)
    for kind in kinds:
        group, version, plural = kind.group, kind.version, kind.plural
        kopf.index(group, version, plural, registry=registry, id=f"keep-{plural}")(handlers.keep)
        kopf.on.event(group, version, plural, registry=registry, id=f"tell-{plural}")(handlers.tell)
    return registry


def make_kopf_settings(kinds: Iterable[Kind], *, timeout_s: float, silence_s: float) -> kopf.OperatorSettings:
    """``timeout_s``: seconds for a list, and to connect for a watch. ``silence_s``: after which a watch begins anew."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # To watch CRDs and namespaces would need rights on the whole cluster.
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.networking.error_backoffs = _Pauses()
    settings.networking.connect_timeout = timeout_s
    settings.networking.request_timeout = 6 * timeout_s
    settings.watching.inactivity_timeout = silence_s
    for kind in kinds:
        if selector := selector_of(kind):
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing is remembered of an object. kopf's own storage copies each one that a watch shows, twice, for handlers
    of changes: we have none, and a quarter of a millisecond for each event is more than our look takes of it."""

    def build(self, **_: object) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        """Only handlers of changes have it done."""


class _Pauses:
    """Seconds between tries of a list or watch, without end: an operator that gives up watching is of no use."""

    def __iter__(self) -> Iterator[float]:
        ceiling = _FIRST_PAUSE_S
        while True:
            yield ceiling * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load
            ceiling = min(_MAX_PAUSE_S, 2 * ceiling)

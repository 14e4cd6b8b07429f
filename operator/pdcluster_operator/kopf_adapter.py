"""Connects kopf's watches to the caches and the work queue. The operator uses nothing else of kopf.

No other file imports kopf. At start kopf runs its indexing stage for all objects of all kinds before it calls any event
handler. The indexing stage puts views into the caches, so every reconcile sees the whole picture. The event handlers
then say which PDCluster has news.

Switched off, or replaced:

    what of kopf                            why
    create, update and delete handlers      edge-triggered; they keep state in annotations of the user's objects
    finalizers, daemons, timers             a PDCluster could not be deleted while no operator runs
    the storage of its indexes              keeps objects that were deleted in a gap of a watch: ``caches``, ``audit``
    diffs (``_NoDiffs``)                    copies every object twice for each event, for handlers that we do not have
    Events (``posting``)                    ours name a reason of the status, and only the leader sends them
    peering (``standalone``), its identity  two equal replicas both freeze; ``leader`` holds a Lease
    its probe                               answers 200 as long as the event loop turns: ``health_server``
    scanning for CRDs and namespaces        needs rights on the whole cluster; ``replica`` asks for the kinds itself
    pauses after errors (``_Pauses``)       end after some tries; an operator that gives up watching is of no use
    signal handlers (``on_spawned``)        would end the watches before our term has ended
    waiting for tasks (``_Everything``)     would wait for, and cancel, tasks that are ours
    the limit on its exit                   ``replica`` has one for the whole process
    parsing (``_Parsing``)                  ends all watches at an object that is nested too deep for Python
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import kopf
from kopf._cogs.clients import api as kopf_api

from pdcluster_kube.access import ApiAccess
from pdcluster_kube.backoff import Backoff
from pdcluster_kube.documents import decode_document
from pdcluster_kube.session import NO_LIMIT, open_session
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.seen.object_views import view_of
from pdcluster_operator.kinds import Kind, ref_of, selector_of
from pdcluster_operator.settings import Settings

USER_AGENT: Final = "pdcluster-operator"

STOP_S: Final = 10.0
"""Seconds for kopf's watches to end."""
_BACKOFF: Final = Backoff(first_s=0.5, most_s=30.0)


class _Parsing:
    """Stands for the module ``json`` in kopf's client (kopf 1.45 ``clients/api.py``, ``stream``)."""

    loads = staticmethod(decode_document)


setattr(kopf_api, "json", _Parsing)  # noqa: B010  # kopf's own is typed as the module


class Handlers:
    """kopf's handlers. Event loop only.

    ``on_news``: told which PDCluster to look at. ``on_list``: called for each object that a list shows: at the start,
    and when a watch begins anew because its history is gone.
    """

    def __init__(self, caches: Caches, on_news: Callable[[Key], None], on_list: Callable[[], None]) -> None:
        self._caches = caches
        self._on_news = on_news
        self._on_list = on_list
        self._news: dict[str, Key] = {}
        """PDClusters with news, by uid of the object: found by the indexing stage, not yet told by the event stage."""
        self.is_warm = False
        """Whether every kind was listed: kopf calls no event handler before that."""

    async def keep(self, body: kopf.Body, **_: Any) -> None:
        """kopf's indexing stage: keep the view. Not called for deletions. Returns nothing, so kopf stores nothing."""
        view = view_of(dict(body))
        if key := self._caches.put(view):
            self._news[view.uid] = key

    async def tell(self, body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002 - kopf's own name
        """kopf's event stage: say which PDCluster has news."""
        self.is_warm = True
        if type is None:  # kopf's word for "listed". A list does not tell of missed deletions.
            self._on_list()
        uid = str(body["metadata"]["uid"])
        key = self._news.pop(uid, None)
        if type == "DELETED":
            key = self._caches.drop(ref_of(dict(body)), uid) or key
        if key:
            self._on_news(key)


@asynccontextmanager
async def running_watches(
    handlers: Handlers,
    kinds: Iterable[Kind],
    namespaces: Sequence[str],
    settings: Settings,
    access: ApiAccess,
    on_spawned: Callable[[], None],
) -> AsyncIterator[asyncio.Task[None]]:
    """kopf's watches run in the yielded task until the block ends.

    ``namespaces``: empty means all of the cluster. ``on_spawned``: called when kopf has taken the process's signals.
    """
    stop = asyncio.Event()
    # Without an identity kopf asks the system for our user's name, and most images have none. kopf needs the identity
    # for peering alone, which is off. Any: the type of kopf's argument, a NewType of str, is not public.
    own_name: Any = settings.identity
    tasks = await kopf.spawn_tasks(
        registry=_make_registry(handlers, kinds, access),
        settings=make_kopf_settings(kinds, timeout_s=settings.call_timeout_s, silence_s=settings.watch_silence_s),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        identity=own_name,
        stop_flag=stop,
    )
    on_spawned()
    watching = asyncio.create_task(kopf.run_tasks(tasks, ignored=_Everything()), name="operator: watches")
    try:
        yield watching
    finally:
        stop.set()
        await asyncio.wait({watching}, timeout=STOP_S)


def _make_registry(handlers: Handlers, kinds: Iterable[Kind], access: ApiAccess) -> kopf.OperatorRegistry:
    """kopf's registry with our login and handlers."""
    registry = kopf.OperatorRegistry()

    async def log_in(**_: Any) -> kopf.AiohttpSession:
        # kopf keeps one watch for each kind and namespace, and all of them must stand at the same time.
        session = open_session(access, USER_AGENT, max_connections=NO_LIMIT)
        return kopf.AiohttpSession(server=access.url, aiohttp_session=session)

    kopf.on.login(registry=registry, id="log_in")(log_in)
    for kind in kinds:
        group, version, plural = kind.group, kind.version, kind.plural
        kopf.index(group, version, plural, registry=registry, id=f"keep-{plural}")(handlers.keep)
        kopf.on.event(group, version, plural, registry=registry, id=f"tell-{plural}")(handlers.tell)
    return registry


def make_kopf_settings(kinds: Iterable[Kind], *, timeout_s: float, silence_s: float) -> kopf.OperatorSettings:
    """Settings for kopf. ``timeout_s``: seconds to connect; a list may take six times as long. A watch that was silent
    for ``silence_s`` begins anew."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # It would need rights on the whole cluster.
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
    """Remembers nothing of an object. kopf's own storage copies each object of an event twice, for handlers of changes.
    We have no such handlers, and the copies cost a quarter of a millisecond: more than our own work on the event."""

    def build(self, **_: object) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        """Never called: we have no handlers of changes."""


class _Pauses:
    """Seconds between tries of a list or watch, without end: an operator that gives up watching is of no use."""

    def __iter__(self) -> Iterator[float]:
        for num_failures in itertools.count(1):
            yield _BACKOFF.pause_s(num_failures, random.random())  # noqa: S311 - spreads load


class _Everything(frozenset[asyncio.Task[Any]]):
    """Contains every task. When kopf stops it waits for, and cancels, all tasks that are not in this set. kopf's own
    tasks have ended by then; the others are ours."""

    def __contains__(self, task: object) -> bool:
        return True

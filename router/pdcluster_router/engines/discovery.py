"""Finds the engines of one PDCluster: lists its EndpointSlices, watches them, and tells every change.

    LIST --200--> WATCH --the API server ends it in time--> WATCH, from the last version
     ^              |
     +--1 to 30 s---+-- cut, silent, refused, 410: what is known stays, and the list is asked for again

A failure of the API server, or of the way to it, changes no engine. It is one log line when it begins, one when it
is over, and a metric. ``core/engines/endpoint_slices.py`` decides what an answer means.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from pdcluster_kube.access import KubeAccess
from pdcluster_kube.backoff import Backoff
from pdcluster_kube.reader import ApiStatusError, KubeReader, Lines
from pdcluster_protocol import labels
from pdcluster_protocol.errors import ProtocolError, Unavailable
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.endpoint_slices import SliceCache
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.settings.router_settings import Settings

logger = logging.getLogger(__name__)

BACKOFF: Final = Backoff(first_s=1.0, most_s=30.0)
"""Between two lists. A Retry-After of the API server counts up to the same 30 s."""
GRACE_S: Final = 5.0
"""A watch that has not ended so many seconds after its time is taken for dead."""
MIN_WATCH_S: Final = 0.5
"""A watch that ends sooner is a failure, even if it brought news: to ask again at once would be a storm."""
GOOD_WATCH_S: Final = 10.0
"""Seconds. A failure after a watch that lived longer is counted as the first in a row. News alone is no sign of a good
watch: one that is cut after its first event would be opened again at once, for ever."""

Tell = Callable[[tuple[Member, ...]], None]

_CURES: Final = {
    401: "look at the token file:",
    403: "give our service account list and watch on endpointslices (discovery.k8s.io) in this namespace:",
    404: "is this a Kubernetes API server with discovery.k8s.io/v1?",
}
"""By status. The cure comes first in the reason, because the end of a reason may be cut."""


@dataclass(frozen=True, slots=True)
class Source:
    """The slices to watch, how long one watch lasts, and how long after that its end is waited for (seconds).

    ``always_https``: every engine is asked over https, whatever its slice says.
    """

    namespace: str
    cluster: str
    watch_timeout_s: int
    grace_s: float = GRACE_S
    always_https: bool = False

    @property
    def list_path(self) -> str:
        """The path of engines' slices only: a cluster's router has slices too."""
        roles = ",".join(role.value for role in Role)
        selector = quote(f"{labels.CLUSTER}={self.cluster},{labels.ROLE} in ({roles})", safe="")
        return f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices?labelSelector={selector}"

    def watch_path(self, resource_version: str) -> str:
        return (
            f"{self.list_path}&watch=true&allowWatchBookmarks=true"
            f"&resourceVersion={quote(resource_version, safe='')}&timeoutSeconds={self.watch_timeout_s}"
        )


class EngineDiscovery:
    """Follows one cluster's slices. One task runs it; the event loop's callbacks may read its attributes."""

    def __init__(
        self,
        client: KubeReader,
        source: Source,
        tell: Tell,
        count_failure: Callable[[], None],
        *,
        backoff: Backoff = BACKOFF,
    ) -> None:
        """``tell``: called with all engines after each list, and whenever a slice has changed."""
        self.has_listed = asyncio.Event()
        """Set once the first list was told."""
        self.is_current = False
        """Whether changes reach us; False from the start until the first watch is open."""
        self.reason = "nothing was heard of the API server yet"
        """Why changes do not reach us; empty while they do."""
        self.problems: frozenset[str] = frozenset()
        """Slices that cannot be used, and why."""
        self._client = client
        self._source = source
        self._tell = tell
        self._count_failure = count_failure
        self._backoff = backoff
        self._cache = SliceCache(always_https=source.always_https)
        self._num_in_a_row = 0
        self._opened_at = 0.0
        self._has_spoken = False

    async def run(self) -> None:
        """Runs until it is cancelled. No error of the API server, and no bug of ours, ends it."""
        while True:
            asked_s = 0.0
            try:
                await self._list_and_watch()
            except ApiStatusError as error:
                asked_s = error.retry_after_s
                self._failed(f"{_CURES.get(error.status, '')} {error}".lstrip())
            except (Unavailable, ProtocolError) as error:
                self._failed(str(error))
            except Exception as error:  # Logged. The top of a task, without which no engine is found any more.
                logger.exception("discovery failed")
                self._failed(f"a bug of ours: {error!r}")
            chance = random.random()  # noqa: S311 - spreads the load, keeps no secret
            asked_s = min(asked_s, self._backoff.most_s)
            await asyncio.sleep(self._backoff.pause_s(self._num_in_a_row, chance, asked_s=asked_s))

    async def _list_and_watch(self) -> None:
        self._cache.replace(await self._client.read(self._source.list_path))
        self._tell_all()
        while True:
            await self._watch()

    async def _watch(self) -> None:
        """Follows one watch until the API server ends it in time. Raises: Unavailable: It ended at once, or broke."""
        path = self._source.watch_path(self._cache.resource_version)
        async with self._client.stream(path, limit_s=self._source.watch_timeout_s + self._source.grace_s) as lines:
            self._note_connected()
            await self._take_all(lines)
        if self._watched_s() < MIN_WATCH_S:
            raise Unavailable("the API server ended a watch at once")
        self._num_in_a_row = 0

    async def _take_all(self, lines: Lines) -> None:
        while (line := await lines.next()) is not None:
            if self._cache.apply(line):
                self._tell_all()

    def _tell_all(self) -> None:
        picture = self._cache.picture
        for problem in sorted(picture.problems - self.problems):
            logger.warning("discovery leaves an EndpointSlice out reason=%s", scrub(problem))
        self.problems = picture.problems
        self._tell(picture.members)
        self.has_listed.set()

    def _note_connected(self) -> None:
        self.reason = ""
        self._opened_at = time.monotonic()
        if not self.is_current:
            self.is_current = self._has_spoken = True
            logger.info("discovery follows the API server cluster=%s", self._source.cluster)

    def _watched_s(self) -> float:
        """Seconds since the newest watch was opened."""
        return time.monotonic() - self._opened_at

    def _failed(self, reason: str) -> None:
        if self.is_current and self._watched_s() > GOOD_WATCH_S:
            self._num_in_a_row = 0
        self._num_in_a_row += 1
        self.reason = scrub(reason)
        if self.is_current or not self._has_spoken:
            self.is_current, self._has_spoken = False, True
            logger.warning("discovery is cut off from the API server, engines stay as they are reason=%s", self.reason)
        self._count_failure()


def kubernetes_discovery(settings: Settings, tell: Tell, count_failure: Callable[[], None]) -> EngineDiscovery:
    """The discovery of settings whose ``discovery`` is ``KUBERNETES``."""
    assert settings.namespace is not None
    assert settings.cluster is not None
    assert settings.kube_api is not None
    access = KubeAccess(settings.kube_api, settings.kube_ca_file, settings.kube_token_file)
    client = KubeReader(access, timeout_s=settings.kube_timeout_s, user_agent="pdcluster-router")
    always_https = bool(settings.engine_tls_flags)
    source = Source(settings.namespace, settings.cluster, settings.watch_timeout_s, always_https=always_https)
    return EngineDiscovery(client, source, tell, count_failure)

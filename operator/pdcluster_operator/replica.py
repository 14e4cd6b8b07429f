"""Builds and runs one replica of the operator: watches and probes at all times, work while it leads.

kopf's watches --> kopf_adapter --> caches      work queue --> reconcile --> apply, status, verify
                      |                             ^                            |
                      +--------- key with news -----+                fenced by --+--> leader
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

import aiohttp

from pdcluster_kube.access import ApiAccess
from pdcluster_kube.kubeconfig import read_kubeconfig
from pdcluster_kube.session import open_session
from pdcluster_operator.api.cluster import Rollout
from pdcluster_operator.audit import Auditor
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.clock import unix_s
from pdcluster_operator.core.seen.object_views import ClusterView
from pdcluster_operator.core.status.gauges import PoolSample, sample_of
from pdcluster_operator.core.status_document import read_status
from pdcluster_operator.health_server import serve_probes
from pdcluster_operator.http_kube import Fence, HttpKube
from pdcluster_operator.kinds import LEADER_WORKER_SET, PDCLUSTER, POD, SCALER, WATCHED_CHILDREN, Kind
from pdcluster_operator.kopf_adapter import STOP_S, USER_AGENT, Handlers, running_watches
from pdcluster_operator.leader import Leader
from pdcluster_operator.metrics import Metrics
from pdcluster_operator.namespaces import FoundNamespaces, find_namespaces
from pdcluster_operator.pool_secrets import PoolSecrets
from pdcluster_operator.reconcile import Reconciler
from pdcluster_operator.settings import Settings
from pdcluster_operator.verify import TargetVerifier
from pdcluster_operator.work_queue import WorkQueue
from pdcluster_protocol.errors import PDClusterError

logger = logging.getLogger(__name__)

_POLL_S: Final = 5.0
_LOOK_AGAIN_S: Final = 30.0
"""Seconds between two looks at namespaces that were left out: each refusal is a line in the API server's audit log."""
_LEASE_CALLS: Final = 2
"""Calls that fit into the time of a renewal, so that one call that hangs does not end a term."""


class Operator:
    """One replica. Call ``run`` once."""

    def __init__(
        self,
        settings: Settings,
        access: ApiAccess,
        session: aiohttp.ClientSession,
        to_routers: aiohttp.ClientSession,
        take_signals: Callable[[], None],
    ) -> None:
        """``session``: to the API server of ``access``. ``to_routers``: does not send our token. ``take_signals``: sets
        our signal handlers again after kopf has set its own. Those would end the watches before our term has ended."""
        self._settings = settings
        self._access = access
        self._to_routers = to_routers
        self._take_signals = take_signals
        self.caches = Caches()
        self._metrics = Metrics()
        self._queue: WorkQueue[Key] | None = None
        """The queue of the current term; None: we do not lead."""
        self._has_leader_worker_sets = False
        self._namespaces = FoundNamespaces()
        """Empty before they were looked for, and where all namespaces of the cluster are watched."""
        self._is_known = False
        self._trouble = ""
        """Why we do not know yet what to watch; empty: no call has failed."""
        self.auditor: Auditor | None = None
        self._handlers = Handlers(self.caches, self._has_news, self._has_listed)
        times = settings.lease_times
        self.leader = Leader(
            self._client(session, times.renew_s / _LEASE_CALLS, fence=None),
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            identity=settings.identity,
            times=times,
            lead=self._lead,
        )
        self._reader = self._client(session, settings.call_timeout_s, fence=None)
        self._writer = self._client(session, settings.call_timeout_s, fence=self.leader)
        self._add_gauges()

    async def run(self, stopped: asyncio.Event) -> None:
        """Run until ``stopped``. Then the term ends, the Lease is given back, and the watches end, in this order.

        Raises:
            Exception: A task that has to run for ever has ended. Our supervisor starts us again.
        """
        settings = self._settings
        probes = serve_probes(
            settings.host, settings.port, health=self.health, readiness=self.readiness, metrics=self._metrics.page
        )
        async with probes as port:
            logger.info("serving probes and metrics port=%d identity=%s", port, settings.identity)
            if await _unless(stopped, self._find_what_to_watch()):
                await self._watch_and_work(stopped)

    async def _find_what_to_watch(self) -> None:
        """Wait until our CRDs are there and a namespace can be read: kopf looks for kinds only once, and cannot leave
        a namespace out later."""
        while True:
            try:
                self._trouble = ""
                if await self._look_for_kinds():
                    if await self._look_for_namespaces():
                        return
                else:
                    logger.warning("no CRDs group=%s: install the chart with crds.enabled", PDCLUSTER.group)
            except PDClusterError as error:
                logger.warning("API server not asked reason=%s", error)
                self._trouble = str(error)
            await asyncio.sleep(_POLL_S)

    async def _look_for_kinds(self) -> bool:
        """Ask which kinds there are. Returns whether our CRDs are among them."""
        self._is_known = await self._reader.serves(PDCLUSTER) and await self._reader.serves(SCALER)
        if self._is_known:
            self._has_leader_worker_sets = await self._reader.serves(LEADER_WORKER_SET)
        return self._is_known

    async def _look_for_namespaces(self) -> bool:
        """Ask which namespaces can be watched. Returns whether that is clear: one is left out only if two looks in a
        row were refused, for an API server that is upgraded may refuse what it grants a moment later."""
        before = self._namespaces
        self._namespaces = found = await find_namespaces(self._reader, self._kinds(), self._settings.namespaces)
        for namespace, refusal in found.left_out:
            logger.warning("namespace cannot be watched namespace=%s reason=%s", namespace, refusal)
        if not found.left_out:
            return True
        self._trouble = found.left_out[0][1]
        return bool(found.watched) and found.watched == before.watched

    async def _watch_and_work(self, stopped: asyncio.Event) -> None:
        kinds = self._kinds()
        settings = self._settings
        self.auditor = Auditor(
            self._reader,
            self.caches,
            kinds,
            self._namespaces.watched or (None,),
            interval_s=settings.resync_s,
            on_news=self._has_news,
        )
        watches = running_watches(
            self._handlers, kinds, self._namespaces.watched, settings, self._access, self._take_signals
        )
        async with watches as watching:
            working = asyncio.create_task(self._work(self.auditor), name="operator: work")
            stopping = asyncio.create_task(stopped.wait(), name="operator: stop")
            try:
                done, _ = await asyncio.wait({watching, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end(working, stopping)
            for task in done - {stopping}:
                task.result()
                raise RuntimeError(f"{task.get_name()} has ended by itself")

    async def _work(self, auditor: Auditor) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_part(auditor), name="operator: leader")
            tasks.create_task(auditor.run(), name="operator: audit")
            tasks.create_task(self._await_new_kinds(), name="operator: kinds")
            tasks.create_task(self._await_left_out(), name="operator: namespaces")

    async def _take_part(self, auditor: Auditor) -> None:
        """Take part in the election once the caches are complete. A replica that cannot read everything must not hold
        the Lease, for another one may be able to work."""
        await auditor.wait_until_complete()
        await self.leader.run()

    async def _lead(self) -> None:
        """Work through one term, until cancelled."""
        settings = self._settings
        secrets = PoolSecrets(self._reader, believe_s=settings.resync_s)
        verifier = TargetVerifier(
            self._to_routers, secrets, timeout_s=settings.verify_timeout_s, on_result=self._has_news
        )
        reconciler = Reconciler(
            self._writer,
            self.caches,
            verifier,
            secrets,
            settings,
            has_leader_worker_sets=self._has_leader_worker_sets,
        )
        queue: WorkQueue[Key] = WorkQueue(
            reconciler.reconcile,
            num_workers=settings.workers,
            limit_s=settings.reconcile_timeout_s,
            on_run=self._metrics.count_run,
        )
        self._queue = queue
        if self._handlers.is_warm:  # If not, kopf calls our handler for each object when it has listed all objects.
            queue.add_all(self.caches.keys())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(queue.run(), name="term: queue")
                tasks.create_task(verifier.run(), name="term: verifications")
        finally:
            self._queue = None

    async def _await_new_kinds(self) -> None:
        """End the process once LeaderWorkerSet is installed, for kopf watches only kinds that it found at its start."""
        while True:
            await asyncio.sleep(self._settings.resync_s)
            try:
                is_new = not self._has_leader_worker_sets and await self._reader.serves(LEADER_WORKER_SET)
            except PDClusterError as error:
                logger.warning("API server not asked reason=%s", error)
            else:
                if is_new:
                    raise RuntimeError("LeaderWorkerSet is installed now: starting anew to watch it")

    async def _await_left_out(self) -> None:
        """End the process once two looks in a row could read a namespace that was left out, for kopf watches only those
        that it was told at its start."""
        names = [name for name, _ in self._namespaces.left_out]
        before: frozenset[str] = frozenset()
        while names:
            await asyncio.sleep(_POLL_S if before else min(_LOOK_AGAIN_S, self._settings.resync_s))
            try:
                found = await find_namespaces(self._reader, self._kinds(), names)
            except PDClusterError as error:
                logger.warning("API server not asked reason=%s", error)
                continue
            if again := before & frozenset(found.watched):
                raise RuntimeError(f"{', '.join(sorted(again))} can be read now: starting anew to watch it")
            before = frozenset(found.watched)

    def _kinds(self) -> tuple[Kind, ...]:
        optional = (LEADER_WORKER_SET,) if self._has_leader_worker_sets else ()
        return (PDCLUSTER, POD, *WATCHED_CHILDREN, *optional)

    def _has_news(self, key: Key) -> None:
        if self._queue is not None:
            self._queue.add(key)

    def _has_listed(self) -> None:
        if self.auditor is not None:
            self.auditor.suspect()

    def health(self) -> list[str]:
        """Faults that only a restart can mend. An API server that does not answer is no such fault."""
        found = []
        overdue_s = self._queue.overdue_s() if self._queue else 0.0
        if overdue_s > self._settings.stuck_s:
            found.append(f"a PDCluster has been due for {overdue_s:.0f} s, the limit is {self._settings.stuck_s:g} s")
        if self.auditor and self.auditor.blind_to:
            found.append(f"{len(self.auditor.blind_to)} objects are there that no watch has told of")
        return found

    def readiness(self) -> list[str]:
        """Why we are not ready; empty: we are. A standby is ready too, for it could lead at once."""
        why = self.auditor.trouble if self.auditor else self._trouble
        told = f": {why}" if why else ""
        if not self._is_known:
            return [f"the CRDs of {PDCLUSTER.group} were not found yet{told}"]
        if self.auditor is None or not self.auditor.is_complete:
            return [f"the caches have not yet shown everything that there is{told}"]
        return []

    def _add_gauges(self) -> None:
        self._metrics.watch_replica(
            is_leading=lambda: self.leader.is_leading,
            num_keys=lambda: len(self._queue or ()),
            overdue_s=lambda: self._queue.overdue_s() if self._queue else 0.0,
            num_left_out=lambda: len(self._namespaces.left_out),
        )
        self._metrics.watch_pools(self._pool_samples)

    def _pool_samples(self) -> list[PoolSample]:
        """The gauges of all PDClusters. Empty unless we lead, so that two replicas never show the same PDCluster."""
        views = [view for view in self.caches.of_kind(PDCLUSTER) if isinstance(view, ClusterView)]
        return [sample for view in views if (sample := _sample_of(view))] if self.leader.is_leading else []

    def _client(self, session: aiohttp.ClientSession, timeout_s: float, fence: Fence | None) -> HttpKube:
        return HttpKube(session, self._access.url, timeout_s=timeout_s, fence=fence, on_answer=self._metrics.count_call)


async def serve(settings: Settings) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises:
        ConfigError: The kubeconfig, or the address for probes, cannot be used.
        Exception: A task that has to run for ever has ended.
    """
    access = settings.access or await read_kubeconfig(settings.kubeconfig, settings.kube_context)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def take_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)

    take_signals()
    try:
        to_api, to_routers = open_session(access, USER_AGENT), open_router_session()
        async with to_api as session, to_routers:
            await Operator(settings, access, session, to_routers, take_signals).run(stopped)
    finally:
        # If a watch of kopf is cancelled while its session closes, the watch asks for new sessions for ever. asyncio
        # waits for every task, so the process would never end.
        loop.call_later(STOP_S, _leave, 0 if stopped.is_set() else 1, sys.exception())


def open_router_session() -> aiohttp.ClientSession:
    """The session to routers of all pools. It keeps no cookies, which would go from one pool's routers to another's. It
    unpacks nothing: a pool's owner says who answers there."""
    return aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())


def _leave(status: int, reason: BaseException | None) -> None:
    """End the process, whatever still runs in it. Called only if the process has not ended by itself."""
    logger.error("operator ended with tasks that did not status=%d", status, exc_info=reason)
    logging.shutdown()
    os._exit(status)


def _sample_of(view: ClusterView) -> PoolSample | None:
    """The gauges of one PDCluster; None: it has no status that we can read. The default deadline counts if an old CRD
    has filled in none."""
    status = read_status(view.document.get("status"))
    if status is None:
        return None
    rollout = (view.document.get("spec") or {}).get("rollout") or {}
    deadline_s = int(rollout.get("progressDeadlineSeconds", Rollout().progress_deadline_seconds))
    return sample_of(view.ref.namespace, view.ref.name, status, deadline_s, unix_s())


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Wait for ``work``, or until ``stopped``. True: the work is done, and we are not to stop."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done() and not stopped.is_set()
    finally:
        await _end(working, stopping)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

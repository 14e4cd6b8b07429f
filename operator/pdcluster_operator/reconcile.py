"""One look at one PDCluster: read the caches, plan, apply children that differ, write a new status, send Events.

Each look reads the state anew. A replica remembers only a few things between looks: results and digests, which save
calls, the fields that it has taken back, and the unknown fields that it has seen. A new leader starts without these.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from pdcluster_operator.api.base import faults_in
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.apply import Applier
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.clock import unix_s
from pdcluster_operator.core.manifests import pool_tls
from pdcluster_operator.core.manifests.pool import Pool, pool_of, secret_ref
from pdcluster_operator.core.manifests.router import internal_url, mounted_secrets, router_url
from pdcluster_operator.core.plan.actions import Plan
from pdcluster_operator.core.plan.pool_plan import plan_pool
from pdcluster_operator.core.seen.object_views import ClusterView, View, view_of
from pdcluster_operator.core.seen.observed import Observed
from pdcluster_operator.core.seen.picture import Picture, Routers, observed_of, ready_pods, routers_of
from pdcluster_operator.core.status.conditions import Counts, Status
from pdcluster_operator.core.status.pool_status import Facts, reduce_status
from pdcluster_operator.core.status.status_events import KubernetesEvent, events_between
from pdcluster_operator.core.status.taken_back import TakenBack, TakenBackLog, event_of
from pdcluster_operator.core.status_document import bare_document, event_document, read_status, status_document
from pdcluster_operator.core.unknown_fields import UnknownFields
from pdcluster_operator.errors import Conflict, Contested, Forbidden, KubeError, NotLeader, Refused
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import SECRET, Object, Ref
from pdcluster_operator.pool_secrets import PoolSecrets
from pdcluster_operator.settings import Settings
from pdcluster_operator.verify import RouterTrust, TargetVerifier, ToVerify
from pdcluster_protocol.labels import Role

logger = logging.getLogger(__name__)


class Reconciler:
    """Carries out the looks of one term: any number of keys at once, each in one task (``WorkQueue``)."""

    def __init__(
        self,
        kube: HttpKube,
        caches: Caches,
        verifier: TargetVerifier,
        pool_secrets: PoolSecrets,
        settings: Settings,
        *,
        has_leader_worker_sets: bool,
    ) -> None:
        """``has_leader_worker_sets``: the API server knows LeaderWorkerSets, and we watch them."""
        self._kube = kube
        self._caches = caches
        self._verifier = verifier
        self._secrets = pool_secrets
        self._settings = settings
        self._has_leader_worker_sets = has_leader_worker_sets
        self._applier = Applier(kube, caches, self._tell_taken_back)
        self._taken_back: dict[Key, TakenBackLog] = {}
        self._unknown: dict[Key, UnknownFields] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Carry the spec out as far as possible now. Returns seconds until the next look, or None.

        Raises:
            KubeError: Something could not be done. If the user can mend it, status says so.
        """
        view = self._caches.cluster(key)
        if view is None or view.document["metadata"].get("deletionTimestamp"):
            self._verifier.forget(key)
            self._applier.forget(key)
            self._taken_back.pop(key, None)
            self._unknown.pop(key, None)
            return None
        try:
            # Without status, which only we write: ``read_status`` reads it.
            cluster, unknown = PDCluster.from_server({**view.document, "status": None})
        except ValidationError as error:
            await self._tell_unreadable(view, error)
            return None
        return await self._carry_out(key, view, cluster, self._unknown_of(key).told(unknown, unix_s()))

    async def _carry_out(
        self, key: Key, view: ClusterView, cluster: PDCluster, unknown: tuple[str, ...]
    ) -> float | None:
        settings = self._settings
        pool = pool_of(cluster, settings.router_image, settings.api_server_ports, settings.lease_namespace)
        picture = self._caches.picture(key, view.uid)
        observed, routers = self._observed(key, view, picture, unknown), routers_of(picture)
        try:
            observed = await self._with_secrets(observed, view, pool)
        except KubeError as error:
            await self._tell_trouble(view, pool, observed, self._plan(pool, observed), routers, error)
            raise
        plan = self._plan(pool, observed)
        if plan.facts.is_proof_void:
            self._verifier.forget(key)
        try:
            await self._applier.apply(plan, view.document)
        except KubeError as error:
            await self._tell_trouble(view, pool, observed, plan, routers, error)
            raise
        await self._tell(view, pool, observed.status, plan.status, routers)
        forgets_after_s = self._unknown_of(key).forgets_after_s(unix_s())
        wakes = [plan.wake_after_s, self._verify(key, pool, plan, picture), self._resync_after_s(), forgets_after_s]
        if contested := self._log_of(key).pop_contested():
            raise Contested(f"{contested}, again and again: it is set back, later and later")
        return min(wake for wake in wakes if wake is not None)

    def _plan(self, pool: Pool, observed: Observed) -> Plan:
        return plan_pool(pool, observed, secret_text=secrets.token_hex(32), now=unix_s())

    def _observed(self, key: Key, view: ClusterView, picture: Picture, unknown: tuple[str, ...]) -> Observed:
        """All but Secrets, which are not watched."""
        return replace(
            observed_of(picture),
            has_leader_worker_sets=self._has_leader_worker_sets,
            verifications=self._verifier.results(key),
            status=read_status(view.document.get("status")),
            unknown_fields=unknown,
        )

    async def _with_secrets(self, observed: Observed, view: ClusterView, pool: Pool) -> Observed:
        is_ours = pool.spec.auth.secret_ref is None
        return replace(
            observed,
            has_secret=is_ours and await self._secrets.is_there(_secret_of(pool)[0], view.uid),
            missing_secret=await self._missing_secret(pool),
        )

    async def _missing_secret(self, pool: Pool) -> str:
        """The first problem of the Secrets that the user has named, and its cure; empty: there is no problem."""
        for secret in mounted_secrets(pool):
            for key in secret.keys:
                if lack := await self._secrets.lacks(Ref(SECRET, pool.namespace, secret.name), key):
                    return f"{lack}, and {secret.who} cannot start without it: {secret.cure}"
        return ""

    def _verify(self, key: Key, pool: Pool, plan: Plan, picture: Picture) -> float | None:
        """Have the target verified, if it is time. Returns seconds until the next call; None: no call is needed."""
        ids = plan.to_verify
        if ids is None:
            return None
        asked = ToVerify(
            ids.name,
            ids.revision,
            tuple(ready_pods(picture, Role.PREFILL, ids.revision, ids.prefill_template)),
            tuple(ready_pods(picture, Role.DECODE, ids.revision, ids.decode_template)),
            internal_url(pool),
            *_secret_of(pool),
            _trust_of(pool),
        )
        return self._verifier.ask(key, asked)

    async def _tell(
        self, view: ClusterView, pool: Pool, before: Status | None, status: Status, routers: Routers
    ) -> None:
        await self._write(view, before, status, status_document(status, pool.spec, routers, router_url(pool)))

    async def _tell_trouble(
        self, view: ClusterView, pool: Pool, observed: Observed, plan: Plan, routers: Routers, error: KubeError
    ) -> None:
        """Say in status that the plan was not carried out because of ``error``, and what is lost meanwhile."""
        if isinstance(error, Refused | Forbidden):
            await self._tell_refused(view, pool, observed, plan, error, routers)
        elif not isinstance(error, Conflict | NotLeader):
            await self._tell_losses(view, pool, observed, plan, routers)

    async def _tell_refused(
        self, view: ClusterView, pool: Pool, observed: Observed, plan: Plan, error: KubeError, routers: Routers
    ) -> None:
        refused = reduce_status(replace(plan.facts, refusal=str(error)), observed.status, now=unix_s())
        await self._tell(view, pool, observed.status, refused, routers)

    async def _tell_losses(
        self, view: ClusterView, pool: Pool, observed: Observed, plan: Plan, routers: Routers
    ) -> None:
        """Say what is not ready any more, when the plan could not be carried out. If that fails too, the next look says
        it."""
        if (before := observed.status) is None:
            return
        with suppress(KubeError):
            await self._tell(view, pool, before, before.with_losses_of(plan.status), routers)

    async def _tell_unreadable(self, view: ClusterView, error: ValidationError) -> None:
        """Write a refusal: the CRD is of another version, or knows no rule for it, so the API server let it in."""
        told = "; ".join(faults_in(error)[:5])
        cure = "change it or, if the CRDs are of another version than the operator, apply those of its version"
        refusal = f"this operator does not understand the object: {told}; {cure}"
        generation = int(view.document["metadata"].get("generation", 0))
        facts = Facts(generation, "", Counts(), Counts(), 0, 0, deadline_s=1, refusal=refusal)
        before = read_status(view.document.get("status"))
        status = reduce_status(facts, before, now=unix_s())
        await self._write(view, before, status, bare_document(status))

    async def _write(self, view: ClusterView, before: Status | None, status: Status, document: Object) -> None:
        if document == view.document.get("status"):
            return
        stored = await self._kube.apply_status(view.ref, view.uid, document, resource_version=view.resource_version)
        self._caches.put(view_of(stored))
        # The answer shows fields that a watch from before a change of the CRD hides. That watch will tell of this
        # write, so another look comes.
        unknown = PDCluster.unknown_fields_of({**stored, "status": None})
        self._unknown_of(Key(view.ref.namespace, view.ref.name)).told(unknown, unix_s())
        await self._send(events_between(before, status), view)

    def _unknown_of(self, key: Key) -> UnknownFields:
        return self._unknown.setdefault(key, UnknownFields())

    def _log_of(self, key: Key) -> TakenBackLog:
        return self._taken_back.setdefault(key, TakenBackLog())

    async def _tell_taken_back(self, owner: Object, taken: TakenBack) -> None:
        view = view_of(owner)
        if self._log_of(Key(view.ref.namespace, view.ref.name)).note(taken, unix_s()):
            logger.warning("field taken back cluster=%s child=%s fields=%s by=%s", view.ref, *taken.words)
            await self._send((event_of(taken),), view)

    async def _send(self, events: Iterable[KubernetesEvent], view: View) -> None:
        for event in events:
            manifest = event_document(event, view, self._settings.identity, unix_s(), secrets.token_hex(8))
            try:
                await self._kube.create(manifest)
            except KubeError as error:
                # Status says the same, so a lost Event is not worth another look.
                logger.warning("event not sent cluster=%s event=%s reason=%s", view.ref, event.reason, error)

    def _resync_after_s(self) -> float:
        return self._settings.resync_s * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load


def _trust_of(pool: Pool) -> RouterTrust | None:
    if pool.spec.tls is None:
        return None
    return RouterTrust(Ref(SECRET, pool.namespace, pool.spec.tls.secret_name), pool_tls.CA, pool_tls.server_name(pool))


def _secret_of(pool: Pool) -> tuple[Ref, str]:
    """The Secret with the pool's secret, and the key in it."""
    found = secret_ref(pool)
    return Ref(SECRET, pool.namespace, found["name"]), found["key"]

"""Carries out a plan: children, moves, prunes, the scalers' statuses. Writes only what differs from what was read.

Digests tell whether a child differs: of what we want, and of what the API server made of it when we applied it last. A
plain comparison would not do, for the server fills in defaults and rewrites amounts. The digests are a saving and no
memory: without them, as after a restart, a child is applied once more, and the server finds nothing to change.

A child is ours by its owner's uid. A field that somebody else has set in it is set back, and the user is told. An
object that is not ours is never written to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.actions import Child, Move, Plan, Prune, ScalerStatus, Way
from pdcluster_operator.core.object_views import ChildView, digest_of, view_of
from pdcluster_operator.core.taken_back import TakenBack
from pdcluster_operator.errors import Conflict, Exists, Refused, Taken
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import PDCLUSTER, SCALER, SECRET, Object, Ref, ref_of

OnTakenBack = Callable[[Object, TakenBack], Awaitable[None]]
"""Told of each field of a child that somebody else had set and that was set back; first the PDCluster."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """Of one child: digests of what we asked for, and of what there was then."""

    uid: str
    wanted: str
    found: str


class Applier:
    """For all PDClusters. One term owns it; one task at a time for each PDCluster."""

    def __init__(self, kube: HttpKube, caches: Caches, on_taken_back: OnTakenBack) -> None:
        self._kube = kube
        self._on_taken_back = on_taken_back
        self._caches = caches
        self._applied: dict[Key, dict[Ref, _Applied]] = {}
        """By PDCluster, so that all of one can be forgotten."""
        self._creatable: dict[Key, dict[Ref, str]] = {}
        """Digests of what the API server would create: a workload whose turn comes late is not asked for at each look
        while nothing moves."""

    async def apply(self, plan: Plan, owner: Object) -> None:
        """Everything is as the plan says, in its order. Stops at the first thing that cannot be done.

        The objects in ``plan.asked`` come first, in a dry run: if the API server refuses one, nothing is changed.
        ``owner``: the PDCluster.

        Raises:
            Refused: A child cannot be ours, or the API server does not take it.
            KubeError: Something else (``errors.py``); what was done stays done, the next plan goes on from there.
        """
        key = _key_of(owner)
        if plan.moves:
            # An engine may go for the sake of one that comes later, and an object that was creatable then may not be
            # now.
            self._creatable.pop(key, None)
        for child in plan.asked:
            await self._ask(child, owner)
        for child in plan.children:
            await self._bring_about(child, owner)
        for move in plan.moves:
            await self._move(move, key.namespace)
        for prune in plan.prunes:
            await self._prune(prune, key.namespace)
        for status in plan.scaler_statuses:
            await self._tell_scaler(status, key.namespace)

    def forget(self, key: Key) -> None:
        """This PDCluster is gone."""
        self._applied.pop(key, None)
        self._creatable.pop(key, None)

    async def _ask(self, child: Child, owner: Object) -> None:
        """The API server would take it, or has."""
        ref = ref_of(child.document)
        if child.way is Way.CREATE:
            await self._ask_create(ref, child.document, owner)
            return
        seen = await self._seen(ref, owner)
        if not self._is_applied(ref, child, seen, owner):
            await self._kube.ask_apply(await self._checked(ref, child, seen, owner))

    async def _ask_create(self, ref: Ref, document: Object, owner: Object) -> None:
        creatable = self._creatable.setdefault(_key_of(owner), {})
        if creatable.get(ref) == digest_of(document):
            return
        try:
            await self._kube.ask_create(document)
        except Exists:
            # Our picture is old, or it is a stranger's.
            await self._require_ours_there(ref, owner)
            return
        creatable[ref] = digest_of(document)

    async def _seen(self, ref: Ref, owner: Object) -> ChildView | None:
        """The caches' picture of it, if the object is ours."""
        seen = self._caches.child(ref)
        if seen is not None and seen.owner_uid != owner["metadata"]["uid"]:
            await self._require_ours_there(ref, owner)
            return None
        return seen

    def _is_applied(self, ref: Ref, child: Child, seen: ChildView | None, owner: Object) -> bool:
        if seen is None:
            return False
        applied = self._applied.get(_key_of(owner), {})
        return applied.get(ref) == _Applied(seen.uid, digest_of(child.document), seen.digest)

    async def _bring_about(self, child: Child, owner: Object) -> None:
        ref = ref_of(child.document)
        seen = await self._seen(ref, owner)
        applied = self._applied.setdefault(_key_of(owner), {})
        if child.way is Way.CREATE:
            stored = await self._create(ref, child.document, owner)
        elif not self._is_applied(ref, child, seen, owner):
            stored = await self._apply(ref, await self._checked(ref, child, seen, owner), owner)
        else:
            return
        if stored is not None:
            applied[ref] = _Applied(stored["metadata"]["uid"], digest_of(child.document), digest_of(stored))
            self._keep(stored)

    async def _apply(self, ref: Ref, document: Object, owner: Object) -> Object:
        """Forced where somebody has a field of a child that was seen to be ours; never without its uid."""
        try:
            return await self._kube.apply(document)
        except Taken as taken:
            if "uid" not in document["metadata"]:
                raise
            stored = await self._kube.apply(document, is_forced=True)
            await self._on_taken_back(owner, TakenBack(str(ref), taken.fields, taken.by))
            return stored

    async def _create(self, ref: Ref, document: Object, owner: Object) -> Object | None:
        try:
            return await self._kube.create(document)
        except Exists:
            # Our picture was old, or somebody else was first.
            await self._require_ours_there(ref, owner)
            return None

    async def _checked(self, ref: Ref, child: Child, seen: ChildView | None, owner: Object) -> Object:
        """The document to apply: where none of ours was seen, no other owner's object has the name."""
        uid = seen.uid if seen else await self._require_ours_there(ref, owner)
        return _with_preconditions(child, uid)

    async def _require_ours_there(self, ref: Ref, owner: Object) -> str:
        """Nothing of this name is there, or it is ours: an apply would make another owner's object look like ours. Its
        uid; empty when there is none."""
        there = await self._kube.get(ref)
        if there is None:
            return ""
        _require_ours(ref, there["metadata"].get("ownerReferences") or (), owner)
        return str(there["metadata"]["uid"])

    def _keep(self, stored: Object) -> None:
        """The next look shall not be at what was before. Secrets are not watched, so one would never be dropped."""
        if ref_of(stored).kind != SECRET:
            self._caches.put(view_of(stored))

    async def _move(self, move: Move, namespace: str) -> None:
        ref = Ref(move.kind, namespace, move.change.workload)
        seen = self._caches.child(ref)
        version = await self._kube.scale(ref, move.change.after, resource_version=move.version.resource_version)
        if seen is not None:
            self._caches.put(dataclasses.replace(seen, replicas=move.change.after, resource_version=version))

    async def _prune(self, prune: Prune, namespace: str) -> None:
        ref = Ref(prune.kind, namespace, prune.name)
        await self._kube.delete(ref, uid=prune.version.uid, resource_version=prune.version.resource_version)
        self._caches.drop(ref, prune.version.uid)

    async def _tell_scaler(self, status: ScalerStatus, namespace: str) -> None:
        ref = Ref(SCALER, namespace, status.name)
        seen = self._caches.child(ref)
        wanted: dict[str, Any] = {"replicas": status.replicas, "selector": status.selector}
        if seen is not None and dict(seen.status) != wanted:
            await self._kube.apply_status(ref, seen.uid, wanted, resource_version=seen.resource_version)


def _key_of(owner: Object) -> Key:
    return Key(owner["metadata"]["namespace"], owner["metadata"]["name"])


def _with_preconditions(child: Child, uid: str) -> Object:
    """The document, good only for the object that was seen; where a number moves, only for that state of it."""
    if not uid:
        return child.document
    version = {"resourceVersion": child.version.resource_version} if child.version else {}
    return {**child.document, "metadata": {**child.document["metadata"], "uid": uid, **version}}


def _require_ours(ref: Ref, owners: Iterable[Object], owner: Object) -> None:
    """
    Raises:
        Conflict: It belongs to an earlier PDCluster of this name, and goes with it.
        Refused: It has another owner, or none.
    """
    controller = next((one for one in owners if one.get("controller")), None)
    if controller is None:
        raise Refused(f"{ref} is there and has no owner: delete it, or give the PDCluster another name")
    if controller["uid"] == owner["metadata"]["uid"]:
        return
    told = f"{controller['kind']} {controller['name']}"
    if (controller["kind"], controller["name"]) == (PDCLUSTER.name, owner["metadata"]["name"]):
        raise Conflict(
            f"{ref} belongs to an earlier {told} (uid {controller['uid']}): it is waited for until it is gone"
        )
    raise Refused(f"{ref} belongs to {told}: delete it, or give the PDCluster another name")

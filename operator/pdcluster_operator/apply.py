"""Carries out a plan: children, moves, prunes, the scalers' statuses. Writes only what differs from what was read.

Two digests tell whether a child differs: of the document that we want, and of the object that the API server stored
when we last applied the child. A plain comparison would not do, for the server fills in defaults and rewrites amounts.
The digests only save calls: without them, as after a restart, each child is applied once more, which changes nothing.

A child is ours if its owner has the PDCluster's uid. If somebody else has set a field that we set too, the field is set
back and the user is told. We never write to an object that is not ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.plan.actions import Child, Move, Plan, Prune, ScalerStatus, Way
from pdcluster_operator.core.seen.object_views import ChildView, digest_of, view_of
from pdcluster_operator.core.status.taken_back import TakenBack
from pdcluster_operator.errors import Conflict, Exists, Refused, Taken
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import PDCLUSTER, SCALER, SECRET, Object, Ref, ref_of

OnTakenBack = Callable[[Object, TakenBack], Awaitable[None]]
"""Called with the PDCluster and the fields of one child that somebody else had set and that we have set back."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """One child as last applied: its uid, the digest of the document that we sent (``wanted``), and the digest of the
    object that the server stored (``found``)."""

    uid: str
    wanted: str
    found: str


class Applier:
    """Carries out the plans of all PDClusters. One term owns it; one task at a time works on each PDCluster."""

    def __init__(self, kube: HttpKube, caches: Caches, on_taken_back: OnTakenBack) -> None:
        self._kube = kube
        self._on_taken_back = on_taken_back
        self._caches = caches
        self._applied: dict[Key, dict[Ref, _Applied]] = {}
        """By PDCluster, so that ``forget`` can drop all children of a PDCluster."""
        self._creatable: dict[Key, dict[Ref, str]] = {}
        """Digests of documents that passed a dry run. So a workload that a later step will create has one dry run,
        and no other at each look, as long as nothing moves."""

    async def apply(self, plan: Plan, owner: Object) -> None:
        """Carry out the plan's actions in their order. Stops at the first one that cannot be done.

        The objects in ``plan.asked`` come first, in a dry run: if the API server refuses one, nothing is changed.
        ``owner``: the PDCluster.

        Raises:
            Refused: A child cannot be ours, or the API server does not take it.
            KubeError: A call failed otherwise (``errors.py``). Actions already done stay done; the next plan goes on.
        """
        key = _key_of(owner)
        if plan.moves:
            # A move may remove an old engine to make room for a new workload. So ask again whether the new one can be
            # created: an earlier answer may not hold any more.
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
        """Drop all digests of a PDCluster that is gone."""
        self._applied.pop(key, None)
        self._creatable.pop(key, None)

    async def _ask(self, child: Child, owner: Object) -> None:
        """Ask for a dry run of the child, unless an earlier one passed or the child is there as we want it."""
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
            # Our picture is old, or another owner has an object of this name.
            await self._require_ours_there(ref, owner)
            return
        creatable[ref] = digest_of(document)

    async def _seen(self, ref: Ref, owner: Object) -> ChildView | None:
        """The child's view; None: the caches show no child of ours under this name.

        Raises:
            KubeError: As ``_require_ours_there``.
        """
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
        """Apply the document. If somebody else owns a field, apply it by force, but only if it has a uid: the child was
        then seen to be ours."""
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
        """The document with its preconditions. If the caches show no such child, ask the API server for the uid."""
        uid = seen.uid if seen else await self._require_ours_there(ref, owner)
        return _with_preconditions(child, uid)

    async def _require_ours_there(self, ref: Ref, owner: Object) -> str:
        """The uid of our object of this name, as the API server has it; empty: there is no object of this name.

        Called before an apply, because an apply would make another owner's object look like ours.

        Raises:
            KubeError: The object is not ours (as ``_require_ours``), or the call failed.
        """
        there = await self._kube.get(ref)
        if there is None:
            return ""
        _require_ours(ref, there["metadata"].get("ownerReferences") or (), owner)
        return str(there["metadata"]["uid"])

    def _keep(self, stored: Object) -> None:
        """Put the stored object into the caches, so that the next look sees it. We watch no Secrets, so no event would
        ever drop a Secret from the caches: leave those out."""
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
    """The document with ``uid`` and, if the child has a version, its resourceVersion. Unchanged if ``uid`` is empty."""
    if not uid:
        return child.document
    version = {"resourceVersion": child.version.resource_version} if child.version else {}
    return {**child.document, "metadata": {**child.document["metadata"], "uid": uid, **version}}


def _require_ours(ref: Ref, owners: Iterable[Object], owner: Object) -> None:
    """
    Raises:
        Conflict: The object belongs to an earlier PDCluster of this name, and will be removed like that PDCluster.
        Refused: The object has another owner, or none.
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

"""The operator's view of each object that it watches: a few facts instead of the whole object, and which are news.

Objects come as the API server sends them. Source of truth for pods: Kubernetes' page "Pod Lifecycle".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pdcluster_operator.core.seen.problems import (
    Death,
    condition_of,
    counted,
    deaths_of,
    trouble_of,
    unix_s_of,
    worst_of,
)
from pdcluster_operator.kinds import PDCLUSTER, POD, WORKLOADS, Object, Ref, ref_of
from pdcluster_protocol import labels

_NOISE: Final = frozenset({"managedFields"})
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_TOLD_METADATA: Final = ("labels", "annotations", "ownerReferences")


@dataclass(frozen=True, slots=True)
class View:
    """Any watched object. ``cluster``: name of the PDCluster that the object is, or belongs to."""

    ref: Ref
    uid: str
    resource_version: str
    cluster: str
    labels: Mapping[str, str]

    def says_the_same(self, other: View) -> bool:
        """Whether both views are alike in everything that a plan could depend on."""
        return replace(self, resource_version="") == replace(other, resource_version="")

    def is_older_than(self, other: View) -> bool:
        """Whether this view of the same object is older. Versions are growing numbers (Kubernetes 1.35, KEP-5504)."""
        ours, theirs = self.resource_version, other.resource_version
        return self.uid == other.uid and ours.isdecimal() and theirs.isdecimal() and int(ours) < int(theirs)


@dataclass(frozen=True, slots=True)
class ClusterView(View):
    """A PDCluster. ``document``: the whole object without ``managedFields``."""

    document: Object


@dataclass(frozen=True, slots=True)
class ChildView(View):
    """An object that a PDCluster owns. ``digest``: the result of ``digest_of``, over everything that we apply.

    ``replicas``: how many are asked for. ``there`` and ``ready``: how many its status tells of. All are 0 for kinds
    without replicas. ``problem``: why a Deployment cannot make its pods, or empty.
    """

    owner_uid: str
    digest: str
    created_s: int
    replicas: int
    there: int
    ready: int
    problem: str
    status: Object


@dataclass(frozen=True, slots=True)
class PodView(View):
    """A pod of an engine or a router. ``trouble``: why the cluster does not start the pod, or empty.

    ``has_heirs``: another pod will get its name, and inherits its deaths. ``port_names``: as Services look for them.
    """

    is_live: bool
    is_ready: bool
    is_terminating: bool
    trouble: str
    deaths: tuple[Death, ...]
    has_heirs: bool
    port_names: tuple[str, ...]

    @property
    def problem(self) -> str:
        """Why the pod is not ready; empty while it is ready, terminates, or merely starts."""
        if self.is_ready or self.is_terminating:
            return ""
        death = worst_of(self.deaths)
        return self.trouble or (death.told_of(self.ref.name) if death else "")

    @property
    def is_looping(self) -> bool:
        """Whether the pod is not ready and one of its containers is in a crash loop."""
        death = worst_of(self.deaths)
        return bool(self.problem) and not self.trouble and death is not None and death.is_loop

    def after(self, before: PodView) -> PodView:
        """This view with deaths counted on from an earlier view of the pod, or of the pod that had its name."""
        return replace(self, deaths=counted(self.deaths, before.deaths, is_same_pod=self.uid == before.uid))

    @property
    def answers_http(self) -> bool:
        """Whether this pod answers HTTP for its instance."""
        return self.labels.get(labels.LEADER) == "true"

    @property
    def group(self) -> int | None:
        """Index of the pod's group in its LeaderWorkerSet, from 0; None: it is in no group."""
        told = self.labels.get(labels.GROUP_INDEX, "")
        return int(told) if told.isascii() and told.isdigit() else None

    @property
    def workload(self) -> tuple[str, str, str]:
        """Role, revision and template."""
        return tuple_of(self.labels)


def tuple_of(found: Mapping[str, str]) -> tuple[str, str, str]:
    """Role, revision and template, from labels; empty where there is no such label."""
    return found.get(labels.ROLE, ""), found.get(labels.REVISION, ""), found.get(labels.TEMPLATE, "")


def view_of(body: Object) -> View:
    """The facts of one object, by its kind."""
    ref, metadata = ref_of(body), body["metadata"]
    own = metadata.get("labels") or {}
    if ref.kind == PDCLUSTER:
        return ClusterView(ref, metadata["uid"], metadata["resourceVersion"], ref.name, own, _without_noise(body))
    head = (ref, metadata["uid"], metadata["resourceVersion"], own.get(labels.CLUSTER, ""), own)
    return _pod_view(head, body) if ref.kind == POD else _child_view(head, body)


_Head = tuple[Ref, str, str, str, Mapping[str, str]]


def _child_view(head: _Head, body: Object) -> ChildView:
    spec, status, metadata = body.get("spec") or {}, body.get("status") or {}, body["metadata"]
    return ChildView(
        *head,
        owner_uid=_controller_of(metadata),
        digest=digest_of(body),
        created_s=unix_s_of(metadata.get("creationTimestamp")),
        replicas=int(spec.get("replicas", 1)) if "replicas" in spec or head[0].kind in WORKLOADS else 0,
        there=int(status.get("replicas") or 0),
        ready=int(status.get("readyReplicas") or 0),
        problem=_failure_of(status),
        status=status if "selector" in status else {},
    )


def _pod_view(head: _Head, body: Object) -> PodView:
    status, metadata = body.get("status") or {}, body["metadata"]
    is_going = metadata.get("deletionTimestamp") is not None
    is_live = not is_going and status.get("phase") not in _ENDED
    return PodView(
        *head,
        is_live=is_live,
        is_ready=is_live and condition_of(status, "Ready").get("status") == "True",
        is_terminating=is_going,
        trouble=trouble_of(head[0].name, status),
        deaths=deaths_of(status, is_going=is_going),
        has_heirs=_has_heirs(metadata),
        port_names=_port_names(body.get("spec") or {}),
    )


def _port_names(spec: Object) -> tuple[str, ...]:
    ports = (port for container in spec.get("containers") or () for port in container.get("ports") or ())
    return tuple(str(port["name"]) for port in ports if "name" in port)


def digest_of(document: Object) -> str:
    """Digest over a document without its status. Of its metadata only labels, annotations and owners count.

    The replicas of an engine workload or a scaler do not count, for no apply changes them. Those of the routers'
    Deployment count.
    """
    told = {name: value for name, value in document.items() if name not in ("metadata", "status")}
    if labels.ROLE in (document["metadata"].get("labels") or {}) and "spec" in told:
        told["spec"] = {name: value for name, value in told["spec"].items() if name != "replicas"}
    told["metadata"] = {name: document["metadata"].get(name) for name in _TOLD_METADATA}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _without_noise(body: Object) -> Object:
    metadata = {name: value for name, value in body["metadata"].items() if name not in _NOISE}
    return {**body, "metadata": metadata}


def _controller_of(metadata: Object) -> str:
    owners = metadata.get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def _has_heirs(metadata: Object) -> bool:
    """Whether another pod will get this name: not in a ReplicaSet, but in a LeaderWorkerSet, which numbers its pods."""
    owners = metadata.get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("kind") != "ReplicaSet" for owner in owners)


def _failure_of(status: Object) -> str:
    """Why a Deployment cannot make its pods, such as a quota."""
    failure = condition_of(status, "ReplicaFailure")
    return str(failure.get("message", "")) if failure.get("status") == "True" else ""

"""The views of all watched objects, by PDCluster. ``kopf_adapter`` and the answers to our own writes feed them.

We do not use kopf's indexes. If an object is deleted while a watch has a gap (410 Gone, then a new list), kopf 1.45
keeps it in its indexes for ever. From our storage ``audit`` drops objects that a list does not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from pdcluster_operator.core.seen.object_views import ChildView, ClusterView, PodView, View, tuple_of
from pdcluster_operator.core.seen.picture import Picture
from pdcluster_operator.kinds import LEADER_WORKER_SET, PDCLUSTER, Kind, Ref


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names one PDCluster, whether or not it exists."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True)
class _Shelf:
    """The objects that belong to one PDCluster."""

    cluster: ClusterView | None = None
    children: dict[Ref, ChildView] = field(default_factory=dict)
    pods: dict[Ref, PodView] = field(default_factory=dict)
    ancestors: dict[Ref, PodView] = field(default_factory=dict)
    """Deleted pods whose containers had died and whose names new pods will get. When their LeaderWorkerSet goes, they
    are dropped."""

    @property
    def is_empty(self) -> bool:
        return self.cluster is None and not self.children and not self.pods


class Caches:
    """All views. Event loop only."""

    def __init__(self) -> None:
        self._shelves: dict[Key, _Shelf] = {}
        self._views: Final[dict[Ref, View]] = {}

    def put(self, view: View) -> Key | None:
        """Keep the view, unless a newer one is kept. Returns the PDCluster's key if the view is news for a plan."""
        before = self._views.get(view.ref)
        if before is not None and view.is_older_than(before):
            return None
        if before is not None and key_of(before) != key_of(view):
            self._take_out(before)
        shelf = self._shelves.setdefault(key_of(view), _Shelf())
        view = _remembering(shelf, view, before)
        self._views[view.ref] = view
        _place(shelf, view)
        return None if before is not None and view.says_the_same(before) else key_of(view)

    def drop(self, ref: Ref, uid: str) -> Key | None:
        """Drop the view of an object that is gone. Returns the PDCluster's key; None: the object was not known."""
        before = self._views.get(ref)
        if before is None or before.uid != uid:
            return None
        self._take_out(before)
        return key_of(before)

    def cluster(self, key: Key) -> ClusterView | None:
        shelf = self._shelves.get(key)
        return shelf.cluster if shelf else None

    def picture(self, key: Key, owner_uid: str) -> Picture:
        """Children of this owner, and all pods of the PDCluster's engines and routers."""
        shelf = self._shelves.get(key) or _Shelf()
        ours = tuple(child for child in shelf.children.values() if child.owner_uid == owner_uid)
        return Picture(ours, tuple(shelf.pods.values()))

    def child(self, ref: Ref) -> ChildView | None:
        """The view of this child. Its owner may be any PDCluster, or none."""
        view = self._views.get(ref)
        return view if isinstance(view, ChildView) else None

    def keys(self) -> list[Key]:
        """Keys of all PDClusters that exist."""
        return [key for key, shelf in self._shelves.items() if shelf.cluster is not None]

    def of_kind(self, kind: Kind) -> Iterator[View]:
        return (view for view in list(self._views.values()) if view.ref.kind == kind)

    def _take_out(self, view: View) -> None:
        del self._views[view.ref]
        key = key_of(view)
        shelf = self._shelves[key]
        if isinstance(view, ClusterView):
            shelf.cluster = None
        else:
            shelf.children.pop(view.ref, None)
            shelf.pods.pop(view.ref, None)
            _remember(shelf, view)
        if shelf.is_empty:
            del self._shelves[key]


def key_of(view: View) -> Key:
    """The key of the PDCluster that the object is, or belongs to. The label has the whole name: the CRD allows no name
    that is too long for a label."""
    return Key(view.ref.namespace, view.ref.name if view.ref.kind == PDCLUSTER else view.cluster)


def _remembering(shelf: _Shelf, view: View, before: View | None) -> View:
    """The view. If it is of a pod, it goes on counting deaths from the last view of this pod, or of the earlier pod of
    the same name."""
    if not isinstance(view, PodView):
        return view
    known = before if isinstance(before, PodView) else shelf.ancestors.pop(view.ref, None)
    return view.after(known) if known is not None else view


def _remember(shelf: _Shelf, gone: View) -> None:
    match gone:
        case PodView(has_heirs=True) if gone.deaths:
            shelf.ancestors[gone.ref] = gone
        case ChildView() if gone.ref.kind == LEADER_WORKER_SET:
            theirs = tuple_of(gone.labels)
            shelf.ancestors = {ref: pod for ref, pod in shelf.ancestors.items() if pod.workload != theirs}


def _place(shelf: _Shelf, view: View) -> None:
    match view:
        case ClusterView():
            shelf.cluster = view
        case ChildView():
            shelf.children[view.ref] = view
        case PodView():
            shelf.pods[view.ref] = view

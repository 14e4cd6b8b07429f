"""The picture of one PDCluster: the views of its children at one moment, and the planner's input made from them.

The picture has no children of other owners. A child of an earlier PDCluster of the same name goes away by itself.
Another owner's object that has the name of a child of ours is found when we try to make our child.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from pdcluster_operator.core.manifests.pool import ROUTER
from pdcluster_operator.core.seen.object_views import ChildView, PodView, View, tuple_of
from pdcluster_operator.core.seen.observed import Observed, SeenProblem, SeenScaler, SeenService, SeenWorkload, Version
from pdcluster_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, SCALER, SERVICE, WORKLOADS, Kind
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role


@dataclass(frozen=True, slots=True)
class Picture:
    """All that the caches show of one PDCluster. ``pods``: of engines, workers of groups included, and of routers."""

    children: tuple[ChildView, ...]
    pods: tuple[PodView, ...]

    @property
    def http_pods(self) -> Iterator[PodView]:
        """For each instance the pod that answers HTTP. Workers of a group share the fate of that pod."""
        return (pod for pod in self.pods if pod.answers_http)

    def of(self, kind: Kind) -> list[ChildView]:
        return [child for child in self.children if child.ref.kind == kind]


@dataclass(frozen=True, slots=True)
class Routers:
    """Counts of the routers' pods."""

    there: int = 0
    ready: int = 0


def observed_of(picture: Picture) -> Observed:
    """The planner's input, as far as the caches show it."""
    return Observed(
        workloads=tuple(_workloads(picture)),
        services=tuple(_services(picture)),
        scalers=tuple(_scalers(picture)),
        routers_ready=routers_of(picture).ready,
        ready_ports=frozenset(_ready_ports(picture)),
        problems=tuple(_problems(picture)),
    )


def routers_of(picture: Picture) -> Routers:
    found = [one for one in picture.of(DEPLOYMENT) if _is_of_routers(one)]
    return Routers(sum(one.there for one in found), sum(one.ready for one in found))


def _ready_ports(picture: Picture) -> Iterable[str]:
    """Pods tell this, and no count of the Deployment does: a pod shows which template it was made from."""
    return (name for pod in picture.pods if pod.is_ready and _is_of_routers(pod) for name in pod.port_names)


def _is_of_routers(view: View) -> bool:
    return view.labels.get(labels.COMPONENT) == ROUTER


def ready_pods(picture: Picture, role: Role, revision: str, template: str) -> list[str]:
    """Names of the ready pods of one workload: for each instance the pod that answers HTTP."""
    wanted = (role.value, revision, template)
    return sorted(pod.ref.name for pod in picture.http_pods if pod.is_ready and pod.workload == wanted)


def _workloads(picture: Picture) -> Iterable[SeenWorkload]:
    pods: dict[tuple[str, str, str], list[PodView]] = {}
    for pod in picture.http_pods:
        pods.setdefault(pod.workload, []).append(pod)
    for child in picture.children:
        kind, role, key = child.ref.kind, _role_of(child), tuple_of(child.labels)
        if kind not in WORKLOADS or role is None:
            continue
        ours = pods.get(key, [])
        yield SeenWorkload(
            child.ref.name,
            kind,
            role,
            revision=key[1],
            template=key[2],
            version=_version_of(child),
            created_s=child.created_s,
            replicas=child.replicas,
            live=sum(pod.is_live for pod in ours),
            ready=sum(pod.is_ready for pod in ours),
            terminating=sum(pod.is_terminating for pod in ours),
            ready_groups=_ready_groups(kind, ours),
        )


def _ready_groups(kind: Kind, http_pods: Collection[PodView]) -> tuple[int, ...] | None:
    """Indexes of the ready groups; None: it is a Deployment, or groups do not tell each its own index."""
    groups = {pod.group: pod.is_ready for pod in http_pods if pod.is_live}
    is_told = None not in groups and len(groups) == sum(pod.is_live for pod in http_pods)
    ready = sorted(group for group, is_ready in groups.items() if is_ready and group is not None)
    return tuple(ready) if kind == LEADER_WORKER_SET and is_told else None


def _services(picture: Picture) -> Iterable[SeenService]:
    for child in picture.of(SERVICE):
        if role := _role_of(child):
            yield SeenService(child.ref.name, role, child.labels.get(labels.REVISION, ""), _version_of(child))


def _scalers(picture: Picture) -> Iterable[SeenScaler]:
    for child in picture.of(SCALER):
        if role := _role_of(child):
            yield SeenScaler(child.ref.name, role, child.replicas, _version_of(child))


def _version_of(child: ChildView) -> Version:
    return Version(child.uid, child.resource_version)


def _role_of(view: View) -> Role | None:
    named = view.labels.get(labels.ROLE)
    return next((role for role in Role if role.value == named), None)


def _problems(picture: Picture) -> Iterable[SeenProblem]:
    """Crash loops come first, then problems of children, then problems of pods. Each part is sorted by name, so the
    order stays the same."""
    of_pods = [(pod.ref.name, _problem(pod, pod.problem, is_loop=pod.is_looping)) for pod in picture.pods]
    of_children = [(one.ref.name, _problem(one, _child_problem(picture, one))) for one in picture.children]
    told = [*sorted(of_children, key=_by_name), *sorted(of_pods, key=_by_name)]
    return sorted((found for _, found in told if found.text), key=lambda found: not found.is_loop)


def _by_name(named: tuple[str, SeenProblem]) -> str:
    return named[0]


def _problem(view: View, text: str, *, is_loop: bool = False) -> SeenProblem:
    _, revision, template = tuple_of(view.labels)
    return SeenProblem(_role_of(view), revision, template, text, is_loop)


def _child_problem(picture: Picture, child: ChildView) -> str:
    """Why pods of a child are not made; empty: there is no problem.

    A Deployment's status says why. A LeaderWorkerSet's does not, and we may not read the Events of its StatefulSets.
    """
    if child.problem or child.ref.kind != LEADER_WORKER_SET:
        return child.problem
    ours = [pod for pod in picture.http_pods if pod.workload == tuple_of(child.labels)]
    if len(ours) >= child.replicas:
        return ""
    name = child.ref.name
    return (
        f"{LEADER_WORKER_SET.name} {name} asks for {child.replicas} groups and {len(ours)} have a pod: where it stays "
        f"so, `kubectl describe statefulset {name}` tells why"
    )

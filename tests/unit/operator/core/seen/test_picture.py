"""What the planner is told of what the caches show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakes.operator_cluster import make_pool
from pdcluster_operator.core.plan.pool_plan import plan_pool
from pdcluster_operator.core.seen.object_views import ChildView, PodView, view_of
from pdcluster_operator.core.seen.observed import SeenProblem
from pdcluster_operator.core.seen.picture import Picture, observed_of, ready_pods
from pdcluster_operator.core.status.conditions import Type
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

OWN = {labels.CLUSTER: "pool", labels.ROLE: "decode", labels.REVISION: "r", labels.TEMPLATE: "t"}


def metadata(name: str, more: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "5", "labels": {**OWN, **more}}


def pod(name: str, *, answers_http: bool, is_ready: bool = True, template: str = "t", revision: str = "r") -> PodView:
    own = {labels.TEMPLATE: template, labels.REVISION: revision}
    more = {**own, labels.LEADER: "true"} if answers_http else own
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(is_ready)}]}
    view = view_of({"apiVersion": "v1", "kind": "Pod", "metadata": metadata(name, more), "status": status})
    assert isinstance(view, PodView)
    return view


def leader_worker_set(replicas: int) -> ChildView:
    api_version = "leaderworkerset.x-k8s.io/v1"
    spec = {"replicas": replicas}
    view = view_of(
        {"apiVersion": api_version, "kind": "LeaderWorkerSet", "metadata": metadata("set", {}), "spec": spec}
    )
    assert isinstance(view, ChildView)
    return view


def test_a_group_on_several_nodes_is_one_instance_and_its_leader_says_how_it_is() -> None:
    pods = (
        pod("a", answers_http=True),
        pod("a-1", answers_http=False),
        pod("b", answers_http=True, is_ready=False),
        pod("b-1", answers_http=False),
    )
    picture = Picture((leader_worker_set(2),), pods)
    [workload] = observed_of(picture).workloads
    assert (workload.live, workload.ready) == (2, 1)
    assert ready_pods(picture, Role.DECODE, "r", "t") == ["a"], "only a pod that answers HTTP can be asked"


def test_groups_tell_which_of_them_are_ready_or_else_count_as_those_of_a_deployment() -> None:
    def of_group(name: str, index: str, *, is_ready: bool = True) -> PodView:
        view = pod(name, answers_http=True, is_ready=is_ready)
        return replace(view, labels={**view.labels, labels.GROUP_INDEX: index})

    def ready_groups(*pods: PodView) -> tuple[int, ...] | None:
        [workload] = observed_of(Picture((leader_worker_set(3),), pods)).workloads
        return workload.as_numbers.ready_groups

    assert ready_groups(of_group("c", "2"), of_group("b", "1", is_ready=False), of_group("a", "0")) == (0, 2)
    assert ready_groups() == ()
    assert ready_groups(of_group("a", "0"), pod("b", answers_http=True)) is None, "one has no index"
    assert ready_groups(of_group("a", "x")) is None
    assert ready_groups(of_group("a", "0"), of_group("b", "0", is_ready=False)) is None, "podOverrides has set it"


def test_a_target_is_proven_by_its_own_pods_alone() -> None:
    pods = (
        pod("old", answers_http=True, template="s"),
        pod("older", answers_http=True, revision="q"),
        pod("new", answers_http=True),
    )
    assert ready_pods(Picture((), pods), Role.DECODE, "r", "t") == ["new"]


def test_a_worker_that_is_not_placed_is_a_problem_too() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "no node"}
    told = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata("a-1", {}), "status": {"conditions": [condition]}}
    worker = view_of(told)
    assert isinstance(worker, PodView)
    [problem] = observed_of(Picture((), (worker,))).problems
    assert "a-1 is not placed" in problem.text


def test_the_ports_of_routers_count_once_these_are_ready() -> None:
    def router(name: str, port: str, component: str = "router", *, is_ready: bool = True, **more: Any) -> PodView:
        own = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "5", **more}
        named = {labels.CLUSTER: "pool", labels.COMPONENT: component}
        spec = {"containers": [{"name": "router", "ports": [{"name": "http"}, {"name": port}, {}]}, {"name": "beside"}]}
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(is_ready)}]}
        view = view_of(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {**own, "labels": named}, "spec": spec, "status": status}
        )
        assert isinstance(view, PodView)
        return view

    pods = (
        router("ready", "a"),
        router("starts", "b", is_ready=False),
        router("goes", "c", deletionTimestamp="2026-01-01T00:00:00Z"),
        router("engine", "d", "prefill"),
    )
    assert observed_of(Picture((), pods)).ready_ports == {"http", "a"}


def dying(name: str, count: int, **own: str) -> PodView:
    ended = {"exitCode": 1, "reason": "Error"}
    container = {"name": "engine", "restartCount": count, "state": {}, "lastState": {"terminated": ended}}
    told = {"metadata": metadata(name, own), "status": {"containerStatuses": [container]}}
    view = view_of({"apiVersion": "v1", "kind": "Pod", **told})
    assert isinstance(view, PodView)
    return view


def test_problems_say_whose_they_are_and_crash_loops_come_first() -> None:
    router = {labels.ROLE: "", labels.REVISION: "", labels.TEMPLATE: "", labels.COMPONENT: "router"}
    pods = (dying("a", 1), dying("b", 3, **{labels.ROLE: "prefill"}), dying("c", 2, **router))
    found = observed_of(Picture((), pods)).problems
    assert [(one.role, one.text.split(",")[0], one.is_loop) for one in found] == [
        (Role.PREFILL, "pod b", True),
        (Role.DECODE, "pod a", False),
        (None, "pod c", False),
    ]


def test_a_group_set_whose_pods_nobody_makes_says_where_the_reason_is() -> None:
    [problem] = observed_of(Picture((leader_worker_set(2),), (pod("a", answers_http=True),))).problems
    assert (problem.role, problem.text) == (
        Role.DECODE,
        "LeaderWorkerSet set asks for 2 groups and 1 have a pod: where it stays so, "
        "`kubectl describe statefulset set` tells why",
    )
    whole = Picture((leader_worker_set(1),), (pod("a", answers_http=True),))
    assert observed_of(whole).problems == ()


def test_of_two_problems_the_one_of_the_engines_that_the_spec_asks_for_is_told() -> None:
    """The old ones go, and may still be what serves."""

    def message_of(problems: tuple[SeenProblem, ...], condition: Type) -> str:
        observed = replace(observed_of(Picture((), ())), problems=problems)
        plan = plan_pool(make_pool(), observed, secret_text="s" * 32, now=0)
        found = plan.status.condition(condition)
        assert found is not None
        return f"{plan.status.target}: {found.message}"

    revision, _, template = message_of((), Type.DECODE_READY).partition(":")[0].split("-")
    told = (
        SeenProblem(Role.DECODE, "0a1b2c3d", template, "of an old one", is_loop=True),
        SeenProblem(Role.DECODE, revision, template, "of a new one", is_loop=True),
    )
    for condition in (Type.DECODE_READY, Type.DEGRADED):
        assert message_of(told, condition).endswith("of a new one")

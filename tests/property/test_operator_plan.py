"""Laws of plans, over random histories of a PDCluster in a cluster in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from fakes.operator_cluster import FakeCluster, make_cluster
from operator_cases.objects import D, P
from pdcluster_operator.api.cluster import PDCluster, Rollout
from pdcluster_operator.core.plan.actions import Plan
from pdcluster_operator.core.seen.observed import Observed, SeenWorkload
from pdcluster_operator.core.status.conditions import Truth, Type
from pdcluster_protocol.labels import Role

Changes = dict[str, Any]


def _limits(surge: int, unavailable: int) -> Changes:
    return {"spec.rollout": {"maxSurge": surge, "maxUnavailable": unavailable if surge else max(unavailable, 1)}}


def _roles(prefill: int, decode: int) -> Changes:
    return {f"{P}.replicas": prefill, f"{D}.replicas": decode}


SIZES: Final = st.one_of(
    st.builds(_roles, st.integers(1, 4), st.integers(1, 4)),
    st.just(_roles(0, 0)),
)
SPECS: Final = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    SIZES,
    st.builds(_limits, st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([{"spec.image": f"engine:{number}"} for number in range(3)]),
    st.sampled_from([{}, {f"{D}.engineArgs": {"max-num-seqs": "8"}}, {f"{P}.parallelism": {"tensor": 2}}]),
    st.sampled_from([{}, {"spec.scaling.mode": "External"}]),
)
"""Specs that can be carried out."""
MAX_WRITING_PLANS: Final = 5
"""In a row, while no pod moves: lower one role, then the other, grow, remove."""
PAUSES_S: Final = (1, 1, 1, 2 * Rollout().progress_deadline_seconds)
"""Seconds between two rounds. After the last of these pauses the deadline is over, if no pod has moved."""
BROKEN: Final = {f"{P}.podOverrides": {"spec": {"containers": [{"image": "x"}]}}}


class History:
    """One cluster whose pods do as ``choose`` says."""

    def __init__(self, choose: st.DataObject) -> None:
        self.world = FakeCluster()
        self.written: list[list[str]] = []
        """What each of the last plans in a row has written."""
        self._choose = choose

    def step(self, changes: Mapping[str, Any]) -> None:
        """Reconciles until nothing is written any more, which must be soon while no pod moves; then some pods follow.

        More than one may write: a workload that is lowered and never had a pod gives its place away at once, and is
        removed.
        """
        cluster = make_cluster(changes)
        plan = self._reconcile(cluster)
        while self.written:
            assert len(self.written) < MAX_WRITING_PLANS, self.written
            plan = self._reconcile(cluster)
        if plan.to_verify and self._choose.draw(st.booleans()):
            self.world.verify(plan)
        self._let_pods_follow()
        self.world.now += self._choose.draw(st.sampled_from(PAUSES_S))

    def _reconcile(self, cluster: PDCluster) -> Plan:
        before, num_written = self.world.observed(), len(self.world.writes)
        plan = self.world.reconcile(cluster)
        _require_last_prefill(before, self.world.observed())
        lines = self.world.writes[num_written:]
        self.written = [*self.written, lines] if lines else []
        return plan

    def _let_pods_follow(self) -> None:
        for name, pods in self.world.pods.items():
            asked = self.world.replicas(name)
            pods.terminating -= self._choose.draw(st.integers(0, pods.terminating))
            surplus = max(pods.live - asked, 0)
            pods.live, pods.terminating = pods.live - surplus, pods.terminating + surplus
            pods.live += self._choose.draw(st.integers(0, max(asked - pods.live, 0)))
            pods.ready = self._choose.draw(st.integers(min(pods.ready, pods.live), pods.live))


def _require_last_prefill(before: Observed, after: Observed) -> None:
    """No plan took a last, ready prefill engine from decode pods of its revision that were told to go."""
    for revision in {seen.revision for seen in before.workloads}:
        had, has = (_of(picture, Role.PREFILL, revision) for picture in (before, after))
        decode = _of(after, Role.DECODE, revision)
        is_leaving = not any(seen.replicas for seen in decode) and any(seen.live + seen.terminating for seen in decode)
        if is_leaving and any(min(seen.ready, seen.replicas) for seen in had):
            assert any(seen.replicas for seen in has), f"revision {revision}"


def _of(picture: Observed, role: Role, revision: str) -> list[SeenWorkload]:
    return [seen for seen in picture.workloads if (seen.role, seen.revision) == (role, revision)]


@settings(max_examples=drawn(200), deadline=None)
@given(st.data(), st.lists(st.tuples(SPECS, st.integers(1, 4)), min_size=1, max_size=4))
def test_whatever_was_asked_for_before_the_last_spec_is_what_is_there_in_the_end(
    data: st.DataObject, history: list[tuple[Changes, int]]
) -> None:
    told = History(data)
    for changes, rounds in history:
        for _ in range(rounds):
            told.step(changes)
    last = history[-1][0]
    world = told.world
    world.settle(make_cluster(last))
    _require_all_is_as(last, world)


@settings(max_examples=drawn(100), deadline=None)
@given(st.data(), SPECS, SPECS, st.integers(0, 3))
def test_a_spec_that_cannot_be_carried_out_changes_nothing_wherever_it_comes(
    data: st.DataObject, first: Changes, second: Changes, rounds: int
) -> None:
    told = History(data)
    told.step(first)
    for _ in range(rounds):
        told.step(second)
    before = list(told.world.writes)
    told.world.reconcile(make_cluster({**second, **BROKEN}))
    assert told.world.writes == before
    told.world.settle(make_cluster(second))
    _require_all_is_as(second, told.world)


@settings(max_examples=drawn(200), deadline=None)
@given(SPECS, SPECS, st.integers(1, 8))
def test_a_rollout_ends_also_where_pods_that_were_told_to_go_outlast_the_deadline(
    first: Changes, second: Changes, rounds: int
) -> None:
    world = FakeCluster()
    world.settle(make_cluster(first))
    cluster = make_cluster({**second, "metadata.generation": 2})
    for _ in range(rounds):
        plan = world.reconcile(cluster)
        if plan.to_verify:
            world.verify(plan)
        _start_all_and_let_none_be_gone(world)
    for _ in range(2):
        world.now += max(PAUSES_S)
        world.reconcile(cluster)
    world.settle(cluster)
    _require_all_is_as(second, world)


def _start_all_and_let_none_be_gone(world: FakeCluster) -> None:
    world.let_go()
    for name, pods in world.pods.items():
        pods.live = pods.ready = world.replicas(name)


def _require_all_is_as(changes: Changes, world: FakeCluster) -> None:
    assert world.plan
    target = world.plan.facts.target
    is_stopped = not world.plan.facts.prefill.wanted
    ready = world.plan.status.condition(Type.READY)
    assert ready
    assert (ready.truth is Truth.TRUE) is not is_stopped
    for role in Role:
        ours = [seen for seen in world.observed().workloads if seen.role is role]
        assert sum(seen.replicas for seen in ours) == world.plan.facts.of(role).wanted
        assert len(ours) == 1 or (is_stopped and not ours)
    revisions = {service.revision for service in world.observed().services}
    assert revisions == {target.partition("-")[0]}
    is_external = "spec.scaling.mode" in changes
    assert len(world.names("PDRoleScaler")) == (2 if is_external else 0)


GATEWAYS: Final = {"gatewayNamespaces": ["gateways"]}
PICKERS: Final[dict[str, Changes]] = {
    "": {},
    "picker": {"spec.router.picker": GATEWAYS},
    "picker-tls": {"spec.router.picker": {**GATEWAYS, "tls": {"secretName": "shown"}}},
}
"""Specs by the name of the routers' port that each asks for."""
SPOKEN: Final = {"picker": "kubernetes.io/h2c", "picker-tls": "http2"}


@settings(max_examples=drawn(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(PICKERS)), st.sets(st.sampled_from(sorted(SPOKEN)))), min_size=1))
def test_gateways_are_led_to_routers_that_are_ready_where_there_are_any_and_to_new_ones_first(
    history: list[tuple[str, set[str]]],
) -> None:
    world = FakeCluster()
    for wanted, ready in history:
        world.ready_ports = frozenset(ready)
        plan = world.reconcile(make_cluster(PICKERS[wanted]))
        ports = world.objects["Service", "pool-router-internal"].document["spec"]["ports"][1:]
        led_to = [wanted if wanted in ready else next(iter(ready), wanted)] if wanted else []
        assert [(port["targetPort"], port["appProtocol"]) for port in ports] == [(one, SPOKEN[one]) for one in led_to]
        assert bool(plan.facts.held_back) == (led_to not in ([], [wanted]))

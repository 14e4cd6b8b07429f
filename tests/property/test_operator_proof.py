"""No status says Verified of engines that no request went through, whatever write fails and whenever operators die."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from fakes.operator_cluster import Died, FakeCluster, make_cluster, make_pool
from operator_cases.objects import D, both
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.plan.actions import Plan, TargetIds
from pdcluster_operator.core.plan.target import target_of
from pdcluster_operator.core.status.conditions import Truth, Type
from pdcluster_protocol.labels import Role

NO_SURGE: Final = {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}
RUN: Final = {**NO_SURGE, **both("replicas", 1)}
STOP: Final = {**NO_SURGE, **both("replicas", 0)}
OTHERS: Final = (
    {**RUN, **both("replicas", 2)},
    {**RUN, "spec.image": "engine:2"},
    {**STOP, "spec.image": "engine:2"},
    {**RUN, f"{D}.engineArgs": {"max-num-seqs": "8"}},
    both("replicas", 1),
)
SPECS: Final = st.sampled_from([*(RUN, STOP) * 5, *OTHERS])
"""Mostly one revision, for a proof is of one; without surge, for then a rollback too may find its engines gone."""
WRITES_LEFT: Final = st.sampled_from([None, None, 0, 1, 2])
"""Of one look, before no more get through. A stop and a start make one or two, and then the status."""


class Life:
    """One PDCluster, its operators one after the other, and which targets were truly asked with these engines."""

    def __init__(self, choose: st.DataObject) -> None:
        self.world = FakeCluster()
        self.proven: dict[str, TargetIds] = {}
        self._choose = choose

    def begin(self, changes: Mapping[str, Any]) -> None:
        """It is ready and proven."""
        self.world.settle(make_cluster(changes))
        plan = self.world.plan_for(make_cluster(changes))
        ids = target_of(make_pool(changes), self.world.observed()).ids
        assert plan.status.verified == ids.name
        self.proven = {ids.name: ids}

    def look(self, changes: Mapping[str, Any], writes_left: int | None) -> None:
        cluster = make_cluster(changes)
        self.world.writes_left = writes_left
        with suppress(Died):
            self._carry_out(cluster)
        self.proven = {name: ids for name, ids in self.proven.items() if self._has_engines(ids)}
        if self._choose.draw(st.booleans()):
            self.world.verifications.clear()  # Another operator, which knows only what is in the cluster.
        if pods_follow := self._choose.draw(st.sampled_from([self.world.follow, self.world.let_go, None])):
            pods_follow()
        self.world.now += 1

    def _carry_out(self, cluster: PDCluster) -> None:
        """
        Raises:
            Died: Not all of it was written; then nobody is asked either.
        """
        plan = self.world.plan_for(cluster)
        self._require_proof(plan)
        assert plan.to_verify is None or self._has_engines(plan.to_verify), "only those that go could answer"
        self.world.act_on(plan)
        if plan.to_verify and self._choose.draw(st.booleans()):
            self.world.verify(plan)
            self.proven[plan.to_verify.name] = plan.to_verify

    def _require_proof(self, plan: Plan) -> None:
        found = plan.status.condition(Type.TRANSFER_VERIFIED)
        assert found
        assert found.truth is not Truth.TRUE or plan.facts.target in self.proven, found.message

    def _has_engines(self, ids: TargetIds) -> bool:
        """Each role asks for some: those that the request went through, or ones that came beside them."""
        templates = {Role.PREFILL: ids.prefill_template, Role.DECODE: ids.decode_template}
        wanted = {(role, ids.revision, template) for role, template in templates.items()}
        asked = {(it.role, it.revision, it.template) for it in self.world.observed().workloads if it.replicas}
        return wanted <= asked


@settings(max_examples=drawn(100), deadline=None)
@given(st.data(), st.lists(st.tuples(SPECS, st.lists(WRITES_LEFT, min_size=1, max_size=3)), min_size=2, max_size=6))
def test_what_is_said_to_be_verified_was_asked_since_a_role_had_no_engine_of_it(
    data: st.DataObject, history: list[tuple[dict[str, Any], list[int | None]]]
) -> None:
    life = Life(data)
    life.begin(RUN)
    for changes, looks in history:
        for writes_left in looks:
            life.look(changes, writes_left)
    _require_an_end(life, history[-1][0])


def _require_an_end(life: Life, changes: dict[str, Any]) -> None:
    """When writes get through again the pool is ready, with a proof that is one."""
    life.world.writes_left = None
    life.world.settle(make_cluster({**changes, **both("replicas", 1)}))
    assert life.world.plan
    ready = life.world.plan.status.condition(Type.READY)
    assert ready
    assert ready.truth is Truth.TRUE

"""Plans as stories: a cluster in memory carries them out, and its pods follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fakes.operator_cluster import Conflict, FakeCluster, make_cluster, make_pool
from operator_cases.objects import D, P, both
from pdcluster_operator.core.plan.actions import Plan, Way
from pdcluster_operator.core.plan.pool_plan import plan_pool
from pdcluster_operator.core.seen.observed import SeenProblem, VerificationResult, Version
from pdcluster_operator.core.status.conditions import Reason, Status, Truth, Type
from pdcluster_operator.core.status.pool_status import Verification
from pdcluster_protocol.labels import Role

NODES = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), **both("nodesPerInstance", 2)}
NO_SURGE = {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}
NEXT = {"spec.image": "engine:2"}
BROKEN = {f"{P}.podOverrides": {"spec": {"containers": [{"image": "x"}]}}}


def running(changes: dict[str, Any] | None = None) -> FakeCluster:
    """A cluster in which everything is as the spec says."""
    world = FakeCluster(has_leader_worker_sets=True)
    world.settle(make_cluster(changes))
    return world


def status(world: FakeCluster) -> Status:
    assert world.plan
    return world.plan.status


def truth(world: FakeCluster, condition: Type) -> Truth:
    found = status(world).condition(condition)
    assert found
    return found.truth


def workloads(world: FakeCluster, role: Role) -> dict[str, int]:
    """Name to replicas."""
    found = {seen.name: seen.replicas for seen in world.observed().workloads if seen.role is role}
    return dict(sorted(found.items()))


def has_no_orders(plan: Plan) -> bool:
    return not (plan.children or plan.moves or plan.prunes or plan.scaler_statuses)


class TestANewPool:
    def test_it_becomes_ready_and_everything_is_there_once(self) -> None:
        world = running({f"{D}.replicas": 2})
        assert truth(world, Type.READY) is Truth.TRUE
        assert {kind: len(world.names(kind)) for kind, _ in world.objects} == {
            "Secret": 1,
            "ServiceAccount": 2,
            "Role": 1,
            "RoleBinding": 1,
            "NetworkPolicy": 3,
            "PodDisruptionBudget": 3,
            "Service": 4,
            "Deployment": 3,
        }

    def test_run_again_it_changes_nothing(self) -> None:
        world = running()
        before = list(world.writes)
        world.reconcile(make_cluster())
        assert world.writes == before

    def test_both_workloads_start_with_what_they_shall_have(self) -> None:
        world = FakeCluster()
        plan = world.reconcile(make_cluster({f"{D}.replicas": 2}))
        made = {child.name: child for child in plan.children if child.way is Way.CREATE and child.kind == "Deployment"}
        assert [child.document["spec"]["replicas"] for child in made.values()] == [1, 2]
        assert plan.moves == ()

    def test_access_comes_before_whoever_needs_it(self) -> None:
        order = [child.kind for child in FakeCluster().plan_for(make_cluster()).children]
        assert order.index("Secret") < order.index("Deployment")
        assert order.index("RoleBinding") < order.index("Deployment")
        assert order.index("NetworkPolicy") < order.index("Deployment")

    def test_it_asks_for_a_proof_when_a_router_and_both_roles_are_ready(self) -> None:
        world, cluster = FakeCluster(routers_ready=0), make_cluster()
        world.reconcile(cluster)
        world.follow()
        assert not world.reconcile(cluster).to_verify
        world.routers_ready = 1
        plan = world.reconcile(cluster)
        assert plan.to_verify
        assert plan.to_verify.name == plan.facts.target == plan.status.target
        world.verify(plan)
        assert not world.reconcile(cluster).to_verify

    def test_a_user_who_brings_a_secret_gets_none(self) -> None:
        assert running({"spec.auth.secretRef": {"name": "mine"}}).names("Secret") == set()

    def test_the_secret_is_made_once_whatever_text_comes_later(self) -> None:
        world, pool = running(), make_pool()
        before = world.objects["Secret", "pool-secret"].document
        plan = plan_pool(pool, world.observed(), secret_text="another", now=2000)
        assert not [child for child in plan.children if child.kind == "Secret"]
        stale = replace(world.observed(), has_secret=False)
        world.carry_out(plan_pool(pool, stale, secret_text="another", now=2000))
        assert world.objects["Secret", "pool-secret"].document == before

    def test_over_several_nodes_it_is_a_group_for_each_role(self) -> None:
        world = running(NODES)
        assert len(world.names("LeaderWorkerSet")) == 2
        assert world.names("Deployment") == {"pool-router"}
        assert truth(world, Type.READY) is Truth.TRUE


class TestARollout:
    @pytest.mark.parametrize("limits", [{}, NO_SURGE, {"spec.rollout": {"maxSurge": "50%", "maxUnavailable": "25%"}}])
    def test_only_the_new_revision_is_left_in_the_end(self, limits: dict[str, Any]) -> None:
        size = {f"{P}.replicas": 2, f"{D}.replicas": 4, **limits}
        world = running(size)
        old = status(world).target
        world.settle(make_cluster({**size, **NEXT}))
        assert truth(world, Type.READY) is Truth.TRUE
        assert status(world).target != old
        assert [*workloads(world, Role.PREFILL).values(), *workloads(world, Role.DECODE).values()] == [2, 4]
        assert not [name for name in world.names("Service") if old.partition("-")[0] in name]

    def test_an_old_workload_keeps_its_template_until_it_is_gone(self) -> None:
        world, cluster = running(), make_cluster({**NEXT, "spec.drain.timeoutSeconds": 5})
        (old,) = workloads(world, Role.PREFILL)
        template = world.objects["Deployment", old].document["spec"]["template"]
        world.reconcile(cluster)
        assert old in workloads(world, Role.PREFILL)
        assert world.objects["Deployment", old].document["spec"]["template"] == template
        world.settle(cluster)
        assert old not in workloads(world, Role.PREFILL)

    def test_both_revisions_can_be_found_while_both_are_there(self) -> None:
        world = running()
        before = world.names("Service")
        world.reconcile(make_cluster(NEXT))
        assert before < world.names("Service")
        assert len(world.names("Service")) == 6

    def test_a_service_that_somebody_deleted_comes_back_also_for_an_old_revision(self) -> None:
        world, cluster = running(), make_cluster(NEXT)
        world.reconcile(cluster)
        old = next(name for kind, name in world.objects if kind == "Service" and name.startswith("pool-decode"))
        del world.objects["Service", old]
        world.reconcile(cluster)
        assert old in world.names("Service")

    def test_a_change_of_one_role_leaves_the_other_roles_engines_alone(self) -> None:
        world = running()
        before = workloads(world, Role.PREFILL)
        written = world.settle(make_cluster({f"{D}.engineArgs": {"max-num-seqs": "8"}}))
        assert workloads(world, Role.PREFILL) == before
        assert not [line for line in written if "prefill" in line]

    def test_applying_the_old_spec_again_rolls_back_to_the_old_workload(self) -> None:
        world = running({f"{P}.replicas": 3, f"{D}.replicas": 3})
        old = workloads(world, Role.PREFILL)
        three = {f"{P}.replicas": 3, f"{D}.replicas": 3}
        world.reconcile(make_cluster({**three, **NEXT}))
        world.follow()
        world.reconcile(make_cluster({**three, **NEXT}))
        assert workloads(world, Role.PREFILL) != old
        world.settle(make_cluster(three))
        assert workloads(world, Role.PREFILL) == old

    def test_while_it_is_paused_nothing_moves(self) -> None:
        world = running()
        before = world.picture()
        world.settle(make_cluster({**NEXT, "spec.rollout.paused": True}))
        assert world.picture() == before
        assert status(world).reason(Type.PROGRESSING) is Reason.ROLLOUT_PAUSED

    def test_it_stops_at_the_progress_deadline_and_says_when_it_will(self) -> None:
        world, cluster = running(), make_cluster({**NEXT, "spec.rollout.progressDeadlineSeconds": 60})
        plan = world.reconcile(cluster)
        assert plan.wake_after_s == 60
        world.now += 59
        assert world.reconcile(cluster).wake_after_s == 1
        world.now += 1
        late = world.reconcile(cluster)
        assert late.status.reason(Type.PROGRESSING) is Reason.PROGRESS_DEADLINE_EXCEEDED
        assert (late.moves, late.wake_after_s) == ((), None)

    def test_a_target_that_failed_its_proof_takes_nothing_from_the_old_one(self) -> None:
        world, cluster = running(), make_cluster(NEXT)
        old = workloads(world, Role.PREFILL)
        for _ in range(10):
            plan = world.reconcile(cluster)
            world.verifications[plan.facts.target] = VerificationResult(Verification.FAILED, "no KV came")
            world.follow()
        assert workloads(world, Role.PREFILL).items() > old.items()
        assert truth(world, Type.READY) is Truth.FALSE

    def test_a_proof_in_status_is_enough_for_the_next_operator(self) -> None:
        world = running()
        world.verifications.clear()
        assert not world.reconcile(make_cluster()).to_verify
        assert truth(world, Type.TRANSFER_VERIFIED) is Truth.TRUE

    def test_from_one_node_to_several_the_deployment_gives_way_to_the_group(self) -> None:
        one = {**NODES, **both("nodesPerInstance", 1)}
        world = running(one)
        world.settle(make_cluster(NODES))
        assert world.names("Deployment") == {"pool-router"}
        assert len(world.names("LeaderWorkerSet")) == 2


class TestTheLastPrefillEngine:
    def test_it_outlives_the_decode_engines_of_its_revision(self) -> None:
        world, cluster = running(NO_SURGE), make_cluster({**NEXT, **NO_SURGE})
        (prefill,), (decode,) = workloads(world, Role.PREFILL), workloads(world, Role.DECODE)
        world.reconcile(cluster)
        world.let_go()
        assert (world.replicas(prefill), world.replicas(decode)) == (1, 0)
        world.reconcile(cluster)
        assert (world.replicas(prefill), world.pods[decode].terminating) == (1, 1)
        world.pods[decode].terminating = 0
        world.reconcile(cluster)
        assert world.replicas(prefill) == 0

    def test_it_gives_way_to_its_next_template_where_there_is_no_surge(self) -> None:
        world = running(NO_SURGE)
        world.settle(make_cluster({**NO_SURGE, f"{P}.engineArgs": {"max-num-seqs": "8"}}))
        assert truth(world, Type.READY) is Truth.TRUE
        assert len(workloads(world, Role.PREFILL)) == 1

    def test_when_the_pool_is_stopped_too(self) -> None:
        size = {f"{P}.replicas": 2, f"{D}.replicas": 2}
        world, cluster = running(size), make_cluster(both("replicas", 0))
        (prefill,), (decode,) = workloads(world, Role.PREFILL), workloads(world, Role.DECODE)
        world.reconcile(cluster)
        assert (world.replicas(prefill), world.replicas(decode)) == (1, 0)
        world.settle(cluster)
        assert world.replicas(prefill) == 0


class TestScaling:
    EXTERNAL = "External"

    def test_scalers_are_there_only_where_they_count(self) -> None:
        external = {"spec.scaling.mode": self.EXTERNAL}
        world = running()
        assert world.names("PDRoleScaler") == set()
        world.settle(make_cluster(external))
        assert world.names("PDRoleScaler") == {"pool-prefill", "pool-decode"}
        world.settle(make_cluster())
        assert world.names("PDRoleScaler") == set()

    def test_a_scaler_that_somebody_moved_is_followed_and_never_written(self) -> None:
        external = {"spec.scaling.mode": self.EXTERNAL}
        world = running(external)
        world.scale(Role.DECODE, 3)
        written = world.settle(make_cluster(external))
        assert list(workloads(world, Role.DECODE).values()) == [3]
        assert not [line for line in written if "PDRoleScaler" in line]
        assert world.objects["PDRoleScaler", "pool-decode"].document["spec"]["replicas"] == 3

    def test_its_status_says_how_many_there_are_and_how_to_find_them(self) -> None:
        world = running({"spec.scaling.mode": self.EXTERNAL, f"{D}.replicas": 2})
        assert world.plan
        found = {status.name: status for status in world.plan.scaler_statuses}
        assert {name: status.replicas for name, status in found.items()} == {"pool-prefill": 1, "pool-decode": 2}
        assert "pdcluster.dev/role=decode" in found["pool-decode"].selector

    def test_the_ratio_raises_the_role_that_lacks(self) -> None:
        scaling = {"spec.scaling": {"mode": self.EXTERNAL, "ratio": {"min": 0.5, "max": 2}}}
        world = running(scaling)
        world.scale(Role.DECODE, 4)
        world.settle(make_cluster(scaling))
        assert list(workloads(world, Role.PREFILL).values()) == [2]

    def test_a_stopped_pool_keeps_its_router_and_its_address(self) -> None:
        world = running()
        world.settle(make_cluster(both("replicas", 0)))
        assert set(workloads(world, Role.PREFILL).values()) == {0}
        assert "pool-router" in world.names("Service") & world.names("Deployment")

    def test_a_pool_that_was_stopped_is_ready_only_after_a_new_proof(self) -> None:
        world = running()
        world.settle(make_cluster(both("replicas", 0)))
        world.reconcile(make_cluster())
        world.follow()
        plan = world.reconcile(make_cluster())
        assert plan.to_verify
        assert status(world).reason(Type.READY) is Reason.VERIFICATION_PENDING
        world.settle(make_cluster())
        assert truth(world, Type.READY) is Truth.TRUE


class TestARefusal:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (BROKEN, "podOverrides.spec.containers has an item without name"),
            ({"spec.router.podOverrides": {"spec": {"volumes": [{}]}}}, "spec.volumes has an item without name"),
            (
                {"spec.scaling": {"mode": "External", "ratio": {"min": 0.0001, "max": 0.0001}}},
                "scaling.ratio: no 1 to 1000 prefill",
            ),
            ({f"{P}.replicas": 0}, "prefill has 0 replicas, decode has 1"),
            ({"spec.rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "spec.rollout: maxSurge 0 and maxUnavailable 0"),
        ],
    )
    def test_it_changes_nothing_and_says_why(self, changes: dict[str, Any], message: str) -> None:
        world = running()
        before = list(world.writes)
        plan = world.reconcile(make_cluster(changes))
        assert has_no_orders(plan)
        assert world.writes == before
        assert message in plan.facts.refusal
        assert truth(world, Type.ACCEPTED) is Truth.FALSE
        assert truth(world, Type.READY) is Truth.FALSE

    def test_groups_without_lws_are_refused_with_the_cure(self) -> None:
        world = running({**NODES, **both("nodesPerInstance", 1)})
        world.has_leader_worker_sets = False
        plan = world.reconcile(make_cluster(NODES))
        assert has_no_orders(plan)
        assert "install LWS, or set nodesPerInstance to 1" in plan.facts.refusal

    def test_nothing_is_said_to_be_verified_that_never_ran(self) -> None:
        world = FakeCluster()
        world.reconcile(make_cluster(BROKEN))
        assert truth(world, Type.TRANSFER_VERIFIED) is not Truth.TRUE

    def test_when_it_is_mended_the_rollout_goes_on(self) -> None:
        world = running()
        world.reconcile(make_cluster(BROKEN))
        world.settle(make_cluster(NEXT))
        assert truth(world, Type.READY) is Truth.TRUE


class TestOldPictures:
    def test_an_order_from_an_old_picture_is_a_conflict(self) -> None:
        world, cluster = running(), make_cluster({f"{D}.replicas": 3})
        late = world.plan_for(cluster)
        world.reconcile(cluster)
        with pytest.raises(Conflict):
            world.carry_out(late)

    def test_a_workload_is_removed_only_in_the_state_in_which_it_was_seen_empty(self) -> None:
        world, prunes = running(), dict[str, Version]()
        for _ in range(20):
            plan = world.reconcile(make_cluster(NEXT))
            prunes |= {prune.kind.name: prune.version for prune in plan.prunes}
            world.verify(plan)
            world.follow()
        assert {kind: bool(version.resource_version) for kind, version in prunes.items()} == {
            "Deployment": True,
            "Service": False,
        }

    def test_a_workload_that_an_old_picture_does_not_show_is_left_as_it_is(self) -> None:
        world, cluster = FakeCluster(), make_cluster()
        late = world.plan_for(make_cluster({f"{D}.replicas": 5}))
        world.settle(cluster)
        world.carry_out(replace(late, moves=(), prunes=()))
        assert list(workloads(world, Role.DECODE).values()) == [1]

    def test_ready_and_live_of_different_moments_are_no_error(self) -> None:
        world, cluster = running(), make_cluster()
        seen = tuple(replace(workload, live=0, ready=1) for workload in world.observed().workloads)
        assert world.plan_for(cluster, replace(world.observed(), workloads=seen)).moves == ()

    def test_the_order_of_the_indexes_does_not_matter(self) -> None:
        world = running({f"{P}.replicas": 2, f"{D}.replicas": 2})
        for image in ("engine:2", "engine:3"):
            world.reconcile(make_cluster({"spec.image": image, f"{P}.replicas": 2, f"{D}.replicas": 2}))
            world.follow()
        observed, cluster = world.observed(), make_cluster({**NEXT, f"{P}.replicas": 2, f"{D}.replicas": 2})
        turned = replace(observed, workloads=observed.workloads[::-1])
        assert world.plan_for(cluster, observed).moves == world.plan_for(cluster, turned).moves


@pytest.mark.parametrize("role", [*Role, None])
def test_the_problem_of_each_part_is_told_as_its_own(role: Role | None) -> None:
    world = running()
    problem = SeenProblem(role, "", "", "pod x: ImagePullBackOff")
    told = world.plan_for(make_cluster(), replace(world.observed(), problems=(problem,))).facts.problems
    assert [told.prefill, told.decode, told.routers] == [problem.text if one is role else "" for one in (*Role, None)]

"""LeaderWorkerSets give up their last groups, ready or not: the floor holds, and who waits for it says so."""

from __future__ import annotations

import pytest

from fakes.deployments import NEVER, Ask, FakeDeployments
from pdcluster_operator.core.rollout.fleet import Fleet, RoleFleet, Workload
from pdcluster_operator.core.rollout.group_order import held_by_groups
from pdcluster_operator.core.rollout.steps import next_step
from pdcluster_protocol.labels import Role


def told(groups: str, unavailable: int) -> str:
    return (
        f"group {groups} of decode-A-t is not ready, and a LeaderWorkerSet gives up its last groups first, of which a "
        f"ready one is needed: mend what is not ready, or set rollout.maxUnavailable to {unavailable}"
    )


def rolling(unavailable: int, *, have_groups: bool = True, unready: int = 0) -> FakeDeployments:
    """2P2D of revision A, of which one decode group is never ready, when revision B is asked for, with one spare."""
    cluster = FakeDeployments(Ask("A", 2, 2), lambda: 0, lambda: 1, have_groups)
    cluster.settle()
    cluster.all["decode-A-t"].pods[unready].ready_at = NEVER
    cluster.want(Ask("B", 2, 2, surge=1, unavailable=unavailable))
    return cluster


def roll(cluster: FakeDeployments) -> int:
    """To its end, or until it has stood still for long; gives the least number of ready decode instances seen."""
    least = 2
    for _ in range(60):
        if step := next_step(cluster.fleet()):
            cluster.apply(step)
        cluster.tick()
        cluster.verify()
        least = min(least, sum(workload.ready for workload in cluster.fleet().decode.workloads))
    return least


def test_a_ready_group_stays_where_it_is_needed_and_status_can_tell_why_and_the_cure() -> None:
    cluster = rolling(0)
    assert held_by_groups(cluster.fleet()) == "", "there is a step: the spare one"
    assert roll(cluster) == 2, "the ready one and the spare one"
    assert cluster.workload("decode-A-t").replicas == 2
    assert held_by_groups(cluster.fleet()) == told("0", 1)


def test_the_cure_names_all_groups_and_the_number_that_lets_the_rollout_end() -> None:
    cluster = FakeDeployments(Ask("A", 3, 3), lambda: 0, lambda: 1, have_groups=True)
    cluster.settle()
    for pod in cluster.all["decode-A-t"].pods[:2]:
        pod.ready_at = NEVER
    cluster.want(Ask("B", 3, 3, surge=1, unavailable=0))
    roll(cluster)
    assert held_by_groups(cluster.fleet()) == told("0, 1", 2)
    cluster.want(Ask("B", 3, 3, surge=1, unavailable=2))
    roll(cluster)
    assert cluster.is_done()


def test_while_the_new_revision_does_not_come_up_the_old_one_is_not_blamed() -> None:
    """To allow fewer instances would cost a serving one, and bring nothing."""
    cluster = rolling(0)
    cluster.want(Ask("B", 2, 2, surge=1, unavailable=0, is_broken=True))
    cluster.all["decode-B-t"].is_broken = cluster.all["prefill-B-t"].is_broken = True
    roll(cluster)
    assert next_step(cluster.fleet()) is None
    assert held_by_groups(cluster.fleet()) == ""


def test_where_nothing_but_the_new_revision_can_help_no_number_is_told() -> None:
    """To lower decode would end the old revision's service, whatever may be unavailable."""
    prefill = RoleFleet(Workload("p-B", "B", 1, 1, 1), 2, 0, 2, (Workload("p-A", "A", 1, 1, 1),))
    decode = RoleFleet(Workload("d-B", "B", 1, 1, 1), 2, 1, 2, (Workload("d-A", "A", 2, 2, 1, 0, (1,)),))
    fleet = Fleet(prefill, decode)
    assert next_step(fleet) is None
    assert held_by_groups(fleet) == ""


def test_when_the_group_gets_ready_it_goes_on() -> None:
    cluster = rolling(0)
    roll(cluster)
    cluster.all["decode-A-t"].pods[0].ready_at = 0
    roll(cluster)
    assert cluster.is_done()


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(rolling(1), id="one instance less is allowed"),
        pytest.param(rolling(0, have_groups=False), id="a Deployment"),
        pytest.param(rolling(0, unready=1), id="the last group is not ready"),
    ],
)
def test_otherwise_it_ends(cluster: FakeDeployments) -> None:
    roll(cluster)
    assert cluster.is_done()
    assert held_by_groups(cluster.fleet()) == ""


def test_a_revision_does_not_stop_serving_by_what_is_lowered_alone() -> None:
    """Its other role would be of no use any more, and nobody would have counted that."""
    prefill = RoleFleet(Workload("p-B", "B", 1, 1, 1), 3, 1, 2, (Workload("p-A", "A", 3, 3, 3, 0, (0, 1, 2)),))
    decode = RoleFleet(Workload("d-B", "B", 1, 1, 1), 3, 1, 3, (Workload("d-A", "A", 3, 3, 1, 0, (2,)),))
    step = next_step(Fleet(prefill, decode))
    assert step is not None
    assert {change.workload for change in step.changes} == {"p-A"}


def test_a_target_is_no_old_workload() -> None:
    """Its replicas only rise in a rollout, and a user who asks for fewer gets that at once."""
    target = Workload("d", "A", 2, 2, 1, 0, (1,))
    fleet = Fleet(RoleFleet(Workload("p", "A", 1, 1, 1), 1, 1, 0), RoleFleet(target, 1, 1, 0), is_verified=True)
    [change] = next_step(fleet).changes  # type: ignore[union-attr]  # there is a step
    assert (change.role, change.after) == (Role.DECODE, 1)
    assert held_by_groups(fleet) == ""


def test_each_ready_group_has_an_index() -> None:
    with pytest.raises(ValueError, match="each ready group has one index"):
        Workload("w", "A", 2, 2, 2, 0, (1,))

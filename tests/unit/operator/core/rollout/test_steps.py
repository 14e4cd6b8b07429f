"""Whole rollouts as stories: each line is a decision, as ``old+new`` replicas of prefill and of decode after it.

Here a pod gets ready in the tick after it was asked for and is gone two ticks after it was told to go; the target is
verified as soon as it has one ready engine of each role. Ticks without a decision are not shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from fakes.deployments import Ask, FakeDeployments
from pdcluster_operator.core.rollout.fleet import ROLES, Fleet, RoleFleet, Workload, resolve_limits
from pdcluster_operator.core.rollout.steps import Change, Step, next_step, preview_steps
from pdcluster_protocol.labels import Role

MAX_TICKS: Final = 60


def running(ask: Ask) -> FakeDeployments:
    """A cluster that reached ``ask`` long ago; its pods take one tick to start and two to go."""
    cluster = FakeDeployments(ask, lambda: 0, lambda: 2)
    cluster.settle()
    return cluster


def told(
    cluster: FakeDeployments, ticks: int = MAX_TICKS, *, is_paused: bool = False, is_late: bool = False
) -> list[str]:
    """What is decided until the rollout is done, or for so many ticks."""
    lines = []
    for _ in range(ticks):
        step = next_step(cluster.fleet(is_paused=is_paused, is_past_deadline=is_late))
        if step:
            cluster.apply(step)
            lines.append(seen(cluster))
        cluster.tick()
        cluster.verify()
    return lines


def seen(cluster: FakeDeployments) -> str:
    fleet = cluster.fleet()
    return " ".join(
        "+".join([*(str(old.replicas) for old in fleet.of(role).old), str(fleet.of(role).target.replicas)])
        for role in ROLES
    )


STORIES: Final = {
    "1P1D without a spare accelerator: both old ones go together, then both new ones come": (
        Ask("A", 1, 1, 0, 1), Ask("B", 1, 1, 0, 1),
        ["0+0 0+0", "0+1 0+1"],
    ),
    "2P4D with one spare: roles move in turn, the old revision goes at the end with its last pair": (
        Ask("A", 2, 4, 1, 0), Ask("B", 2, 4, 1, 0),
        ["2+1 4+1", "1+1 3+1", "1+2 3+2", "1+2 2+2", "1+2 2+3", "1+2 1+3", "1+2 1+4", "0+2 0+4"],
    ),
    "4P2D with a quarter to spare: 1 of either role": (
        Ask("A", 4, 2, "25%", 0), Ask("B", 4, 2, "25%", 0),
        ["4+1 2+1", "3+1 1+1", "3+2 1+2", "2+2 1+2", "2+3 1+2", "1+3 1+2", "1+4 1+2", "0+4 0+2"],
    ),
    "4P1D without a spare: prefill waits for its last one, since decode can only be exchanged at once": (
        Ask("A", 4, 1, 0, 1), Ask("B", 4, 1, 0, 1),
        ["3+0 1+0", "3+1 1+0", "2+1 1+0", "2+2 1+0", "1+2 1+0", "1+3 1+0", "0+3 0+0", "0+4 0+1"],
    ),
    "only decode's template changes: prefill is not touched": (
        Ask("A", 2, 3, 1, 0), Ask("A", 2, 3, 1, 0, decode_template="u"),
        ["2 3+1", "2 2+1", "2 2+2", "2 1+2", "2 1+3", "2 0+3"],
    ),
    "only decode's template changes, 1P1D without a spare": (
        Ask("A", 1, 1, 0, 1), Ask("A", 1, 1, 0, 1, decode_template="u"),
        ["1 0+0", "1 0+1"],
    ),
    "more are wanted: all at once": (Ask("A", 1, 1), Ask("A", 3, 5), ["3 5"]),
    "fewer are wanted: all at once": (Ask("A", 3, 5), Ask("A", 1, 2), ["1 2"]),
    "a new revision and more of it": (Ask("A", 1, 1, 1, 0), Ask("B", 2, 4, 1, 0), ["1+2 1+4", "0+2 0+4"]),
    "a new revision and fewer of it": (
        Ask("A", 4, 4, 0, 1), Ask("B", 2, 1, 0, 1),
        ["1+0 1+0", "1+1 1+0", "0+1 0+0", "0+2 0+1"],
    ),
    "none are wanted": (Ask("A", 2, 3), Ask("A", 0, 0), ["0 0"]),
    "a revision that never got ready is replaced": (
        Ask("X", 2, 2, 0, 1, is_broken=True), Ask("B", 2, 2, 0, 1),
        ["1+0 1+0", "1+1 1+1", "0+1 0+1", "0+2 0+2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "lines"), STORIES.values(), ids=list(STORIES))
def test_a_rollout_goes_like_this(before: Ask, after: Ask, lines: list[str]) -> None:
    cluster = running(before)
    cluster.want(after)
    assert told(cluster) == lines
    assert cluster.is_done()


@pytest.mark.parametrize(("before", "after"), [story[:2] for story in STORIES.values()], ids=list(STORIES))
def test_a_preview_ends_where_the_rollout_ends(before: Ask, after: Ask) -> None:
    cluster = running(before)
    cluster.want(after)
    replicas = {name: one.replicas for name, one in cluster.all.items()}
    for step in preview_steps(cluster.fleet()):
        for change in step.changes:
            assert replicas[change.workload] == change.before
            replicas[change.workload] = change.after
    told(cluster)
    assert replicas == {name: one.replicas for name, one in cluster.all.items()}


HALF_WAY: Final = ["2+1 4+1", "1+1 3+1", "1+2 3+2"]


def half_way() -> FakeDeployments:
    """2P4D with one spare, after its third decision."""
    cluster = running(Ask("A", 2, 4, 1, 0))
    cluster.want(Ask("B", 2, 4, 1, 0))
    assert told(cluster, 5) == HALF_WAY
    return cluster


def test_a_pause_in_the_middle_holds_everything_and_its_end_goes_on() -> None:
    cluster = half_way()
    assert told(cluster, is_paused=True) == []
    assert told(cluster)[-1] == "0+2 0+4"
    assert cluster.is_done()


def test_a_missed_deadline_in_the_middle_holds_everything_and_the_old_revision_goes_on_serving() -> None:
    cluster = half_way()
    assert told(cluster, is_late=True) == []
    assert seen(cluster) == HALF_WAY[-1]
    assert cluster.fleet().serves("A")


def test_a_rollback_in_the_middle_is_a_rollout_to_the_old_revision() -> None:
    cluster = half_way()
    cluster.want(Ask("A", 2, 4, 1, 0))
    assert told(cluster) == ["1+1 1+3", "1+2 1+4", "0+2 0+4"]
    assert cluster.is_done()


def test_a_rollback_after_a_missed_deadline_moves_although_new_pods_never_get_ready() -> None:
    cluster = running(Ask("A", 2, 2, 1, 0))
    cluster.want(Ask("X", 2, 2, 1, 0, is_broken=True))
    assert told(cluster) == ["2+1 2+1"]
    cluster.want(Ask("A", 2, 2, 1, 0))
    assert told(cluster) == ["0+2 0+2"]
    assert cluster.is_done()


def test_a_third_revision_in_the_middle_takes_the_place_of_the_one_that_never_got_ready() -> None:
    cluster = running(Ask("A", 2, 2, 1, 0))
    cluster.want(Ask("X", 2, 2, 1, 0, is_broken=True))
    told(cluster)
    cluster.want(Ask("C", 2, 2, 1, 0))
    assert told(cluster) == ["2+0+0 2+0+0", "2+0+1 2+0+1", "1+0+1 1+0+1", "1+0+2 1+0+2", "0+0+2 0+0+2"]
    assert cluster.is_done()


def test_an_unverified_target_takes_nothing_from_the_old_revision() -> None:
    cluster = running(Ask("A", 2, 2, 1, 0))
    cluster.want(Ask("B", 2, 2, 1, 0))
    for _ in range(MAX_TICKS):
        if step := next_step(cluster.fleet()):
            cluster.apply(step)
        cluster.tick()
    assert seen(cluster) == "2+1 2+1"
    assert cluster.workload("decode-B-t").ready == 1


def test_scaling_goes_on_while_paused_or_late_because_it_is_no_rollout() -> None:
    cluster = running(Ask("A", 1, 1))
    cluster.want(Ask("A", 2, 3))
    assert told(cluster, is_paused=True, is_late=True) == ["2 3"]


def test_nothing_is_wanted_stops_a_paused_rollout_too() -> None:
    cluster = half_way()
    cluster.want(Ask("B", 0, 0, 1, 0))
    assert told(cluster, is_paused=True) == ["0+0 0+0"]


def test_an_operator_killed_between_the_two_halves_of_leaving_leaves_an_orphan_that_the_next_one_removes() -> None:
    cluster = running(Ask("A", 1, 1, 0, 1))
    cluster.want(Ask("B", 1, 1, 0, 1))
    step = next_step(cluster.fleet())
    assert step == Step((Change(Role.PREFILL, "prefill-A-t", 1, 0), Change(Role.DECODE, "decode-A-t", 1, 0)))
    cluster.apply(step, 1)
    assert told(cluster) == ["0+0 0+0", "0+1 0+1"]


def test_within_a_step_the_role_that_shrinks_comes_before_the_one_that_grows() -> None:
    cluster = running(Ask("A", 1, 2))
    cluster.want(Ask("A", 2, 1))
    shrinks, grows = Change(Role.DECODE, "decode-A-t", 2, 1), Change(Role.PREFILL, "prefill-A-t", 1, 2)
    assert next_step(cluster.fleet()) == Step((shrinks, grows))


def test_within_a_step_old_engines_go_before_new_ones_come_so_that_places_get_free_early() -> None:
    old, new = Workload("A", "A", 2, 2, 2), Workload("B", "B", 1, 1, 1)
    role = RoleFleet(new, 2, 2, 0, (old,))
    goes, comes = ([Change(role, *rest) for role in ROLES] for rest in (("A", 2, 1), ("B", 1, 2)))
    assert next_step(Fleet(role, role, is_verified=True)) == Step((*goes, *comes))


def test_a_blip_of_the_last_decode_engine_takes_no_prefill_engine_that_the_spec_asks_for() -> None:
    """Found by the laws: prefill of the spec's revision was taken for useless while decode restarted."""
    old = (Workload("p-t", "A", 2, 2, 2), Workload("p-x", "X", 2, 2, 0))
    prefill = RoleFleet(Workload("p-u", "A"), 3, 0, 1, old)
    decode = RoleFleet(Workload("d-t", "A", 1, 1, 0), 1, 0, 1, (Workload("d-x", "X", 1, 1, 0),))
    assert next_step(Fleet(prefill, decode)) == Step((Change(Role.PREFILL, "p-x", 2, 1),))


def test_the_target_waits_for_the_places_of_terminating_pods() -> None:
    cluster = running(Ask("A", 1, 1, 0, 1))
    cluster.want(Ask("B", 1, 1, 0, 1))
    step = next_step(cluster.fleet())
    assert step is not None
    cluster.apply(step)
    cluster.tick()
    assert cluster.workload("decode-A-t").terminating == 1
    assert next_step(cluster.fleet()) is None


def test_what_the_cluster_has_not_yet_removed_holds_its_place() -> None:
    fleet = running(Ask("A", 2, 2)).fleet()
    behind = Workload("prefill-B-t", "B", replicas=0, live=1)
    assert replace(fleet.prefill, old=(behind,)).room == -1
    assert fleet.prefill.target.asked(1).occupied == 2


@pytest.mark.parametrize(
    ("surge", "unavailable", "wanted", "resolved"),
    [
        pytest.param(1, 0, 4, (1, 0), id="numbers are numbers"),
        pytest.param("1", "2", 4, (1, 2), id="also in quotes"),
        pytest.param("25%", "25%", 4, (1, 1), id="percents of the wanted"),
        pytest.param("25%", "25%", 5, (2, 1), id="surge rounds up, unavailable down"),
        pytest.param("25%", "25%", 2, (1, 0), id="surge rounds up, unavailable down to 0"),
        pytest.param(0, "25%", 2, (0, 1), id="both rounded to 0: one may be unavailable"),
        pytest.param("1%", "100%", 300, (3, 300), id="all may be unavailable"),
        pytest.param("200%", 0, 3, (6, 0), id="more than all may be added"),
        pytest.param("25%", "25%", 0, (0, 1), id="none are wanted"),
    ],
)
def test_limits_are_taken_as_deployments_take_them(
    surge: int | str, unavailable: int | str, wanted: int, resolved: tuple[int, int]
) -> None:
    assert resolve_limits(surge, unavailable, wanted) == resolved


@pytest.mark.parametrize(("surge", "unavailable"), [(0, 0), ("0%", 0), (0, "0%"), ("0", "0%")])
def test_limits_that_let_nothing_move_are_refused(surge: int | str, unavailable: int | str) -> None:
    with pytest.raises(ValueError, match="one of them must be above 0"):
        resolve_limits(surge, unavailable, 4)
    with pytest.raises(ValueError, match="no instance could ever be replaced"):
        RoleFleet(Workload("w", "A"), 1, 0, 0)


@pytest.mark.parametrize("limit", [-1, "-1", "1.5", "x%", "%", "", "٣"])
def test_limits_that_are_no_amount_are_refused(limit: int | str) -> None:
    with pytest.raises(ValueError, match="neither a number"):
        resolve_limits(limit, 1, 4)


def test_numbers_that_cannot_be_are_refused() -> None:
    one, none = RoleFleet(Workload("w", "A"), 1, 1, 0), RoleFleet(Workload("w", "A"), 0, 1, 0)
    with pytest.raises(ValueError, match="ask for 0 of both"):
        Fleet(one, none)
    with pytest.raises(ValueError, match="one revision"):
        Fleet(one, RoleFleet(Workload("w", "B"), 1, 1, 0))
    with pytest.raises(ValueError, match="below 0"):
        RoleFleet(Workload("w", "A"), -1, 1, 0)
    with pytest.raises(ValueError, match="no more are ready than live"):
        Workload("w", "A", 1, 0, 1)

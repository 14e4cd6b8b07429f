"""What ``pdcluster plan`` will say, told as stories."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.operator_cluster import FakeCluster, make_cluster
from operator_cases.objects import D, P, both
from pdcluster_operator.core.plan.preview import preview
from pdcluster_protocol.errors import ConfigError

SMALL: dict[str, Any] = {}
REVISION, PREFILL, DECODE = FakeCluster().plan_for(make_cluster(SMALL)).facts.target.split("-")
"""Revision and both templates of the smallest pool."""
NO_SURGE = {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}


def lines(before: dict[str, Any] | None, after: dict[str, Any]) -> tuple[str, ...]:
    return preview(None if before is None else make_cluster(before), make_cluster(after))


def section(title: str, found: tuple[str, ...]) -> list[str]:
    start = found.index(f"{title}:") + 1
    ends = [number for number, line in enumerate(found) if number >= start and not line.startswith(" ")]
    return [line.strip() for line in found[start : ends[0] if ends else None]]


def test_a_new_pool_gets_everything_at_once() -> None:
    found = lines(None, {f"{D}.replicas": 2})
    assert found[0] == f"target {REVISION}-{PREFILL}-{DECODE}: nothing runs yet"
    assert section("children", found) == [
        "Secret pool-secret",
        "ServiceAccount pool-engine",
        "ServiceAccount pool-router",
        "Role pool-router",
        "RoleBinding pool-router",
        "NetworkPolicy pool-prefill",
        "NetworkPolicy pool-decode",
        "NetworkPolicy pool-router",
        "PodDisruptionBudget pool-prefill",
        "PodDisruptionBudget pool-decode",
        "PodDisruptionBudget pool-router",
        f"Service pool-decode-{REVISION}",
        f"Service pool-prefill-{REVISION}",
        "Service pool-router",
        "Service pool-router-internal",
        "Deployment pool-router",
        f"Deployment pool-prefill-{REVISION}-{PREFILL}",
        f"Deployment pool-decode-{REVISION}-{DECODE}",
    ]
    assert section("steps", found) == [
        f"1. pool-prefill-{REVISION}-{PREFILL} 0 -> 1, pool-decode-{REVISION}-{DECODE} 0 -> 2"
    ]
    assert found[-1] == "removed in the end: none"


def test_of_one_that_is_being_deleted_nothing_is_planned() -> None:
    going = {"metadata.deletionTimestamp": "2026-11-21T00:00:00Z"}
    assert lines(SMALL, going) == ("nothing is planned: it is being deleted",)


def test_the_same_again_does_nothing() -> None:
    found = lines(SMALL, SMALL)
    assert found[0].endswith("no engine is replaced")
    assert found[-2:] == ("steps: none", "removed in the end: none")


def test_more_replicas_replace_nobody() -> None:
    found = lines(SMALL, {f"{D}.replicas": 3})
    assert found[0].endswith("no engine is replaced")
    assert section("steps", found) == [f"1. pool-decode-{REVISION}-{DECODE} 1 -> 3"]


def test_another_image_replaces_both_roles_new_ones_first_where_there_is_a_surge() -> None:
    found = lines(SMALL, {"spec.image": "engine:2"})
    assert found[0].endswith("another revision, so both roles are replaced")
    new, old = section("steps", found)
    assert new.count("0 -> 1") == 2
    assert old == f"2. pool-prefill-{REVISION}-{PREFILL} 1 -> 0, pool-decode-{REVISION}-{DECODE} 1 -> 0"


def test_without_surge_the_old_ones_go_first() -> None:
    old, new = section("steps", lines(SMALL, {"spec.image": "engine:2", **NO_SURGE}))
    assert old.count("1 -> 0") == 2
    assert new.count("0 -> 1") == 2


def test_an_argument_of_one_role_leaves_the_other_alone() -> None:
    found = lines(SMALL, {f"{D}.engineArgs": {"max-num-seqs": "8"}})
    assert found[0].endswith("the same revision, and only decode is replaced")
    assert not [step for step in section("steps", found) if "prefill" in step]
    assert section("removed in the end", found) == [f"Deployment pool-decode-{REVISION}-{DECODE}"]


def test_routers_are_replaced_by_what_changes_their_pods_alone() -> None:
    says = "routers are replaced, one at a time"
    assert says in lines(SMALL, {"spec.router": {"requestTimeoutSeconds": 60}})
    for before, after in ((SMALL, SMALL), (None, SMALL), (SMALL, {f"{D}.replicas": 3})):
        assert says not in lines(before, after)


def test_while_it_is_paused_the_steps_wait() -> None:
    found = lines(SMALL, {"spec.image": "engine:2", "spec.rollout.paused": True})
    assert len(section("steps, when rollout.paused is false again", found)) == 2


@pytest.mark.parametrize("before", [None, SMALL])
def test_a_pause_holds_neither_a_first_start_nor_more_replicas(before: dict[str, Any] | None) -> None:
    found = lines(before, {f"{D}.replicas": 2, "spec.rollout.paused": True})
    assert len(section("steps", found)) == 1


def test_a_pause_holds_no_stop_either_whatever_else_changes() -> None:
    stop = {f"{P}.replicas": 0, f"{D}.replicas": 0, "spec.image": "engine:2", "spec.rollout.paused": True}
    assert section("steps", lines(SMALL, stop))


def test_what_an_old_revision_had_is_removed_in_the_end() -> None:
    assert section("removed in the end", lines(SMALL, {"spec.image": "engine:2"})) == [
        f"Deployment pool-prefill-{REVISION}-{PREFILL}",
        f"Service pool-prefill-{REVISION}",
        f"Deployment pool-decode-{REVISION}-{DECODE}",
        f"Service pool-decode-{REVISION}",
    ]


def test_a_pool_that_stops_ends_at_nothing() -> None:
    assert section("steps", lines(SMALL, both("replicas", 0))) == [
        f"1. pool-prefill-{REVISION}-{PREFILL} 1 -> 0, pool-decode-{REVISION}-{DECODE} 1 -> 0"
    ]


def test_a_pool_that_is_stopped_makes_no_engines() -> None:
    for before in (None, SMALL):
        children = section("children", lines(before, {**both("replicas", 0), "spec.image": "engine:2"}))
        assert [line for line in children if line.startswith("Deployment")] == ["Deployment pool-router"]


def test_what_was_applied_before_and_cannot_be_carried_out_is_not_blamed_on_the_file() -> None:
    for part in (P, "spec.router"):
        broken = {f"{part}.podOverrides": {"spec": {"containers": [{"image": "x"}]}}}
        with pytest.raises(ConfigError, match=r"the earlier spec .* without name.*: plan without --before"):
            lines(broken, SMALL)


def test_it_goes_over_nodes_without_asking_for_groups() -> None:
    nodes = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), **both("nodesPerInstance", 2)}
    assert [line for line in section("children", lines(None, nodes)) if line.startswith("LeaderWorkerSet")]


def test_what_cannot_be_carried_out_is_said_instead() -> None:
    with pytest.raises(ConfigError, match="an item without name"):
        lines(None, {f"{P}.podOverrides": {"spec": {"containers": [{"image": "x"}]}}})


def test_a_file_needs_no_namespace() -> None:
    cluster = make_cluster()
    bare = cluster.model_copy(update={"metadata": {"name": "pool"}})
    assert preview(None, bare) == preview(None, cluster)


def test_that_leaderworkersets_are_taken_for_installed_is_said_where_it_matters() -> None:
    nodes = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), f"{P}.nodesPerInstance": 2}
    assert "is taken for installed: without it the spec is refused" in lines(None, nodes)[-1]
    assert "taken for installed" not in "".join(lines(None, SMALL))

"""What ``pdcluster plan`` will say, told as stories."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.operator_cluster import make_cluster
from operator_cases.objects import D, P, both
from pdcluster_operator.core.preview import preview
from pdcluster_protocol.errors import ConfigError

SMALL: dict[str, Any] = {}
NO_SURGE = {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}


def lines(before: dict[str, Any] | None, after: dict[str, Any]) -> tuple[str, ...]:
    return preview(None if before is None else make_cluster(before), make_cluster(after))


def section(title: str, found: tuple[str, ...]) -> list[str]:
    start = found.index(f"{title}:") + 1
    ends = [number for number, line in enumerate(found) if number >= start and not line.startswith(" ")]
    return [line.strip() for line in found[start : ends[0] if ends else None]]


def test_a_new_pool_gets_everything_at_once() -> None:
    found = lines(None, {f"{D}.replicas": 2})
    assert found[0] == "target f6c6615b-3c2f00b3-b230850b: nothing runs yet"
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
        "Service pool-decode-f6c6615b",
        "Service pool-prefill-f6c6615b",
        "Service pool-router",
        "Deployment pool-router",
        "Deployment pool-prefill-f6c6615b-3c2f00b3",
        "Deployment pool-decode-f6c6615b-b230850b",
    ]
    assert section("steps", found) == ["1. pool-prefill-f6c6615b-3c2f00b3 0 -> 1, pool-decode-f6c6615b-b230850b 0 -> 2"]
    assert found[-1] == "removed in the end: none"


def test_the_same_again_does_nothing() -> None:
    found = lines(SMALL, SMALL)
    assert found[0].endswith("no engine is replaced")
    assert found[-2:] == ("steps: none", "removed in the end: none")


def test_more_replicas_replace_nobody() -> None:
    found = lines(SMALL, {f"{D}.replicas": 3})
    assert found[0].endswith("no engine is replaced")
    assert section("steps", found) == ["1. pool-decode-f6c6615b-b230850b 1 -> 3"]


def test_another_image_replaces_both_roles_new_ones_first_where_there_is_a_surge() -> None:
    found = lines(SMALL, {"spec.image": "engine:2"})
    assert found[0].endswith("another revision, so both roles are replaced")
    new, old = section("steps", found)
    assert new.count("0 -> 1") == 2
    assert old == "2. pool-prefill-f6c6615b-3c2f00b3 1 -> 0, pool-decode-f6c6615b-b230850b 1 -> 0"


def test_without_surge_the_old_ones_go_first() -> None:
    old, new = section("steps", lines(SMALL, {"spec.image": "engine:2", **NO_SURGE}))
    assert old.count("1 -> 0") == 2
    assert new.count("0 -> 1") == 2


def test_an_argument_of_one_role_leaves_the_other_alone() -> None:
    found = lines(SMALL, {f"{D}.engineArgs": {"max-num-seqs": "8"}})
    assert found[0].endswith("the same revision, and only decode is replaced")
    assert not [step for step in section("steps", found) if "prefill" in step]
    assert section("removed in the end", found) == ["Deployment pool-decode-f6c6615b-b230850b"]


def test_what_an_old_revision_had_is_removed_in_the_end() -> None:
    assert section("removed in the end", lines(SMALL, {"spec.image": "engine:2"})) == [
        "Deployment pool-prefill-f6c6615b-3c2f00b3",
        "Service pool-prefill-f6c6615b",
        "Deployment pool-decode-f6c6615b-b230850b",
        "Service pool-decode-f6c6615b",
    ]


def test_a_pool_that_stops_ends_at_nothing() -> None:
    assert section("steps", lines(SMALL, both("replicas", 0))) == [
        "1. pool-prefill-f6c6615b-3c2f00b3 1 -> 0, pool-decode-f6c6615b-b230850b 1 -> 0"
    ]


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

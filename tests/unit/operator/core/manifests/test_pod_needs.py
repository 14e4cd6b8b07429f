"""What a pod needs beside its program: memory that it may lock, room that is kept for it, ports that never meet."""

from __future__ import annotations

from typing import Any, Final

import pytest

from fakes.operator_cluster import make_pool
from operator_cases.objects import both
from pdcluster_operator.core.manifests.command import PodPlace, mooncake_ports
from pdcluster_operator.core.manifests.engine_pod import engine_template
from pdcluster_operator.core.manifests.router import router_deployment
from pdcluster_protocol.labels import Role

CUDA: Final = both("device", {"kind": "cuda"})
RDMA: Final = {**CUDA, "spec.transfer.protocol": "rdma"}
NODES: Final = {**RDMA, **both("parallelism.tensor", 16), **both("nodesPerInstance", 2)}


def pod(changes: dict[str, Any], role: Role = Role.DECODE, place: PodPlace = PodPlace.ALONE) -> dict[str, Any]:
    found: dict[str, Any] = engine_template(make_pool(changes), role, "0a1b2c3d", place)["spec"]
    return found


def router(changes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = router_deployment(make_pool(changes))["spec"]["template"]["spec"]
    return found


def env(spec: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}


@pytest.mark.parametrize("role", Role)
def test_an_engine_with_rdma_may_lock_memory_and_nothing_else(role: Role) -> None:
    """Capabilities of a user that is not root are never in effect: Kubernetes sets no ambient ones."""
    for spec in (pod(RDMA, role), pod(NODES, role, PodPlace.LEADER), pod(NODES, role, PodPlace.WORKER)):
        assert spec["securityContext"]["runAsUser"] == 0
        assert spec["securityContext"]["runAsNonRoot"] is False
        container = spec["containers"][0]["securityContext"]
        assert container["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["allowPrivilegeEscalation"] is False
        assert container["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("changes", [{}, CUDA, both("device", {"kind": "ascend"})], ids=["cpu", "cuda", "ascend"])
def test_every_other_engine_and_every_router_is_a_user_without_capabilities(changes: dict[str, Any]) -> None:
    for spec in (pod(changes), router(changes), router(RDMA)):
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {"cpu": "250m", "memory": "1Gi"}),
        (both("parallelism.tensor", 2), {"cpu": "500m", "memory": "2Gi"}),
        ({**CUDA, **both("parallelism.tensor", 4)}, {"cpu": "8", "memory": "32Gi"}),
        (NODES, {"cpu": "16", "memory": "64Gi"}),
    ],
    ids=["cpu", "cpu of 2 ranks", "four GPUs", "8 GPUs on each node"],
)
def test_no_engine_is_best_effort(changes: dict[str, Any], kept: dict[str, str]) -> None:
    """Devices do not count: without requests a pod with eight GPUs is the first to be evicted."""
    place = PodPlace.WORKER if changes is NODES else PodPlace.ALONE
    assert pod(changes, place=place)["containers"][0]["resources"]["requests"] == kept


def test_no_router_is_best_effort() -> None:
    assert router({})["containers"][0]["resources"] == {"requests": {"cpu": "100m", "memory": "128Mi"}}


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ({"requests": {"cpu": 3}}, {"requests": {"cpu": "3", "memory": "1Gi"}}),
        ({"requests": {"cpu": "3", "memory": "5Gi"}}, {"requests": {"cpu": "3", "memory": "5Gi"}}),
        # A limit alone is a request too.
        ({"limits": {"memory": "512Mi"}}, {"requests": {"cpu": "250m"}, "limits": {"memory": "512Mi"}}),
        ({"limits": {"cpu": "1", "memory": "2Gi"}}, {"limits": {"cpu": "1", "memory": "2Gi"}}),
    ],
)
def test_what_the_user_gives_is_what_counts(given: dict[str, Any], rendered: dict[str, Any]) -> None:
    assert pod(both("resources", given))["containers"][0]["resources"] == rendered


def test_side_channels_lie_outside_of_mooncakes_ports_by_default() -> None:
    spec = pod(both("parallelism.tensor", 256))
    ports = [one["containerPort"] for one in spec["containers"][0]["ports"] if one["name"] != "http"]
    assert ports[0] == 12100
    assert 12100 + 256 <= 15000
    assert "MC_MIN_RPC_PORT" not in env(spec)


@pytest.mark.parametrize(
    ("port", "ranks", "range_"),
    [
        (12100, 256, None),
        (30000, 16, None),
        (20100, 8, (20108, 29999)),
        (14999, 2, (15001, 29999)),
        (29998, 8, (15000, 29997)),
        (14000, 16000, (30000, 32767)),
    ],
)
def test_mooncake_draws_beside_the_side_channels_wherever_they_are(
    port: int, ranks: int, range_: tuple[int, int] | None
) -> None:
    assert mooncake_ports(port, ranks) == range_
    if range_:
        assert not range(max(port, range_[0]), min(port + ranks, range_[1] + 1))


def test_the_range_reaches_decode_alone_and_the_users_own_wins() -> None:
    inside = {"spec.transfer.port": 20100}
    assert {name: env(pod(inside))[name] for name in ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")} == {
        "MC_MIN_RPC_PORT": "20101",
        "MC_MAX_RPC_PORT": "29999",
    }
    assert "MC_MIN_RPC_PORT" not in env(pod(inside, Role.PREFILL))
    own = {**inside, "spec.roles.decode.env": [{"name": "MC_MIN_RPC_PORT", "value": "25000"}]}
    assert env(pod(own))["MC_MIN_RPC_PORT"] == "25000"

"""What runs one (role, revision, template), and which change of a spec makes which workload another one."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.operator_cluster import make_pool
from operator_cases.objects import D, P, both
from pdcluster_operator.core.manifests.workloads import (
    WorkloadDesign,
    design_workload,
    render_workload,
    revision_for,
)
from pdcluster_operator.kinds import LEADER_WORKER_SET
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

NODES = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), **both("nodesPerInstance", 2)}


def design(changes: dict[str, Any] | None, role: Role = Role.PREFILL) -> WorkloadDesign:
    ours = make_pool(changes)
    return design_workload(ours, role, revision_for(ours))


def rendered(changes: dict[str, Any] | None, role: Role = Role.PREFILL, replicas: int = 3) -> dict[str, Any]:
    return render_workload(make_pool(changes), design(changes, role), replicas)


def hashes(changes: dict[str, Any] | None) -> tuple[str, str, str]:
    """Revision, and both templates."""
    prefill, decode = design(changes, Role.PREFILL), design(changes, Role.DECODE)
    return prefill.revision, prefill.template, decode.template


def test_a_deployment_has_the_replicas_it_is_told_and_belongs_to_its_pdcluster() -> None:
    found = rendered(None)
    owner = found["metadata"]["ownerReferences"][0]
    assert (found["apiVersion"], found["kind"], found["spec"]["replicas"]) == ("apps/v1", "Deployment", 3)
    assert found["metadata"]["namespace"] == "default"
    assert (owner["kind"], owner["name"], owner["uid"]) == ("PDCluster", "pool", "uid-of-pool")
    assert owner["controller"] is owner["blockOwnerDeletion"] is True


def test_its_name_and_labels_tell_role_revision_and_template() -> None:
    found, its = rendered(None), design(None)
    assert found["metadata"]["name"] == f"pool-prefill-{its.revision}-{its.template}"
    assert (
        found["metadata"]["labels"].items()
        >= {
            "app.kubernetes.io/managed-by": "pdcluster-operator",
            "pdcluster.dev/cluster": "pool",
            "pdcluster.dev/role": "prefill",
            "pdcluster.dev/revision": its.revision,
            "pdcluster.dev/template": its.template,
        }.items()
    )


@pytest.mark.parametrize("role", Role)
def test_it_selects_its_own_pods_and_no_others(role: Role) -> None:
    spec = rendered(None, role)["spec"]
    selector = spec["selector"]["matchLabels"]
    assert selector.items() <= spec["template"]["metadata"]["labels"].items()
    assert set(selector) == {f"pdcluster.dev/{name}" for name in ("cluster", "role", "revision", "template")}


def test_kubernetes_would_roll_it_only_within_the_devices_there_are() -> None:
    assert rendered(None)["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


class TestOverNodes:
    def test_an_instance_on_several_nodes_is_a_group(self) -> None:
        found = rendered(NODES)
        group = found["spec"]["leaderWorkerTemplate"]
        assert (found["apiVersion"], found["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
        assert (found["spec"]["replicas"], group["size"]) == (3, 2)
        assert group["restartPolicy"] == "RecreateGroupOnPodRestart"

    def test_leader_and_workers_have_the_labels_by_which_pods_are_counted(self) -> None:
        group = rendered(NODES)["spec"]["leaderWorkerTemplate"]
        its = design(NODES)
        for part in ("leaderTemplate", "workerTemplate"):
            assert group[part]["metadata"]["labels"]["pdcluster.dev/template"] == its.template

    def test_copies_of_the_model_over_nodes_are_refused_with_the_cure(self) -> None:
        with pytest.raises(
            ConfigError, match=r"prefill has nodesPerInstance 2 and parallelism\.data 2.*raise replicas"
        ):
            design({**NODES, **both("parallelism.data", 2)})

    def test_how_many_nodes_there_are_is_part_of_the_template(self) -> None:
        more = {**NODES, **both("nodesPerInstance", 4)}
        assert hashes(NODES)[0] == hashes(more)[0]
        assert hashes(NODES)[1] != hashes(more)[1]
        assert design(NODES).kind == LEADER_WORKER_SET


BASE = {**both("engineArgs", {"block-size": "32"}), **both("device", {"kind": "ascend"})}
NOTHING, BOTH, PREFILL, DECODE = "nothing", "both roles", "prefill", "decode"


@pytest.mark.parametrize(
    ("changes", "restarted"),
    [
        ({f"{P}.replicas": 5}, NOTHING),
        ({"spec.router.replicas": 5, "spec.router.podOverrides": {"spec": {"priorityClassName": "x"}}}, NOTHING),
        ({"spec.rollout.progressDeadlineSeconds": 60, "spec.rollout.paused": True}, NOTHING),
        ({"spec.scaling.mode": "External"}, NOTHING),
        ({"spec.transfer.protocol": "ascend"}, NOTHING),
        ({"metadata.generation": 9, "metadata.labels": {"a": "b"}}, NOTHING),
        ({"spec.image": "engine:2"}, BOTH),
        ({"spec.model.revision": "v2"}, BOTH),
        ({"spec.transfer.protocol": "tcp"}, BOTH),
        ({"spec.transfer.port": 20200}, BOTH),
        (both("engineArgs", {"block-size": "64"}), BOTH),
        ({f"{D}.engineArgs": {"block-size": "32", "max-num-seqs": "8"}}, DECODE),
        ({f"{P}.parallelism.tensor": 2}, PREFILL),
        ({f"{P}.resources.limits": {"memory": "64Gi"}}, PREFILL),
        ({f"{D}.env": [{"name": "A", "value": "1"}]}, DECODE),
        ({f"{D}.podOverrides": {"spec": {"tolerations": [{"operator": "Exists"}]}}}, DECODE),
        ({f"{D}.podOverrides": {}}, NOTHING),
    ],
)
def test_a_change_restarts_whom_it_must_and_nobody_else(changes: dict[str, Any], restarted: str) -> None:
    before, after = hashes(BASE), hashes({**BASE, **changes})
    moved = [was != now for was, now in zip(before, after, strict=True)]
    assert (
        moved
        == {
            NOTHING: [False, False, False],
            BOTH: [True, True, True],
            PREFILL: [False, True, False],
            DECODE: [False, False, True],
        }[restarted]
    )


def test_a_change_of_the_drain_restarts_engines_but_is_no_other_revision() -> None:
    before, after = hashes(BASE), hashes({**BASE, "spec.drain.timeoutSeconds": 60})
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_the_order_of_a_users_file_moves_no_hash() -> None:
    args = {"block-size": "32", "max-num-seqs": "8", "dtype": "bfloat16"}
    turned = dict(reversed(args.items()))
    assert hashes(both("engineArgs", args)) == hashes(both("engineArgs", turned))


def test_an_upgrade_of_the_operator_restarts_no_engine() -> None:
    # If this fails, each pool's engines restart when the operator is upgraded: say so in CHANGELOG, then change it.
    assert hashes(None) == ("e81654c4", "c786d420", "5042129e")


def test_from_where_a_variable_comes_by_which_kv_is_kept_another_way_is_part_of_the_revision() -> None:
    def revision(key: str) -> str:
        source = {"configMapKeyRef": {"name": "settings", "key": key}}
        return hashes({f"{D}.env": [{"name": "VLLM_KV_CACHE_LAYOUT", "valueFrom": source}]})[0]

    assert len({revision("a"), revision("b"), hashes(None)[0]}) == 3

"""A user's part of a pod template over ours: what merges, what replaces, and what is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import pytest

from pdcluster_operator.core.manifests.strategic_merge import merge_template
from pdcluster_protocol.errors import ConfigError

OURS: Final[dict[str, Any]] = {
    "metadata": {"labels": {"ours": "1"}, "finalizers": ["a"]},
    "spec": {
        "terminationGracePeriodSeconds": 630,
        "securityContext": {"runAsUser": 10001, "runAsNonRoot": True},
        "tolerations": [{"key": "ours"}],
        "containers": [
            {
                "name": "engine",
                "image": "engine:1",
                "command": ["python3", "-m"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "ports": [{"containerPort": 8000, "name": "http"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {}}],
    },
}


def engine(merged: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = merged["spec"]["containers"][0]
    return found


def with_engine(**fields: object) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


@pytest.mark.parametrize("patch", [None, {}, {"spec": {}}, {"metadata": {}, "spec": {"containers": []}}])
def test_nothing_changes_nothing(patch: dict[str, Any] | None) -> None:
    assert merge_template(OURS, patch) == OURS


def test_ours_is_never_changed_itself() -> None:
    before = deepcopy(OURS)
    merge_template(OURS, with_engine(env=[{"name": "A", "value": "9"}], image=None))
    assert before == OURS


def test_maps_merge_key_by_key_and_null_takes_a_key_away() -> None:
    merged = merge_template(OURS, {"spec": {"securityContext": {"runAsUser": 0, "runAsNonRoot": None, "fsGroup": 7}}})
    assert merged["spec"]["securityContext"] == {"runAsUser": 0, "fsGroup": 7}
    assert merged["spec"]["terminationGracePeriodSeconds"] == 630


def test_a_container_of_the_same_name_is_merged_and_another_one_comes_after() -> None:
    patch = {"spec": {"containers": [{"name": "sidecar", "image": "s:1"}, {"name": "engine", "image": "engine:2"}]}}
    merged = merge_template(OURS, patch)
    assert [container["name"] for container in merged["spec"]["containers"]] == ["engine", "sidecar"]
    assert engine(merged)["image"] == "engine:2"
    assert engine(merged)["command"] == ["python3", "-m"]


def test_a_sidecar_in_front_is_an_init_container_of_its_own() -> None:
    merged = merge_template(OURS, {"spec": {"initContainers": [{"name": "fetch", "restartPolicy": "Always"}]}})
    assert merged["spec"]["initContainers"] == [{"name": "fetch", "restartPolicy": "Always"}]


def test_environment_merges_by_name_and_keeps_its_order() -> None:
    merged = merge_template(OURS, with_engine(env=[{"name": "C", "value": "3"}, {"name": "A", "value": "9"}]))
    assert engine(merged)["env"] == [
        {"name": "A", "value": "9"},
        {"name": "B", "value": "2"},
        {"name": "C", "value": "3"},
    ]


def test_mounts_merge_by_path_and_ports_by_number() -> None:
    mount, port = {"name": "ram", "mountPath": "/tmp"}, {"containerPort": 8000, "hostPort": 80}
    merged = engine(merge_template(OURS, with_engine(volumeMounts=[mount], ports=[port, {"containerPort": 9}])))
    assert merged["volumeMounts"] == [{"name": "ram", "mountPath": "/tmp"}]
    assert merged["ports"] == [{"containerPort": 8000, "name": "http", "hostPort": 80}, {"containerPort": 9}]


def test_a_volume_of_the_same_name_takes_the_place_of_ours_for_it_has_one_source() -> None:
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "weights"}}
    merged = merge_template(OURS, {"spec": {"volumes": [claim]}})
    assert merged["spec"]["volumes"] == [{"name": "tmp", "emptyDir": {}}, claim]


def test_tolerations_are_replaced_whole() -> None:
    merged = merge_template(OURS, {"spec": {"tolerations": [{"key": "npu"}]}})
    assert merged["spec"]["tolerations"] == [{"key": "npu"}]


def test_lists_within_maps_are_replaced_whole() -> None:
    base = {"spec": {"securityContext": {"supplementalGroups": [1000]}, "affinity": {"nodeAffinity": {"terms": [1]}}}}
    patch = {"spec": {"securityContext": {"supplementalGroups": [7]}, "affinity": {"nodeAffinity": {"terms": [2, 3]}}}}
    assert merge_template(base, patch) == patch


def test_a_command_is_replaced_whole() -> None:
    assert engine(merge_template(OURS, with_engine(command=["sh"])))["command"] == ["sh"]


def test_constraints_merge_by_topology_and_finalizers_are_united() -> None:
    base = {**OURS, "spec": {"topologySpreadConstraints": [{"topologyKey": "host", "maxSkew": 1}]}}
    patch = {
        "metadata": {"finalizers": ["b", "a"]},
        "spec": {"topologySpreadConstraints": [{"topologyKey": "zone"}, {"topologyKey": "host", "maxSkew": 2}]},
    }
    merged = merge_template(base, patch)
    assert merged["metadata"]["finalizers"] == ["a", "b"]
    assert merged["spec"]["topologySpreadConstraints"] == [
        {"topologyKey": "host", "maxSkew": 2},
        {"topologyKey": "zone"},
    ]


def test_items_and_maps_can_be_deleted_or_replaced_by_directive() -> None:
    patch = {
        "spec": {
            "securityContext": {"$patch": "replace", "runAsUser": 5, "fsGroup": None},
            "containers": [{"name": "engine", "env": [{"name": "A", "$patch": "delete"}], "ports": None}],
            "volumes": [{"name": "tmp", "$patch": "delete"}],
        }
    }
    merged = merge_template(OURS, patch)
    assert merged["spec"]["securityContext"] == {"runAsUser": 5}
    assert engine(merged)["env"] == [{"name": "B", "value": "2"}]
    assert "ports" not in engine(merged)
    assert [volume["name"] for volume in merged["spec"]["volumes"]] == ["cache"]


def test_a_whole_container_can_be_replaced() -> None:
    merged = merge_template(OURS, with_engine(**{"$patch": "replace", "image": "own:1"}))
    assert merged["spec"]["containers"] == [{"name": "engine", "image": "own:1"}]


def test_deleting_a_map_takes_it_away() -> None:
    assert "securityContext" not in merge_template(OURS, {"spec": {"securityContext": {"$patch": "delete"}}})["spec"]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, "podOverrides.spec.containers has an item without name"),
        (with_engine(volumeMounts=[{"name": "x"}]), "spec.containers.volumeMounts has an item without mountPath"),
        ({"spec": {"volumes": ["cache"]}}, "podOverrides.spec.volumes has an item without name"),
        ({"spec": {"$patch": "remove"}}, "podOverrides.spec says $patch: remove"),
        ({"metadata": "x"}, 'podOverrides.metadata is "x": give a map'),
        ({"metadata": {"labels": ["x"]}}, 'podOverrides.metadata.labels is ["x"]: give a map'),
        ({"spec": {"tolerations": "all"}}, 'podOverrides.spec.tolerations is "all": give a list'),
        ({"spec": {"containers": {"name": "engine"}}}, 'spec.containers is {"name": "engine"}: give a list'),
        (with_engine(env={"A": "1"}), 'podOverrides.spec.containers.env is {"A": "1"}: give a list'),
    ],
)
def test_what_cannot_be_merged_is_refused_with_its_place(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        merge_template(OURS, patch)
    assert message in str(refused.value)

"""Every child of a built-in kind is what Kubernetes' own schemas take, without one unknown field.

``kubernetes-validate`` knows no custom kinds: LeaderWorkerSets and PDRoleScalers are for a real API server.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from fakes.operator_cluster import FakeCluster, make_cluster
from operator_cases.accepted import ACCEPTED
from operator_cases.objects import Accepted, both
from pdcluster_operator.core.manifests.pool import Document
from pdcluster_operator.core.seen.observed import Observed

ROOT: Final = Path(__file__).resolve().parents[5]
OLDEST, NEWEST = "1.30", "1.35"
"""Of the clusters that the chart supports."""
OVER_NODES: Final = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), **both("nodesPerInstance", 2)}
CUSTOM: Final = {"LeaderWorkerSet", "PDRoleScaler"}


def children(changes: dict[str, Any]) -> list[Document]:
    plan = FakeCluster().plan_for(make_cluster(changes), Observed(has_leader_worker_sets=True))
    assert plan.facts.refusal == ""
    return [child.document for child in plan.children]


def check(document: Document, version: str) -> None:
    """
    Raises:
        ValidationError: The schemas of this Kubernetes version do not take it.
    """
    _check_once(json.dumps(document), version)


@cache
def _check_once(document: str, version: str) -> None:
    """Most children of two pools are the same, and each look takes 16 ms."""
    kubernetes_validate.validate(json.loads(document), version, strict=True)


def test_the_chart_asks_for_the_oldest_version_whose_api_server_takes_our_rules() -> None:
    """Kubernetes' own validation was asked: that of 1.29.0 knows no ``format`` in a new one, 1.30.0 takes all."""
    chart = yaml.safe_load((ROOT / "charts" / "pdcluster" / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    assert f"Kubernetes {OLDEST} or later" in (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_children_are_as_kubernetes_wants_them(case: Accepted, version: str) -> None:
    documents = [document for document in children(dict(case.changes)) if document["kind"] not in CUSTOM]
    assert len(documents) > 10
    for document in documents:
        check(document, version)


def test_the_pods_of_a_group_are_as_kubernetes_wants_them() -> None:
    groups = [document for document in children(OVER_NODES) if document["kind"] == "LeaderWorkerSet"]
    assert len(groups) == 2
    for group in groups:
        parts = group["spec"]["leaderWorkerTemplate"]
        for part in ("leaderTemplate", "workerTemplate"):
            check(
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": parts[part]}, NEWEST
            )


def test_the_judge_does_see_a_misspelled_field() -> None:
    deployment = next(document for document in children({}) if document["kind"] == "Deployment")
    wrong = {**deployment, "spec": {**deployment["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong, NEWEST)


def test_every_child_belongs_to_the_pdcluster_and_no_two_have_one_name() -> None:
    documents = children({"spec.scaling.mode": "External"})
    keys = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(keys) == len(set(keys))
    for document in documents:
        (owner,) = document["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid-of-pool", True)
        assert document["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "pdcluster-operator"


def test_no_child_holds_a_null() -> None:
    def nulls(value: object) -> bool:
        if isinstance(value, dict):
            return any(nulls(inner) for inner in value.values())
        return any(map(nulls, value)) if isinstance(value, list) else value is None

    changes = {**OVER_NODES, "spec.router.service.annotations": {"a": "b"}}
    assert [document["kind"] for document in children(changes) if nulls(document)] == []

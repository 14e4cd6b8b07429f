"""What a real API server makes of our CRDs, and of each object of ``tests/operator_cases``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pytest

from control_plane.accounts import make_account, make_namespace
from control_plane.crds import apply_crds, conditions_of, crds, wait_established
from control_plane.kube_http import MERGE_PATCH, Answer, KubeHttp, Object
from control_plane.plane import ControlPlane
from operator_cases.accepted import ACCEPTED, SCALER_ACCEPTED
from operator_cases.objects import Accepted, By, Refused, pdcluster, scaler
from operator_cases.refused import REFUSED, SCALER_REFUSED
from pdcluster_operator.api.base import ApiModel
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.api.scaler import PDRoleScaler

pytestmark = pytest.mark.control_plane

GROUP: Final = "/apis/pdcluster.dev/v1alpha1/namespaces"
AUTOSCALERS: Final = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
AUTOSCALER_S: Final = 90.0
REMARK: Final = (
    "<nil>: Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation"
)
"""The server's own, after some refusals by the schema."""


@dataclass(frozen=True, slots=True)
class Case:
    """An accepted or refused object of one kind."""

    row: Accepted | Refused
    plural: str
    make: Callable[[Mapping[str, object]], Object]
    model: type[ApiModel]

    @property
    def path(self) -> str:
        return f"{GROUP}/default/{self.plural}"


def cases(clusters: tuple[Accepted | Refused, ...], scalers: tuple[Accepted | Refused, ...]) -> list[object]:
    """Both kinds' rows as parameters, by their names."""
    found = [Case(row, "pdclusters", pdcluster, PDCluster) for row in clusters]
    found += [Case(row, "pdrolescalers", scaler, PDRoleScaler) for row in scalers]
    return [pytest.param(case, id=case.row.name) for case in found]


@pytest.fixture(scope="module")
def admin(control_plane: ControlPlane) -> KubeHttp:
    """Of an API server that serves our kinds."""
    apply_crds(control_plane.admin)
    wait_established(control_plane.admin)
    return control_plane.admin


@pytest.fixture
def scalers(admin: KubeHttp) -> Iterator[str]:
    """The path of one scaler that exists."""
    with stored(admin, f"{GROUP}/default/pdrolescalers", scaler({})) as one:
        yield f"{GROUP}/default/pdrolescalers/{one['metadata']['name']}"


def with_spec(one: Object, **changes: object) -> Object:
    return {**one, "spec": {**one["spec"], **changes}}


def autoscaler_of(scaler: Object, least: int, most: int) -> Object:
    """By a metric that nobody serves here."""
    target = {"apiVersion": scaler["apiVersion"], "kind": scaler["kind"], "name": scaler["metadata"]["name"]}
    metric = {"metric": {"name": "queue_length"}, "target": {"type": "AverageValue", "averageValue": "1"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "role"},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [{"type": "External", "external": metric}],
        },
    }


def able_to_scale(autoscaler: Object) -> str:
    """Its condition; empty as long as it said nothing."""
    told = {one["type"]: one["status"] for one in autoscaler.get("status", {}).get("conditions", [])}
    return str(told.get("AbleToScale", ""))


@contextmanager
def stored(admin: KubeHttp, path: str, one: Object) -> Iterator[Object]:
    made = admin.create(path, one)
    try:
        yield made
    finally:
        admin.delete(f"{path}/{made['metadata']['name']}")


def answer_to(admin: KubeHttp, case: Case) -> Answer:
    """What the server says to the new object or the update; it stores nothing (dry run)."""
    one = case.make(case.row.changes)
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    if case.row.before is None:
        return admin.ask("POST", case.path, one, **query)
    with stored(admin, case.path, case.make(case.row.before)) as before:
        one["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        return admin.ask("PUT", f"{case.path}/{before['metadata']['name']}", one, **query)


@pytest.mark.parametrize("case", cases(ACCEPTED, SCALER_ACCEPTED))
def test_the_server_takes_it_and_fills_in_the_defaults_of_the_models(admin: KubeHttp, case: Case) -> None:
    answer = answer_to(admin, case)
    assert answer.complaints == []
    taken, meant = (case.model.from_wire(one).model_dump() for one in (answer.body, case.make(case.row.changes)))
    assert taken["spec"] == meant["spec"]


@pytest.mark.parametrize("case", cases(REFUSED, SCALER_REFUSED))
def test_the_server_refuses_it_and_every_line_says_what_to_do(admin: KubeHttp, case: Case) -> None:
    assert isinstance(case.row, Refused)
    answer = answer_to(admin, case)
    assert answer.status in (400, 422), answer
    remarks = [REMARK] if case.row.by is By.SCHEMA else []
    lines = [line for line in answer.complaints if line not in remarks]
    assert lines
    assert [line for line in lines if case.row.message not in line] == []
    if case.row.by is By.RULE:
        assert [line for line in lines if not line.startswith(("spec.", "<nil>: Invalid value: metadata."))] == []


def test_our_crds_are_established_and_nobody_has_to_approve_or_mend_them(admin: KubeHttp) -> None:
    names = {crd["metadata"]["name"] for crd in crds()}
    assert names == {"pdclusters.pdcluster.dev", "pdrolescalers.pdcluster.dev"}
    for crd in apply_crds(admin):
        assert conditions_of(crd) == {"NamesAccepted": "True", "Established": "True"}, crd["metadata"]["name"]


def test_applying_the_crds_again_changes_nothing(admin: KubeHttp) -> None:
    first, second = ({one["metadata"]["name"]: one["metadata"] for one in apply_crds(admin)} for _ in range(2))
    assert {name: found["resourceVersion"] for name, found in first.items()} == {
        name: found["resourceVersion"] for name, found in second.items()
    }
    assert {found["generation"] for found in second.values()} == {1}


def test_kubectl_is_told_our_short_names_and_columns(admin: KubeHttp) -> None:
    served = {one["name"]: one for one in admin.get("/apis/pdcluster.dev/v1alpha1")["resources"]}
    assert served["pdclusters"]["shortNames"] == ["pdc"]
    assert {"pdclusters/status", "pdrolescalers/status", "pdrolescalers/scale"} <= set(served)


def test_an_autoscaler_moves_a_role_through_the_scale_subresource(admin: KubeHttp, scalers: str) -> None:
    before = admin.get(f"{scalers}/scale")
    assert (before["kind"], before["spec"], before["status"]["replicas"]) == ("Scale", {"replicas": 1}, 0)
    admin.replace(f"{scalers}/scale", {**before, "spec": {"replicas": 3}})
    assert admin.get(scalers)["spec"] == {**scaler({})["spec"], "replicas": 3}


def test_an_autoscaler_reads_what_the_operator_wrote_into_status(admin: KubeHttp, scalers: str) -> None:
    status = {"status": {"replicas": 2, "selector": "pdcluster.dev/cluster=pool"}}
    assert admin.ask("PATCH", f"{scalers}/status", status, content_type=MERGE_PATCH).complaints == []
    assert admin.get(f"{scalers}/scale")["status"] == status["status"]
    assert admin.get(scalers)["spec"]["replicas"] == 1


@pytest.fixture(scope="module")
def autoscaler(control_plane: ControlPlane, admin: KubeHttp) -> None:
    """Kubernetes' own knows our kinds: by itself its controller learns of new ones only twice in a minute."""
    with control_plane.without_controllers():
        pass


@pytest.mark.usefixtures("autoscaler")
@pytest.mark.parametrize(("bounds", "replicas"), [((2, 4), 2), ((1, 3), 3)])
def test_kubernetes_own_autoscaler_finds_a_role_and_moves_it_into_its_bounds(
    admin: KubeHttp, scalers: str, bounds: tuple[int, int], replicas: int
) -> None:
    """Without metrics a HorizontalPodAutoscaler still does that much: it finds the scale subresource, and writes it."""
    admin.replace(scalers, with_spec(admin.get(scalers), replicas=1 if bounds[0] > 1 else 5))
    shown = {"status": {"replicas": 1 if bounds[0] > 1 else 5, "selector": "pdcluster.dev/cluster=pool"}}
    assert admin.ask("PATCH", f"{scalers}/status", shown, content_type=MERGE_PATCH).complaints == []
    with stored(admin, AUTOSCALERS, autoscaler_of(admin.get(scalers), *bounds)) as made:
        path = f"{AUTOSCALERS}/{made['metadata']['name']}"
        deadline = time.monotonic() + AUTOSCALER_S
        # It moves the scaler first, and says so of itself afterwards.
        while (admin.get(scalers)["spec"]["replicas"], able_to_scale(admin.get(path))) != (replicas, "True"):
            assert time.monotonic() < deadline, admin.get(path).get("status")
            time.sleep(0.2)


@pytest.mark.parametrize("replicas", [-1, 1001])
def test_a_scale_out_of_bounds_is_refused(admin: KubeHttp, scalers: str, replicas: int) -> None:
    answer = admin.ask("PATCH", f"{scalers}/scale", {"spec": {"replicas": replicas}}, content_type=MERGE_PATCH)
    assert answer.status == 422, answer
    assert admin.get(scalers)["spec"]["replicas"] == 1


def test_who_may_scale_only_may_not_change_anything_else_of_a_scaler(
    control_plane: ControlPlane, admin: KubeHttp
) -> None:
    namespace = make_namespace(admin)
    rule = {"apiGroups": ["pdcluster.dev"], "resources": ["pdrolescalers/scale"], "verbs": ["get", "patch"]}
    make_account(admin, namespace, "autoscaler", [rule])
    autoscaler = control_plane.as_account(namespace, "autoscaler")
    path = f"{GROUP}/{namespace}/pdrolescalers"
    admin.create(path, scaler({"metadata.namespace": namespace}))
    change = {"spec": {"replicas": 2}}
    statuses = [
        autoscaler.ask("PATCH", f"{path}/pool-prefill{part}", change, content_type=MERGE_PATCH).status
        for part in ("", "/status", "/scale")
    ]
    assert statuses == [403, 403, 200]
    assert admin.get(f"{path}/pool-prefill")["spec"]["replicas"] == 2

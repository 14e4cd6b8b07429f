from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from operator_cases.accepted import ACCEPTED, SCALER_ACCEPTED
from operator_cases.objects import Accepted, By, Refused, pdcluster, scaler
from operator_cases.refused import REFUSED, SCALER_REFUSED
from pdcluster_operator.api.base import MAX_OPEN_DEPTH, ApiModel, faults_in
from pdcluster_operator.api.cluster import PDCluster, metadata_problems
from pdcluster_operator.api.model import Model
from pdcluster_operator.api.role import RoleSpec
from pdcluster_operator.api.scaler import PDRoleScaler
from pdcluster_operator.api.status import ConditionStatus, PDClusterStatus, RoleStatus, WireCondition, summary_of
from pdcluster_protocol.launch import TransferProtocol

SCHEMA_REFUSED = [case for case in REFUSED if case.by is By.SCHEMA]
RULE_REFUSED = [case for case in REFUSED if case.by is By.RULE]


def named(case: Accepted | Refused) -> str:
    return case.name


def models() -> list[type[ApiModel]]:
    """Every model of the API."""
    found: list[type[ApiModel]] = []
    waiting = [ApiModel]
    while waiting:
        children = waiting.pop().__subclasses__()
        found += children
        waiting += children
    assert len(found) > 20
    return found


def is_users(model: type[BaseModel]) -> bool:
    """A part of what users write: neither a status nor a whole object."""
    is_status = model.__module__ == PDClusterStatus.__module__ or model.__name__.endswith("Status")
    return not is_status and model not in (PDCluster, PDRoleScaler)


@pytest.mark.parametrize("case", ACCEPTED, ids=named)
def test_what_the_server_takes_is_a_model_that_is_written_as_it_was_read(case: Accepted) -> None:
    written = pdcluster(case.changes)
    read = PDCluster.from_wire(written)
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == written


@pytest.mark.parametrize("case", RULE_REFUSED, ids=named)
def test_what_only_a_rule_refuses_is_a_model_all_the_same(case: Refused) -> None:
    PDCluster.from_wire(pdcluster(case.changes))


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("roles.prefill.resources.requests", {"memory": "400GB"}, "400GB does not fit: write an amount like"),
        ("roles.prefill.resources.requests", {"memory": -1}, "-1 does not fit: write an amount like"),
        ("rollout.maxUnavailable", "120%", "120% does not fit: write a number up to 1000, or a part like 25%"),
        ("rollout.maxSurge", 1001, "1001 does not fit: write a number up to 1000, or a part like 25%"),
    ],
)
def test_a_value_that_is_neither_of_two_types_is_told_once_with_its_cure(path: str, value: object, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PDCluster.from_wire(pdcluster({f"spec.{path}": value}))
    where = f"spec.{path}.memory" if isinstance(value, dict) else f"spec.{path}"
    (fault,) = faults_in(caught.value)
    assert fault.startswith(f"{where}: {told}")


@pytest.mark.parametrize("path", ["roles.decode.podOverrides", "router.podOverrides", "model.volume.source"])
def test_an_open_object_may_be_deeper_than_any_pod_and_not_endlessly_deep(path: str) -> None:
    PDCluster.from_wire(pdcluster({f"spec.{path}": nested(MAX_OPEN_DEPTH)}))
    for depth in (MAX_OPEN_DEPTH + 1, 300):
        with pytest.raises(ValidationError) as caught:
            PDCluster.from_wire(pdcluster({f"spec.{path}": nested(depth)}))
        (fault,) = faults_in(caught.value)
        assert fault.startswith(
            f"spec.{path}: it is nested deeper than 64 levels, and no field of Kubernetes is: remove"
        )
        assert len(fault) < 1000


def nested(depth: int) -> dict[str, Any]:
    inner: Any = "x"
    for level in range(depth - 1):
        inner = [inner] if level % 2 else {"a": inner}
    return {"a": inner}


def test_a_name_is_refused_without_a_server_in_the_servers_words() -> None:
    refused = {case.name: case.message for case in RULE_REFUSED if "metadata.name" in case.changes}
    told = {case.name: metadata_problems(pdcluster(case.changes)["metadata"]) for case in RULE_REFUSED}
    assert refused
    assert {name: problems for name, problems in told.items() if problems}.keys() == refused.keys()
    assert all(message in "; ".join(told[name]) for name, message in refused.items())


def test_metadata_that_the_server_takes_are_no_problem() -> None:
    assert {metadata_problems(pdcluster(case.changes)["metadata"]) for case in ACCEPTED} == {()}


def test_scalers_are_taken_and_refused_alike() -> None:
    for accepted in SCALER_ACCEPTED:
        PDRoleScaler.from_wire(scaler(accepted.changes))
    for refused in SCALER_REFUSED:
        if refused.by is By.RULE:
            PDRoleScaler.from_wire(scaler(refused.changes))
            continue
        with pytest.raises(ValidationError):
            PDRoleScaler.from_wire(scaler(refused.changes))


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_every_field_says_what_it_means(model: type[BaseModel]) -> None:
    own = {"api_version", "kind"}
    fields = {name: field for name, field in model.model_fields.items() if name not in own}
    assert [name for name, field in fields.items() if not field.description] == []


@pytest.mark.parametrize("model", [*filter(is_users, models())], ids=lambda model: model.__name__)
def test_a_field_that_a_user_may_leave_out_says_what_happens_then(model: type[BaseModel]) -> None:
    optional = {name: field for name, field in model.model_fields.items() if not field.is_required()}
    groups = {name for name, field in optional.items() if isinstance(field.default, BaseModel)}
    silent = {name for name, field in optional.items() if "Default" not in f"{field.description}"}
    assert silent - groups == set()


def test_an_unknown_field_is_refused_at_every_depth() -> None:
    for path in (
        "spec.model.nam",
        "spec.roles.prefill.parallelism.tensr",
        "spec.router.service.prt",
        "spec.drain.time",
    ):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            PDCluster.from_wire(pdcluster({path: 1}))


def test_an_unknown_field_that_the_api_server_stores_is_left_out_and_named() -> None:
    stored = pdcluster({"spec.model.nam": 1, "spec.roles.decode.device.topology": {"kind": "Tight"}})
    read, unknown = PDCluster.from_server(stored)
    assert read == PDCluster.from_wire(pdcluster({}))
    assert sorted(unknown) == ["spec.model.nam", "spec.roles.decode.device.topology"]
    assert PDCluster.from_server(pdcluster({})) == (read, ())


@pytest.mark.parametrize("case", SCHEMA_REFUSED, ids=named)
def test_what_the_schema_refuses_is_no_model_wherever_it_comes_from(case: Refused) -> None:
    with pytest.raises(ValidationError) as caught:
        PDCluster.from_wire(pdcluster(case.changes))
    if {fault["type"] for fault in caught.value.errors()} == {"extra_forbidden"}:
        assert PDCluster.from_server(pdcluster(case.changes))[1]
        return
    with pytest.raises(ValidationError):
        PDCluster.from_server(pdcluster(case.changes))


def test_pythons_spelling_is_not_the_wires() -> None:
    with pytest.raises(ValidationError, match=r"served_name\n.*Extra inputs are not permitted"):
        PDCluster.from_wire(pdcluster({"spec.model": {"name": "tiny", "served_name": "t"}}))
    assert Model(name="tiny", served_name="t").to_wire() == {"name": "tiny", "servedName": "t"}


def test_a_model_never_changes() -> None:
    found = PDCluster.from_wire(pdcluster({}))
    with pytest.raises(ValidationError, match="frozen"):
        found.spec.image = "other"


def role(**fields: object) -> RoleSpec:
    return RoleSpec.model_validate({"device": {"kind": "cuda"}} | fields)


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        (role(parallelism={"tensor": 8}), 8),
        (role(parallelism={"tensor": 8, "pipeline": 2, "data": 2}, nodesPerInstance=4), 8),
        (role(parallelism={"tensor": 8}, device={"kind": "cuda", "count": 8}), 8),
        (role(parallelism={"tensor": 2}, device={"kind": "cpu"}), 0),
    ],
)
def test_a_pod_asks_for_its_part_of_the_ranks(given: RoleSpec, devices: int) -> None:
    assert given.devices_per_pod == devices


@pytest.mark.parametrize(
    ("kind", "asked", "used"),
    [
        ("cpu", None, TransferProtocol.TCP),
        ("cuda", None, TransferProtocol.TCP),
        ("cuda", "rdma", TransferProtocol.RDMA),
        ("ascend", None, TransferProtocol.ASCEND),
        ("ascend", "tcp", TransferProtocol.TCP),
    ],
)
def test_the_protocol_follows_the_device_unless_asked_otherwise(
    kind: str, asked: str | None, used: TransferProtocol
) -> None:
    changes: dict[str, object] = {f"spec.roles.{role}.device.kind": kind for role in ("prefill", "decode")}
    if asked:
        changes["spec.transfer.protocol"] = asked
    assert PDCluster.from_wire(pdcluster(changes)).spec.transfer_protocol is used


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"name": "hub/tiny"}, "hub/tiny"),
        ({"name": "hub/tiny", "servedName": "tiny"}, "tiny"),
        ({"path": "/models/1", "servedName": "tiny"}, "tiny"),
    ],
)
def test_clients_ask_for_the_served_name_or_else_the_models(model: dict[str, str], name: str) -> None:
    assert PDCluster.from_wire(pdcluster({"spec.model": model})).spec.model.public_name == name


def test_a_status_is_written_as_kubernetes_writes_it() -> None:
    when = "2026-01-02T03:04:05Z"
    condition = {"type": "Ready", "status": "True", "reason": "Verified", "message": "", "lastTransitionTime": when}
    status = PDClusterStatus.from_wire({"conditions": [condition], "observedGeneration": 3})
    assert status.to_wire()["conditions"] == [{**condition, "observedGeneration": 0}]
    assert "url" not in status.to_wire()
    assert status.conditions[0].status is ConditionStatus.TRUE
    assert status.roles.decode == RoleStatus()


def test_a_reason_is_one_word() -> None:
    with pytest.raises(ValidationError, match="reason"):
        WireCondition.model_validate(
            {"type": "Ready", "status": "True", "reason": "not yet", "message": "", "lastTransitionTime": 0}
        )


def test_a_role_is_summed_up_in_one_word() -> None:
    assert summary_of(ready=2, wanted=3, tensor=4) == "2/3x4"

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tools.crd import CLUSTER, KINDS, MAX_CRD_BYTES, SCALER, Kind, crd, rules_in, structural
from tools.crds import FOLDER, file_of, text_of

from operator_cases.objects import By
from operator_cases.refused import NOT_YOURS, REFUSED, SCALER_REFUSED
from pdcluster_operator.api.base import RULES_KEY
from pdcluster_operator.api.engine_args import MUST_AGREE, SET_ELSEWHERE

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def schema_of(kind: Kind) -> dict[str, Any]:
    found: dict[str, Any] = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, and its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}.{key}")


def at(kind: Kind, path: str) -> dict[str, Any]:
    return dict(nodes(schema_of(kind)))[path]


@each_kind
def test_the_written_crd_is_fresh(kind: Kind) -> None:
    assert file_of(kind).read_text() == text_of(kind), "run: make crds"
    assert yaml.safe_load(text_of(kind)) == crd(kind)


def test_there_is_no_crd_that_nobody_makes() -> None:
    assert sorted(FOLDER.iterdir()) == sorted(map(file_of, KINDS))


@each_kind
def test_a_crd_fits_into_the_annotation_of_a_client_side_apply(kind: Kind) -> None:
    assert len(json.dumps(crd(kind))) < MAX_CRD_BYTES


@each_kind
def test_a_schema_has_nothing_that_kubernetes_refuses(kind: Kind) -> None:
    for path, node in nodes(schema_of(kind)):
        assert {"$ref", "$defs", "title", "const", "allOf", "oneOf"}.isdisjoint(node), path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert "anyOf" not in node or node.get("x-kubernetes-int-or-string"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert node.get("default", ...) is not None, path
        assert isinstance(node.get("exclusiveMinimum", False), bool), path


@each_kind
def test_every_field_of_spec_and_status_has_a_description_in_one_line(kind: Kind) -> None:
    properties = schema_of(kind)["properties"]
    for part in ("spec", "status"):
        for path, node in nodes(properties[part], part):
            if not re.search(r"\.(items|additionalProperties)$", path):
                assert node.get("description"), path
                assert "\n" not in node["description"], path


@each_kind
def test_what_rules_may_walk_through_is_bounded(kind: Kind) -> None:
    """The API server refuses rules whose worst case is too costly: that of a list or map without bounds is."""
    for path, node in nodes(schema_of(kind)["properties"]["spec"]):
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path


@each_kind
def test_every_rule_has_a_message_that_names_values_and_one_that_never_fails(kind: Kind) -> None:
    rules = rules_in(schema_of(kind))
    assert rules
    for path, rule in rules:
        assert {"rule", "message", "messageExpression", "reason"} <= set(rule), path
        assert "\n" not in rule["message"] + rule["rule"], path
        assert rule["rule"].count("(") == rule["rule"].count(")"), path


def test_each_rule_has_a_case_that_shows_its_message() -> None:
    """By the words that the message has whatever the values are."""
    cases = [case.message for case in (*REFUSED, *SCALER_REFUSED) if case.by is By.RULE]
    for kind in KINDS:
        for path, rule in rules_in(schema_of(kind)):
            assert [case for case in cases if _is_made_by(rule, case)], f"no case shows what {path} says: {rule}"


def _is_made_by(rule: dict[str, Any], message: str) -> bool:
    template = rule["messageExpression"].split("'")[1]
    whole = ".+".join(map(re.escape, template.split("%s")))
    return re.search(whole, message) is not None


def test_both_roles_have_the_same_rules() -> None:
    prefill, decode = (at(CLUSTER, f".spec.roles.{role}") for role in ("prefill", "decode"))
    assert {**prefill, "description": ""} == {**decode, "description": ""}


def test_one_rule_for_each_option_that_both_roles_share() -> None:
    rules = [rule["rule"] for rule in at(CLUSTER, ".spec.roles")[RULES_KEY]]
    assert [name for name in MUST_AGREE if sum(f"'{name}'" in rule for rule in rules) != 1] == []


def test_no_option_is_both_shared_and_the_operators() -> None:
    assert not set(MUST_AGREE) & set(SET_ELSEWHERE)


def test_each_option_that_is_not_the_users_says_what_to_do_instead() -> None:
    assert {name: cure for name, _, cure in NOT_YOURS}.items() <= SET_ELSEWHERE.items()


def test_nested_defaults_are_filled_in_from_an_empty_object() -> None:
    spec = at(CLUSTER, ".spec")["properties"]
    defaulted = {name for name, child in spec.items() if child.get("default") == {}}
    assert defaulted == {"transfer", "router", "scaling", "drain", "auth"}
    assert at(CLUSTER, ".spec.transfer.port")["default"] == 12100
    assert at(CLUSTER, ".spec.router.service")["default"] == {}


def test_a_default_that_a_rule_is_asked_about_is_spelled_out() -> None:
    default = at(CLUSTER, ".spec.rollout")["default"]
    assert default == {"maxSurge": 1, "maxUnavailable": 0, "progressDeadlineSeconds": 1800, "paused": False}


def test_what_may_be_absent_is_not_required_and_not_null() -> None:
    assert "default" not in at(CLUSTER, ".spec.auth.secretRef")
    assert at(CLUSTER, ".spec.auth.secretRef")["type"] == "object"
    assert at(CLUSTER, ".spec")["required"] == ["model", "image", "roles"]


def test_lists_merge_by_the_name_of_their_items() -> None:
    assert at(CLUSTER, ".spec.roles.prefill.env")["x-kubernetes-list-map-keys"] == ["name"]
    assert at(CLUSTER, ".status.conditions")["x-kubernetes-list-map-keys"] == ["type"]


def test_somebody_elses_schemas_stay_open() -> None:
    role = ".spec.roles.decode"
    for path in (f"{role}.podOverrides", f"{role}.env.items.valueFrom", ".spec.model.volume.source"):
        assert at(CLUSTER, path)["x-kubernetes-preserve-unknown-fields"] is True


def test_an_amount_is_a_number_or_a_string() -> None:
    surge = at(CLUSTER, ".spec.rollout.maxSurge")
    assert surge["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert surge["x-kubernetes-int-or-string"] is True
    assert (surge["default"], surge["minimum"], surge["maxLength"]) == (1, 0, 4)


def test_kubectl_shows_a_pool_in_one_line() -> None:
    version = crd(CLUSTER)["spec"]["versions"][0]
    assert crd(CLUSTER)["spec"]["names"]["shortNames"] == ["pdc"]
    shown = [column["name"] for column in version["additionalPrinterColumns"]]
    assert shown == ["Model", "P", "D", "Ready", "URL", "Age"]


@each_kind
def test_a_column_shows_a_field_that_there_is(kind: Kind) -> None:
    known = {path for path, _ in nodes(schema_of(kind))} | {".metadata.creationTimestamp"}
    for column in kind.columns:
        assert column.path.partition("[")[0] in known


def test_autoscalers_find_their_three_numbers() -> None:
    subresources = crd(SCALER)["spec"]["versions"][0]["subresources"]
    assert subresources["status"] == {}
    assert {at(SCALER, path)["type"] for path in subresources["scale"].values()} == {"integer", "string"}


@pytest.mark.parametrize(
    ("pydantics", "kubernetes"),
    [
        ({"type": "string", "title": "Name"}, {"type": "string"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, {"type": "integer"}),
        (
            {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "default": None, "description": "mine"},
            {"description": "mine", "type": "object"},
        ),
        ({"$ref": "#/$defs/A"}, {"description": "theirs", "type": "object"}),
        ({"type": "number", "exclusiveMinimum": 0.0}, {"type": "number", "minimum": 0.0, "exclusiveMinimum": True}),
        ({"type": "object", "additionalProperties": False}, {"type": "object"}),
        ({"type": "array", "default": [], "items": {"type": "string"}}, {"type": "array", "items": {"type": "string"}}),
        ({"description": "two\nlines", "type": "string"}, {"description": "two lines", "type": "string"}),
        (
            {"type": "object", "default": {"a": 1}, "properties": {"a": {"type": "integer", "default": 1}}},
            {"type": "object", "default": {}, "properties": {"a": {"type": "integer", "default": 1}}},
        ),
    ],
)
def test_a_schema_becomes_structural(pydantics: dict[str, Any], kubernetes: dict[str, Any]) -> None:
    assert structural(pydantics, {"A": {"type": "object", "description": "theirs"}}) == kubernetes

"""``docs/reference/pdcluster.md`` is fresh, and has every field, rule, condition and reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from tools.crd import KINDS, root_schema, rules_in
from tools.crds import REFERENCE
from tools.reference.fields import bounds_of, default_of, type_of
from tools.reference.page import page

from pdcluster_operator.api.base import API_VERSION

PAGE: Final = REFERENCE.read_text()


def fields(schema: dict[str, Any]) -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        yield name
        yield from fields(child)
        yield from fields(child.get("items", {}))


def anchors() -> set[str]:
    heads = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}


def section(path: str) -> str:
    """The part of the page under one heading."""
    return PAGE.split(f"### {path}\n")[1].split("\n#")[0]


def test_the_page_is_fresh() -> None:
    assert page() == PAGE, "run: make crds"


def test_it_names_the_version_of_the_api() -> None:
    assert f"API version `{API_VERSION}`" in PAGE


def test_it_has_every_field() -> None:
    for kind in KINDS:
        for part in ("spec", "status"):
            names = set(fields(root_schema(kind.model)["properties"][part]))
            assert len(names) >= 2
            assert [name for name in names if f"\n| `{name}` | " not in PAGE] == []


def test_it_has_every_rule_with_its_message() -> None:
    for kind in KINDS:
        for _, rule in rules_in(root_schema(kind.model)):
            assert f"`{rule['rule']}`" in PAGE
            assert rule["messageExpression"].split("'")[1].replace("%s", "…") in PAGE


def test_every_link_within_the_page_leads_somewhere_and_every_link_out_of_it() -> None:
    links = set(re.findall(r"\]\(#([^)]*)\)", PAGE))
    assert len(links) > 15
    assert links <= anchors()
    outside = re.findall(r"\]\((\S+\.md)\)", PAGE)
    assert outside
    assert [link for link in outside if not (REFERENCE.parent / link).is_file()] == []


@pytest.mark.parametrize(
    ("place", "field"),
    [
        ("PDCluster.spec.model", "servedName"),
        ("PDCluster.spec.roles.prefill.device", "kind"),
        ("PDCluster.spec.auth", "secretRef"),
        ("PDCluster.spec", "tls"),
        ("PDRoleScaler.spec", "role"),
        ("PDRoleScaler.spec.clusterRef", "name"),
    ],
)
def test_what_cannot_change_is_marked(place: str, field: str) -> None:
    (row,) = [line for line in section(place).splitlines() if line.startswith(f"| `{field}` |")]
    assert "*Immutable.*" in row


def test_nothing_else_is_marked() -> None:
    assert PAGE.count("*Immutable.*") == 6


def test_both_roles_are_described_once() -> None:
    assert section("PDCluster.spec.roles").count("[object](#pdclusterspecrolesprefill)") == 2


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "default": 1, "minimum": 0, "maximum": 9}, ("integer", "`1`", "0 to 9")),
        (
            {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 5},
            ("number", "", "above 0; at most 5"),
        ),
        ({"type": "string", "enum": ["a", "b"], "default": "a"}, ("`a`, `b`", '`"a"`', "")),
        ({"type": "string", "minLength": 1, "maxLength": 4}, ("string", "", "1 to 4 characters")),
        (
            {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "string", "maxLength": 3}},
            ("map of string", "", "at most 2 keys; each value: at most 3 characters"),
        ),
        (
            {"type": "array", "maxItems": 2, "items": {"type": "integer", "minimum": 1}},
            ("list of integer", "", "at most 2 items; each: at least 1"),
        ),
        ({"type": "object", "default": {}, "properties": {"a": {"type": "string"}}}, ("object", "its fields'", "")),
        ({"type": "string", "format": "date-time", "pattern": "^a$"}, ("string", "", "pattern `^a$`; date-time")),
    ],
)
def test_a_field_is_told_in_words(schema: dict[str, Any], words: tuple[str, str, str]) -> None:
    assert (type_of(schema), default_of(schema, is_required=False), bounds_of(schema)) == words


def test_what_must_be_given_has_no_default() -> None:
    assert default_of({"type": "string", "default": "a"}, is_required=True) == "required"

"""Turns the models into CustomResourceDefinitions (apiextensions.k8s.io/v1). Pure; ``crds.py`` writes the files.

Pydantic writes JSON Schema 2020-12. Kubernetes 1.35 takes its own *structural* OpenAPI v3: no ``$ref``, no ``anyOf``
with types, no ``title``; ``exclusiveMinimum`` is a boolean; ``additionalProperties`` and ``properties`` exclude each
other.

An absent field stays absent and does not become null. The default of a nested object is ``{}``, which the defaults of
its fields fill in. So a rule can read ``self.transfer.port`` of an object that does not mention ``transfer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_operator.api.base import GROUP, RULES_KEY, VERSION, ApiModel
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.api.scaler import PDRoleScaler

Schema = dict[str, Any]

MAX_CRD_BYTES: Final = 256 << 10
"""Limit of all annotations of an object: a client-side ``kubectl apply`` keeps the whole CRD in one."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of ``kubectl get``."""

    name: str
    path: str
    type: str = "string"
    description: str = ""

    def document(self) -> Schema:
        shown = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return shown | ({"description": self.description} if self.description else {})


AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object and how kubectl shows it."""

    model: type[ApiModel]
    plural: str
    short_name: str
    columns: tuple[Column, ...]
    has_scale: bool = False

    @property
    def name(self) -> str:
        return self.model.__name__


CLUSTER: Final = Kind(
    PDCluster,
    "pdclusters",
    "pdc",
    (
        Column("Model", ".status.model", description="Name that clients ask for"),
        Column("P", ".status.roles.prefill.summary", description="Prefill: ready/wanted x tensor parallelism"),
        Column("D", ".status.roles.decode.summary", description="Decode: ready/wanted x tensor parallelism"),
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("URL", ".status.url"),
        AGE,
    ),
)
SCALER: Final = Kind(
    PDRoleScaler,
    "pdrolescalers",
    "pdrs",
    (
        Column("Cluster", ".spec.clusterRef.name"),
        Column("Role", ".spec.role"),
        Column("Wanted", ".spec.replicas", "integer"),
        Column("Replicas", ".status.replicas", "integer"),
        AGE,
    ),
    has_scale=True,
)
KINDS: Final = (CLUSTER, SCALER)


def crd(kind: Kind) -> Schema:
    """The CustomResourceDefinition of a kind."""
    names = {
        "kind": kind.name,
        "listKind": f"{kind.name}List",
        "plural": kind.plural,
        "singular": kind.name.lower(),
        "shortNames": [kind.short_name],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [_version(kind)]},
    }


def _version(kind: Kind) -> Schema:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": _subresources(kind),
        "additionalPrinterColumns": [column.document() for column in kind.columns],
        "schema": {"openAPIV3Schema": root_schema(kind.model)},
    }


def _subresources(kind: Kind) -> Schema:
    if not kind.has_scale:
        return {"status": {}}
    paths = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return {"status": {}, "scale": paths}


def root_schema(model: type[ApiModel]) -> Schema:
    """A kind's structural schema. The API server itself checks ``apiVersion``, ``kind`` and ``metadata``."""
    generated = model.model_json_schema(by_alias=True)
    found = structural(generated, generated.get("$defs", {}))
    found["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    found["required"] = ["spec"]
    return found


def structural(node: Mapping[str, Any], defs: Mapping[str, Schema]) -> Schema:
    """``node`` without anything that Kubernetes refuses."""
    found = _without_null(_without_reference(node, defs), defs)
    for key in ("title", "$defs"):
        found.pop(key, None)
    if isinstance(found.get("additionalProperties"), bool):  # unknown fields are refused or pruned by Kubernetes itself
        del found["additionalProperties"]
    found = _with_boolean_bound(found)
    return _in_reading_order(_with_children(_with_short_default(found), defs))


def _without_reference(node: Mapping[str, Any], defs: Mapping[str, Schema]) -> Schema:
    """The node with its ``$ref`` filled in. Keys beside the ``$ref``, such as a field's description, win."""
    beside = {key: value for key, value in node.items() if key != "$ref"}
    if "$ref" not in node:
        return beside
    return defs[node["$ref"].removeprefix("#/$defs/")] | beside


def _without_null(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    """The node without null as type or default: an optional field may be absent, but not null."""
    if node.get("default", ...) is None:
        node = {key: value for key, value in node.items() if key != "default"}
    kinds = node.get("anyOf", [])
    if {"type": "null"} not in kinds:
        return node
    (kind,) = (kind for kind in kinds if kind != {"type": "null"})
    beside = {key: value for key, value in node.items() if key != "anyOf"}
    return _without_reference(kind, defs) | beside


def _with_boolean_bound(node: Schema) -> Schema:
    if "exclusiveMinimum" not in node:
        return node
    return node | {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}


def _with_short_default(node: Schema) -> Schema:
    """The node without an empty list as default, and with ``{}`` as an object's default.

    If a rule is over the object, its default is spelled out: the API server checks the default by the rule as written.
    """
    match node.get("default"):
        case []:
            return {key: value for key, value in node.items() if key != "default"}
        case {**fields} if "properties" in node:
            given = {name: value for name, value in fields.items() if value is not None}
            return node | {"default": given if RULES_KEY in node else {}}
        case _:
            return node


def _in_reading_order(node: Schema) -> Schema:
    """The node with description and type first, and the description, which may have line breaks, in one line."""
    found = dict(sorted(node.items(), key=lambda item: _ORDER.get(item[0], 3)))
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    return found


_ORDER: Final = {"description": 0, "type": 1, "default": 2, "required": 4, RULES_KEY: 5}


def _with_children(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    found = dict(node)
    if "properties" in node:
        found["properties"] = {name: structural(child, defs) for name, child in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in node:
            found[key] = structural(node[key], defs)
    return found


def rules_in(schema: Schema, path: str = "") -> list[tuple[str, Schema]]:
    """Every rule of a structural schema, with the path of its field. ``[]`` and ``{}`` in a path stand for items."""
    found = [(path, rule) for rule in schema.get(RULES_KEY, [])]
    for name, child in schema.get("properties", {}).items():
        found += rules_in(child, f"{path}.{name}")
    for key, shown in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            found += rules_in(schema[key], path + shown)
    return found

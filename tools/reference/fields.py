"""Describes one field of a CRD's schema for a table: type, default, bounds. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pdcluster_operator.api.base import OPEN_KEY, QUANTITY

Schema = dict[str, Any]


def type_of(schema: Schema) -> str:
    """The field's type: ``string``, ``list of object``, ``map of string``, or all values of an enum."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("pattern") == QUANTITY:
        return "quantity"
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "items" in schema:
        return f"list of {type_of(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {type_of(schema['additionalProperties'])}"
    return f"{schema['type']} as in a pod" if schema.get(OPEN_KEY) else str(schema["type"])


def default_of(schema: Schema, *, is_required: bool) -> str:
    """The default as text. An object's is ``its fields'``; empty: there is none."""
    if is_required:
        return "required"
    if "default" not in schema:
        return ""
    if "properties" in schema:
        return "its fields'"
    return f"`{json.dumps(schema['default'])}`"


def bounds_of(schema: Schema) -> str:
    """All bounds of a value beside its type, those of its items and values included."""
    return "; ".join(_bounds(schema))


def _bounds(schema: Schema) -> Iterator[str]:
    yield from _number_bounds(schema)
    yield from _count_bounds(schema, "Length", "characters")
    yield from _count_bounds(schema, "Items", "items")
    yield from _count_bounds(schema, "Properties", "keys")
    if schema.get("pattern", QUANTITY) != QUANTITY:
        yield f"pattern `{schema['pattern']}`"
    if "format" in schema:
        yield str(schema["format"])
    for key, name in (("items", "each"), ("additionalProperties", "each value")):
        if key in schema and (inner := bounds_of(schema[key])):
            yield f"{name}: {inner}"


def _number_bounds(schema: Schema) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    above = "above" if schema.get("exclusiveMinimum") else "at least"
    if least is not None and most is not None and above == "at least":
        yield f"{least:g} to {most:g}"
        return
    if least is not None:
        yield f"{above} {least:g}"
    if most is not None:
        yield f"at most {most:g}"


def _count_bounds(schema: Schema, suffix: str, unit: str) -> Iterator[str]:
    least, most = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    match (least, most):
        case (None, None):
            return
        case (None, _):
            yield f"at most {most} {unit}"
        case (_, None):
            yield f"at least {least} {unit}"
        case _:
            yield f"exactly {least} of its {unit}" if least == most else f"{least} to {most} {unit}"

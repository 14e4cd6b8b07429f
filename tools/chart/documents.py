"""Makes the texts about the chart's values and rights: schema, ``values.yaml``, tables. Pure; ``__main__`` writes them.

Source of truth: ``values.py`` for values, ``charts/pdcluster/files/rights.yaml`` for rights.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tools.chart.values import ChartModel, Values

Schema = dict[str, Any]

WIDTH: Final = 118
MADE: Final = "Made from tools/chart/values.py by `make chart`."
_GLOBAL: Final = {
    "description": "Helm's own, where this chart is part of another one. Nothing here reads it.",
    "type": "object",
}


@dataclass(frozen=True, slots=True)
class Value:
    """One row of the table: a key such as ``image.tag``, its default, its description in one line."""

    key: str
    default: Any
    description: str


def schema() -> Schema:
    """The JSON Schema by which Helm checks values. It has no references, so that Helm's messages name the place."""
    generated = Values.model_json_schema(by_alias=True)
    found = _inlined(generated, generated.pop("$defs"))
    found["properties"]["global"] = dict(_GLOBAL)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$comment": MADE, **found}


def _inlined(node: Schema, defs: Mapping[str, Schema]) -> Schema:
    """The node with every ``$ref`` in it filled in. Keys beside a ``$ref`` win."""
    if "$ref" in node:
        node = defs[node["$ref"].removeprefix("#/$defs/")] | {key: node[key] for key in node if key != "$ref"}
    found = {key: value for key, value in node.items() if key != "title"}
    if "description" in found:
        found["description"] = _in_one_line(found["description"])
    if "properties" in found:
        found.pop("default", None)  # its fields have theirs
        found["properties"] = {name: _inlined(child, defs) for name, child in found["properties"].items()}
        found.setdefault("required", [name for name, child in found["properties"].items() if _is_needed(child)])
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            found[key] = _inlined(found[key], defs)
    return found


def _is_needed(child: Schema) -> bool:
    """Whether the value must be there. Helm removes a default if the user gives ``null``, or a section without
    lines. Then templates would fail without a clear message, or open every port instead of some."""
    return bool(child["required"]) if "properties" in child else child["default"] not in ("", [], {})


def values() -> list[Value]:
    """Every value that has no values of its own below it, in the order of the model."""
    return list(_values_of(Values(), ""))


def _values_of(section: ChartModel, prefix: str) -> Iterator[Value]:
    for key, child, description in _fields_of(section):
        if isinstance(child, ChartModel):
            yield from _values_of(child, f"{prefix}{key}.")
        else:
            yield Value(prefix + key, child, description)


def _fields_of(section: ChartModel) -> Iterator[tuple[str, Any, str]]:
    """Key, default, description; a section's description is its model's."""
    plain = section.model_dump(mode="json", by_alias=True)
    for name, field in type(section).model_fields.items():
        key = field.alias or name
        child = getattr(section, name)
        if isinstance(child, ChartModel):
            yield key, child, _in_one_line(type(child).__doc__ or "")
        else:
            yield key, plain[key], _in_one_line(field.description or "")


def _in_one_line(text: str) -> str:
    """The text without the line breaks of a docstring."""
    return " ".join(text.split())


def values_yaml() -> str:
    """The chart's ``values.yaml``: every value with its default, and its description above."""
    return "\n".join([f"# {MADE}", *_section_lines(Values(), "")]) + "\n"


def _section_lines(section: ChartModel, indent: str) -> Iterator[str]:
    for key, child, description in _fields_of(section):
        if not indent:
            yield ""
        yield from textwrap.wrap(description, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if isinstance(child, ChartModel):
            yield f"{indent}{key}:"
            yield from _section_lines(child, indent + "  ")
        else:
            yield from _value_lines(key, child, indent)


def _value_lines(key: str, value: Any, indent: str) -> Iterator[str]:
    """Lines for one value, written as JSON, which is YAML. A map that is not empty has a line for each key."""
    if isinstance(value, dict) and value:
        yield f"{indent}{key}:"
        for name, child in value.items():
            yield from _value_lines(name, child, indent + "  ")
    else:
        yield f"{indent}{key}: {json.dumps(value)}"


def values_table() -> str:
    """The values as a table in Markdown."""
    rows = [f"| `{one.key}` | `{json.dumps(one.default)}` | {one.description} |" for one in values()]
    return "\n".join(["| Value | Default | Meaning |", "|---|---|---|", *rows])


def rights_table(rights: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The rights as a table in Markdown. ``rights``: ``files/rights.yaml``, parsed."""
    rows = [_right_row(where, rule) for where, rules in rights.items() for rule in rules]
    return "\n".join(["| Where | What | Verbs | Why |", "|---|---|---|---|", *rows])


_WHERE: Final = {"watched": "watched namespaces", "own": "the release's namespace"}


def _right_row(where: str, rule: Mapping[str, Any]) -> str:
    groups = ["" if group == "" else f".{group}" for group in rule["apiGroups"]]
    resources = ", ".join(f"`{resource}{group}`" for group in groups for resource in rule["resources"])
    return f"| {_WHERE[where]} | {resources} | {', '.join(rule['verbs'])} | {_in_one_line(rule['why'])} |"


def filled(page: str, **tables: str) -> str:
    """``page`` with each ``<!-- name -->`` on a line of its own replaced.

    Raises:
        KeyError: The page lacks the mark of a table.
    """
    for name, table in tables.items():
        mark = f"<!-- {name} -->\n"
        if mark not in page:
            raise KeyError(mark)
        page = page.replace(mark, table + "\n")
    return page

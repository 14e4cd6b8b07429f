"""The reference of PDCluster and PDRoleScaler as a page in Markdown: fields, rules, conditions. Pure.

Source of truth: the CRDs, which are made from the models of ``operator/pdcluster_operator/api``, and
``core/status/conditions.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.crd import KINDS, Kind, crd, root_schema, rules_in
from tools.reference.fields import Schema, bounds_of, default_of, type_of
from tools.reference.reasons import REASONS_OF, TRUE_MEANS

from pdcluster_operator.core.status.conditions import EventReason, Reason, Type

HEAD: Final = Path(__file__).with_name("head.md").read_text()


@dataclass(frozen=True, slots=True)
class Section:
    """An object with fields of its own. ``path``: such as ``PDCluster.spec.roles.prefill``, with ``[]`` for an item."""

    path: str
    schema: Schema


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(part for kind in KINDS for part in _kind_parts(kind)), *_condition_parts()])


def _kind_parts(kind: Kind) -> Iterator[str]:
    schema = root_schema(kind.model)
    yield f"## {kind.name}\n"
    yield f"{schema['description']} {_names(kind)}\n"
    yield _table(("Column", "Shows"), [(f"`{one.name}`", f"`{one.path}`") for one in kind.columns])
    places: dict[str, str] = {}
    for section in list(_sections(Section(kind.name, schema), places)):
        yield f"### {section.path}\n"
        yield f"{section.schema.get('description', '')}\n"
        yield _table(("Field", "Type", "Default", "Bounds", "Meaning"), list(_rows(section, places, kind)))
    yield f"### Rules of {kind.name}\n"
    yield "Each is checked by the API server (CEL). `…` stands for the values at hand.\n"
    yield "\n".join(_rule_lines(schema)) + "\n"


def _names(kind: Kind) -> str:
    names = crd(kind)["spec"]["names"]
    short = ", ".join(f"`{name}`" for name in names["shortNames"])
    scale = " It has a `scale` subresource." if kind.has_scale else ""
    return f"`kubectl get {names['plural']}`, short {short}.{scale} `kubectl get` shows:"


def _sections(section: Section, places: dict[str, str]) -> Iterator[Section]:
    """This object and the objects in it, each shape once. Adds to ``places`` the path of each shape."""
    places[_shape(section.schema)] = section.path
    if section.path.count("."):
        yield section
    for name, child in section.schema["properties"].items():
        found, suffix = (child["items"], "[]") if "items" in child else (child, "")
        if "properties" in found and _shape(found) not in places:
            yield from _sections(Section(f"{section.path}.{name}{suffix}", found), places)


def _shape(schema: Schema) -> str:
    return json.dumps({key: value for key, value in schema.items() if key not in ("description", "default")})


def _rows(section: Section, places: dict[str, str], kind: Kind) -> Iterator[tuple[str, ...]]:
    fixed = _immutable(kind)
    required = section.schema.get("required", ())
    for name, schema in section.schema["properties"].items():
        mark = "*Immutable.* " if f"{section.path}.{name}" in fixed else ""
        yield (
            f"`{name}`",
            _linked(schema, places),
            default_of(schema, is_required=name in required),
            _cell(bounds_of(schema)),
            _cell(mark + schema.get("description", "")),
        )


def _linked(schema: Schema, places: dict[str, str]) -> str:
    """The type, as a link to the section of its fields if it has one."""
    place = places.get(_shape(schema.get("items", schema)))
    return f"[{type_of(schema)}](#{_anchor(place)})" if place else _cell(type_of(schema))


def _anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    kept = (letter for letter in heading.lower() if letter.isalnum() or letter in "- ")
    return "".join(kept).replace(" ", "-")


def _immutable(kind: Kind) -> set[str]:
    """Paths of fields that a rule compares with their old value."""
    rules = rules_in(root_schema(kind.model), kind.name)
    return {path + rule.get("fieldPath", "") for path, rule in rules if "oldSelf" in rule["rule"]}


def _rule_lines(schema: Schema) -> Iterator[str]:
    """The lines of all rules. A rule of several places, such as both roles, comes once."""
    places: dict[str, list[str]] = {}
    rules: dict[str, dict[str, Any]] = {}
    for path, rule in rules_in(schema):
        key = json.dumps(rule)
        rules[key] = rule
        places.setdefault(key, []).append((path + rule.get("fieldPath", "")).lstrip(".") or "the object")
    for key, rule in rules.items():
        yield f"- {', '.join(f'`{place}`' for place in places[key])}: {_message(rule)}"
        yield f"  <br>`{rule['rule']}`"


def _message(rule: dict[str, Any]) -> str:
    """The message with a mark for each value. ``messageExpression`` is ``'text %s'.format([...])``."""
    return str(rule["messageExpression"].split("'")[1].replace("%s", "…"))


def _condition_parts() -> Iterator[str]:
    yield "## Conditions of a PDCluster\n"
    yield "In the order in which they are written. Each has the `observedGeneration` that it was found for.\n"
    yield _table(("Condition", "True means"), [(f"`{one.value}`", TRUE_MEANS[one]) for one in Type])
    yield "### Reasons\n"
    yield (
        "`Ready` repeats the reason of the first condition that it lacks, and `Degraded` of the one that failed. A "
        "change of status or reason is an Event too. What to do is what `pdcluster explain` prints.\n"
    )
    told = [(f"`{one.value}`", "an Event", one.means, one.cure) for one in EventReason]
    rows = [*(_reason_row(reason) for reason in Reason), *told]
    yield _table(("Reason", "Stands in", "Meaning", "What to do"), rows)


def _reason_row(reason: Reason) -> tuple[str, ...]:
    found = [(kind, reasons[reason]) for kind, reasons in REASONS_OF.items() if reason in reasons]
    stands = ", ".join(f"`{kind.value}` {truth.value}" for kind, truth in found)
    return f"`{reason.value}`", stands, reason.means, reason.cure or "Nothing to do."


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """The text with bars escaped, because a bar would end the cell."""
    return text.replace("|", "\\|")

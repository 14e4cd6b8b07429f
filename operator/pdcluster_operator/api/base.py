"""The base of all models of the API: how their fields are spelled, that they are frozen, and the rules that the API
server checks.

A ``Rule`` is data. It is written in CEL because the API server refuses a bad object, before anybody acts on it; nothing
here evaluates it. Source of truth: Kubernetes 1.35, "CustomResourceDefinition validation rules".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails, PydanticCustomError

GROUP: Final = "pdcluster.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

RULES_KEY: Final = "x-kubernetes-validations"
OPEN_KEY: Final = "x-kubernetes-preserve-unknown-fields"
MAX_NAME: Final = 253
"""The longest name of a Kubernetes object."""
MAX_LABEL: Final = 63
"""Characters of a DNS label, and of the value of a Kubernetes label."""


class Fault(Enum):
    """How the API server names a broken rule; the values are Kubernetes' own."""

    INVALID = "FieldValueInvalid"
    REQUIRED = "FieldValueRequired"
    FORBIDDEN = "FieldValueForbidden"


@dataclass(frozen=True, slots=True)
class Rule:
    """``holds`` is a CEL expression over ``self`` (and ``oldSelf``: then it is asked at updates only).

    ``says``: the message, with who, both values and the cure; each ``%s`` is one of ``values``, CEL expressions that
    are strings. ``short``: the message where that one cannot be made (Kubernetes allows 5,120 characters). ``path``:
    the field that is named, relative to the rule's own.

    ``format`` and not ``+``: the API server takes ``string(number)`` for a text of any length, and refuses a rule that
    joins such a text as too costly. A format costs its template.
    """

    holds: str
    says: str
    short: str
    values: tuple[str, ...] = ()
    path: str = ""
    fault: Fault = Fault.INVALID

    @property
    def message_expression(self) -> str:
        """The message as a CEL expression."""
        literal = f"'{self.says}'"
        return f"{literal}.format([{', '.join(self.values)}])" if self.values else literal

    def document(self) -> dict[str, Any]:
        """As it stands in a CRD."""
        found = {"rule": self.holds, "messageExpression": self.message_expression}
        found |= {"message": self.short, "reason": self.fault.value}
        return found | ({"fieldPath": self.path} if self.path else {})


def checked_by(rules: Sequence[Rule]) -> dict[str, Any]:
    """For ``json_schema_extra`` of a single field."""
    return {RULES_KEY: [rule.document() for rule in rules]}


def _add_rules(schema: dict[str, Any], model: type[Any]) -> None:
    """Pydantic's hook: it takes the change of ``schema`` itself."""
    if model.rules:
        schema.update(checked_by(model.rules))


def faults_in(error: ValidationError) -> tuple[str, ...]:
    """For people: each field that does not fit, and why."""
    return tuple(map(_fault, error.errors()))


def _fault(one: ErrorDetails) -> str:
    """YAML reads ``8192`` and ``on`` as a number and a truth, where an option or a variable wants text."""
    path, kind, given = _path_of(one), one["type"], one["input"]
    if kind == "string_type":
        return f"{path}: {text_problem(given)}"
    if kind == "extra_forbidden":
        return f"{path}: there is no such field: check its spelling, or take it out"
    if isinstance(given, str | int | float) and one["msg"].startswith("Input should"):
        return f"{path} is {given!s:.80}: {one['msg'].replace('Input should', 'it should')}"
    return f"{path}: {one['msg']}"


def text_problem(value: object) -> str:
    """Why this value does not do where text is wanted, and the cure."""
    if isinstance(value, bool):
        return f"{str(value).lower()} is read as true or false, and text is wanted: quote it"
    if isinstance(value, int | float):
        return f"{value} is a number, and text is wanted: quote it"
    return "text is wanted: give it in quotes"


def _unknown_in(error: ValidationError) -> tuple[str, ...]:
    return tuple(_path_of(one) for one in error.errors() if one["type"] == "extra_forbidden")


def _path_of(one: ErrorDetails) -> str:
    return ".".join(map(str, one["loc"]))


class ApiModel(BaseModel):
    """Frozen, camelCase on the wire. In a file a misspelled field is an error rather than a default."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        use_attribute_docstrings=True,
        json_schema_extra=_add_rules,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def from_wire(cls, document: Mapping[str, Any]) -> Self:
        """A model from a file, in camelCase only.

        Raises:
            ValidationError: A field is unknown, missing or out of bounds; all of them are named. No rule is asked.
        """
        return cls.model_validate(document, by_alias=True, by_name=False)

    @classmethod
    def from_server(cls, document: Mapping[str, Any]) -> tuple[Self, tuple[str, ...]]:
        """A model from the API server, in camelCase only, and the fields that this version does not know.

        Those are left out, as Kubernetes' own clients do. A newer CRD with a default for a new field writes it into
        every object, and an operator that refused it would look after none of them.

        Raises:
            ValidationError: A field that is known is missing or out of bounds. No rule is asked.
        """
        try:
            return cls.from_wire(document), ()
        except ValidationError as error:
            unknown = _unknown_in(error)
        return cls.model_validate(document, by_alias=True, by_name=False, extra="ignore"), unknown

    @classmethod
    def unknown_fields_of(cls, document: Mapping[str, Any]) -> tuple[str, ...]:
        """The fields of ``document`` that this version does not know, whatever else is wrong with the document."""
        try:
            cls.from_wire(document)
        except ValidationError as error:
            return _unknown_in(error)
        return ()

    def to_wire(self) -> dict[str, Any]:
        """As JSON for the API server; what is None is absent."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
"""A name of a Kubernetes object."""

QUANTITY: Final = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
"""As controller-gen writes a ``resource.Quantity``."""


def _or_else(cure: str) -> WrapValidator:
    """One message for a value that is neither of two types, in place of one for each of them."""

    def either(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError as error:
            raise PydanticCustomError(
                "neither", "{value} does not fit: {cure}", {"value": value, "cure": cure}
            ) from error

    return WrapValidator(either)


def _int_or_string(**bounds: object) -> WithJsonSchema:
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    return WithJsonSchema(either | bounds)


Quantity = Annotated[
    Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=QUANTITY, max_length=64)],
    _or_else("write an amount like 8, 500m or 64Gi"),
    _int_or_string(pattern=QUANTITY, maxLength=64),
]
"""An amount as Kubernetes writes it: ``8``, ``500m``, ``64Gi``."""

_PERCENT: Final = r"^([0-9]|[1-9][0-9]|100)%$"
DAY_S: Final = 86400
MAX_REPLICAS: Final = 1000
"""Of one role: far above what one router pool serves, and low enough that a slip of the finger is refused."""

CountOrPercent = Annotated[
    Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | Annotated[str, Field(pattern=_PERCENT, max_length=4)],
    _or_else(f"write a number up to {MAX_REPLICAS}, or a part like 25%"),
    _int_or_string(pattern=_PERCENT, maxLength=4, minimum=0, maximum=MAX_REPLICAS),
]
"""A number of instances, or a part of the wanted ones like ``25%``."""


def map_by(key: str) -> Any:
    """For a list whose items are told apart by one field: server-side apply merges it item by item."""
    return Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})


MAX_OPEN_DEPTH: Final = 64
"""Levels of an object with a schema that is not ours. A pod has less than 20, and Python ends at 1,000."""


def _not_too_deep(found: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [found]
    for _ in range(MAX_OPEN_DEPTH):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [inner for inner in level if isinstance(inner, dict | list)]
        if not level:
            return found
    told = "it is nested deeper than {levels} levels, and no field of Kubernetes is: remove it"
    raise PydanticCustomError("too_deep", told, {"levels": MAX_OPEN_DEPTH})


OpenObject = Annotated[
    dict[str, Any], AfterValidator(_not_too_deep), WithJsonSchema({"type": "object", OPEN_KEY: True})
]
"""Somebody else's schema. The API server checks it when we apply an object that we made of it."""

"""The bounds of every number that parts tell each other. msgspec holds a message against them where it is read.

A type alone lets a page of 0 tokens and a block of 2^62 bytes through, and the arithmetic of the thread that meets one
ends in the middle of others' work. Each number of a message says its bounds beside its type::

    page_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)]

msgspec refuses without the name of an array's field and without the value: ``odd_number`` finds both. Code that uses
two numbers together checks them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from types import NoneType
from typing import Annotated, Any, Final, TypeAlias, get_args, get_origin

import msgspec
from msgspec import Meta

from pdcluster_protocol.ids import Attempt

MAX_COUNT: Final = 1 << 31
"""Of tokens, blocks, layers: two of them multiply within 64 bits."""
MAX_BYTES: Final = (1 << 63) - 1
"""Also of an address: numpy adds in int64."""
MAX_MS: Final = 10**11 - 1
"""Three years: as many digits as a token allows."""

MAX_SIDE: Final = 4096
"""The largest TP size, and number of stages: far above any engine's. A plan for so many takes 30 ms."""

MAX_LOOKED_AT: Final = 10_000
"""Numbers of a refused message that are looked at for the odd one: 20 ms, in a thread that has other work."""

Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
CountOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""0 where there is nothing to count."""
Index: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT - 1)]
NumBytes: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_MS)]
Side: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=(1 << 16) - 1)]
AttemptNumber: TypeAlias = Annotated[Attempt, Meta(ge=1, le=MAX_COUNT)]


def odd_number(value: object, kind: type[msgspec.Struct]) -> str:
    """The first number out of its bounds in ``value``, which came over the wire as a ``kind``; empty without one."""
    for name, number, bounds in islice(_numbers("", value, kind), MAX_LOOKED_AT):
        if not _is_within(number, bounds):
            return f"{name} is {number}, and must be in [{bounds.ge}, {bounds.le}]: run the same pdcluster everywhere"
    return ""


def bounds_of(annotation: Any) -> Meta | None:
    """The bounds that a field's annotation gives its number, or each number in it; None where it gives none."""
    said = getattr(_element(annotation), "__metadata__", ())
    return next((bounds for bounds in said if isinstance(bounds, Meta)), None)


def _numbers(name: str, value: object, annotation: Any) -> Iterator[tuple[str, int, Meta]]:
    """(its name, the number, its bounds) of each number that has some."""
    element, bounds = _element(annotation), bounds_of(annotation)
    if isinstance(value, int) and bounds:
        yield name, value, bounds
    elif isinstance(element, type) and issubclass(element, msgspec.Struct) and _is_one(value, element):
        for field, inner, part in _fields(value, element):
            yield from _numbers(f"{name}.{field}" if name else field, part, inner)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _numbers(f"{name}[{number}]", part, element)


def _is_within(number: int, bounds: Meta) -> bool:
    return (bounds.ge is None or number >= bounds.ge) and (bounds.le is None or number <= bounds.le)


def _is_one(value: object, kind: type[msgspec.Struct]) -> bool:
    """Whether ``value`` can be one of ``kind``, and not several of them: those of an array have no array first."""
    if not kind.__struct_config__.array_like:
        return isinstance(value, Mapping)
    return isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (list, tuple)))


def _fields(value: Any, kind: type[msgspec.Struct]) -> Iterator[tuple[str, Any, object]]:
    """(name, annotation, what is there) of each field that is there."""
    for number, field in enumerate(msgspec.structs.fields(kind)):
        if isinstance(value, Mapping):
            yield field.name, field.type, value.get(field.encode_name)
        elif number < len(value):
            yield field.name, field.type, value[number]


def _element(annotation: Any) -> Any:
    """The element of a tuple or of an optional value; other annotations as they are."""
    if get_origin(annotation) is Annotated:
        return annotation
    held = [argument for argument in get_args(annotation) if argument not in (NoneType, ...)]
    return _element(held[0]) if held else annotation

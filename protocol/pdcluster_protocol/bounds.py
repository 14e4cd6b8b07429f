"""The bounds of every number that parts tell each other. msgspec checks them where a message is read.

A type alone lets a page of 0 tokens or a block of 2^62 bytes through. Arithmetic with such a number would fail in a
thread that works for other requests too. Each number of a message says its bounds beside its type::

    page_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)]

msgspec's error lacks the name of an array's field, and the value: ``odd_number`` finds both. Code that uses two
numbers together checks them together.
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
"""Most tokens, blocks or layers: the product of two counts fits in 64 bits."""
MAX_BYTES: Final = (1 << 63) - 1
"""Also the largest address: numpy adds in int64."""
MAX_MS: Final = 10**11 - 1
"""Three years. It has 11 digits, the most that a token may have."""

MAX_SIDE: Final = 4096
"""The largest TP size, and the largest number of stages: far above any engine's. A plan for so many takes 30 ms."""

MAX_LOOKED_AT: Final = 10_000
"""Most values of a refused message that ``odd_number`` checks: they take 20 ms, in a thread that has other work."""
_MAX_DEPTH: Final = 16
"""How deep ``odd_number`` looks into lists and structs: more than twice as deep as any message of ours."""

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
    """A message about the first number out of its bounds in ``value``, which came over the wire as a ``kind``.

    Empty: none of the first ``MAX_LOOKED_AT`` values is such a number. ``value`` may be nested to any depth.
    """
    for name, found, bounds in islice(_values("", value, kind), MAX_LOOKED_AT):
        if isinstance(found, int) and bounds and not _is_within(found, bounds):
            return f"{name} is {found}, and must be in [{bounds.ge}, {bounds.le}]: run the same pdcluster everywhere"
    return ""


def bounds_of(annotation: Any) -> Meta | None:
    """The bounds in a field's annotation, for its number or for each number of its tuple; None: it has none."""
    said = getattr(_element(annotation), "__metadata__", ())
    return next((bounds for bounds in said if isinstance(bounds, Meta)), None)


def _values(name: str, value: object, annotation: Any, depth: int = 0) -> Iterator[tuple[str, object, Meta | None]]:
    """(name, value, bounds) of ``value`` and of each value in it, down to a depth."""
    element, bounds = _element(annotation), bounds_of(annotation)
    yield name, value, bounds
    if depth == _MAX_DEPTH:
        return
    if isinstance(element, type) and issubclass(element, msgspec.Struct) and _is_one(value, element):
        for field, inner, part in _fields(value, element):
            yield from _values(f"{name}.{field}" if name else field, part, inner, depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _values(f"{name}[{number}]", part, element, depth + 1)


def _is_within(number: int, bounds: Meta) -> bool:
    return (bounds.ge is None or number >= bounds.ge) and (bounds.le is None or number <= bounds.le)


def _is_one(value: object, kind: type[msgspec.Struct]) -> bool:
    """Whether ``value`` can be one ``kind`` rather than several. No struct of ours has an array as its first item."""
    if not kind.__struct_config__.array_like:
        return isinstance(value, Mapping)
    return isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (list, tuple)))


def _fields(value: Any, kind: type[msgspec.Struct]) -> Iterator[tuple[str, Any, object]]:
    """(name, annotation, value) of each field. A field that a mapping lacks is None; one that an array lacks is left
    out."""
    for number, field in enumerate(msgspec.structs.fields(kind)):
        if isinstance(value, Mapping):
            yield field.name, field.type, value.get(field.encode_name)
        elif number < len(value):
            yield field.name, field.type, value[number]


def _element(annotation: Any) -> Any:
    """The annotation inside of a tuple or an optional value. Any other annotation is returned as it is."""
    if get_origin(annotation) is Annotated:
        return annotation
    held = [argument for argument in get_args(annotation) if argument not in (NoneType, ...)]
    return _element(held[0]) if held else annotation

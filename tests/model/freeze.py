"""Turns the state of any core into one hashable value, and interns it.

What is left out of a state: floats (a timer is set or, at infinity, not: it may pass at any moment), reasons (texts
that nothing decides by), and what never changes (settings, secrets, layouts). Order in dicts and sets is left out
too: it only orders messages to different peers.
"""

from __future__ import annotations

import copyreg
import math
import pickle
from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, Final

import msgspec

SKIPPED: Final = frozenset(
    {
        "reason",
        "welcome",
        "fingerprint",
        "times",
        "secret",
        "plan",
        "_times",
        "_engine",
        "_timeouts",
        "_retries",
        "token_ids",
        "params",
        "debt",
        "incoming",
        "_on_lost",
        "_hold_s",
        "_calls",
        "owner",
    }
)


def freeze(value: Any) -> Hashable:
    """``value`` as a hashable; equal for values that behave alike."""
    if value is None or isinstance(value, (str, bytes, int, Enum)):
        return value
    if isinstance(value, float):
        return math.isinf(value)
    if isinstance(value, dict):
        return frozenset((freeze(key), freeze(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(map(freeze, value))
    if isinstance(value, (list, tuple, deque)):
        return tuple(map(freeze, value))
    if isinstance(value, msgspec.Struct):
        hash(value)
        return value
    named = [getattr(value, name) for name in _slots_of(type(value))]
    named += [item for name, item in getattr(value, "__dict__", {}).items() if name not in SKIPPED]
    return (type(value).__name__, *map(freeze, named))


def _slots_of(kind: type) -> tuple[str, ...]:
    """Names of every slot of ``kind`` that is state."""
    known = _SLOTS.get(kind)
    if known is None:
        slots = [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())]
        known = _SLOTS[kind] = tuple(name for name in slots if name not in SKIPPED)
    return known


_SLOTS: Final[dict[type, tuple[str, ...]]] = {}


def _unset() -> msgspec.UnsetType:
    return msgspec.UNSET


def _reduce_unset(_: msgspec.UnsetType) -> tuple[Callable[[], msgspec.UnsetType], tuple[()]]:
    return _unset, ()


# It names no module of its own: pickle would ask every module that any test has imported, and some import more then.
copyreg.pickle(msgspec.UnsetType, _reduce_unset)


class Store:
    """Interned parts of states: equal values have one number, and one object that stands for it."""

    def __init__(self) -> None:
        self._number_of: dict[Hashable, int] = {}
        self._pickles: list[bytes | None] = []
        self.parts: list[Any] = []
        """Never changed: ``copy`` gives one that may be."""

    def __len__(self) -> int:
        return len(self.parts)

    def intern(self, part: Any) -> int:
        """The number of ``part``, which must not change any more."""
        return self._put(freeze(part), part)

    def intern_plain(self, part: Hashable) -> int:
        """The number of ``part``, which is hashable as it is."""
        return self._put(part, part)

    def _put(self, key: Hashable, part: Any) -> int:
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = len(self.parts)
            self.parts.append(part)
            self._pickles.append(None)
        return number

    def copy(self, number: int) -> Any:
        """An own copy of a part."""
        pickled = self._pickles[number]
        if pickled is None:
            pickled = self._pickles[number] = pickle.dumps(self.parts[number], pickle.HIGHEST_PROTOCOL)
        return pickle.loads(pickled)

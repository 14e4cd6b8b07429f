"""Adds up the metrics of several processes of one router, in Prometheus' text format.

    processes that answer     all that they say
    processes that have ended what they counted, as it was read last: a counter never falls because a process has gone

Numbers of one name and the same labels are added, but for those that are no amounts: ``_LEAST``, ``_MOST``, ``_FIRST``.
Labels of a metric stand in the same order in all texts, so a line is compared as it is. During a renewal texts may come
from two releases: a metric whose labels have changed then has lines of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

_LEAST: Final = (
    "pdcluster_router_engine_up",
    "pdcluster_router_discovery_up",
    "pdcluster_router_tls_certificate_expiry_seconds",
)
"""A process that does not reach an engine shows it; the first certificate that expires counts."""
_MOST: Final = ("pdcluster_router_engine_ejected", "pdcluster_router_token_keys_age_seconds")
"""Each process ejects engines for itself, and reads keys for itself: the oldest ones count."""
_FIRST: Final = "pdcluster_router_engines"
"""Each process knows all engines, and may find one in another state than the others do."""
_CREATED: Final = "_created"
_COUNTED: Final = frozenset(("counter", "histogram", "summary"))


@dataclass(slots=True)
class _Family:
    """One metric: the lines above its numbers, and its numbers by name and labels."""

    head: list[str] = field(default_factory=list)
    kind: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def summed(running: Iterable[str], ended: Iterable[str] = ()) -> str:
    """The metrics of ``running`` and the counts of ``ended``, in the text format."""
    families: dict[str, _Family] = {}
    for text in running:
        _add(families, text, counts_only=False)
    for text in ended:
        _add(families, text, counts_only=True)
    return "".join(line for family in families.values() for line in _lines(family))


def counts_in(texts: Iterable[str]) -> str:
    """The counts in ``texts``, as one text of a process that has ended."""
    return summed((), texts)


def _add(families: dict[str, _Family], text: str, *, counts_only: bool) -> None:
    family, is_new, is_wanted = _Family(), False, False
    for line in text.split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            is_new = name not in families
            family = _Family(head=[line]) if is_new else families[name]
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            is_wanted = (kind in _COUNTED or not counts_only) and (is_new or name != _FIRST)
            if is_new and is_wanted:
                family.head.append(line)
                family.kind = kind
                families[name] = family
        elif is_wanted and line and not line.startswith("#"):
            key, _, number = line.rpartition(" ")
            _merge(family.numbers, key, float(number))


def _merge(numbers: dict[str, float], key: str, number: float) -> None:
    known = numbers.get(key)
    numbers[key] = number if known is None else _joined(key.partition("{")[0])(known, number)


def _joined(name: str) -> Callable[[float, float], float]:
    if name in _LEAST or name.endswith(_CREATED):
        return min
    return max if name in _MOST else _sum


def _sum(one: float, other: float) -> float:
    return one + other


def _lines(family: _Family) -> Iterator[str]:
    yield from (f"{line}\n" for line in family.head)
    yield from (f"{key} {number!r}\n" for key, number in family.numbers.items())

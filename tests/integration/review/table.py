"""One row for each finding of the router's review of 22 November 2026: its name, what is sent, what must come of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

NAMES: Final = (
    *(f"H{number}" for number in range(1, 7)),
    *(f"M{number}" for number in range(7, 15)),
    *(f"L{number}" for number in range(1, 12)),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """``check`` starts a router process of its own, sends, and raises AssertionError."""

    sent: str
    must: str
    check: Callable[[], Awaitable[None]]


TABLE: Final[dict[str, Finding]] = {}


def finding(name: str, *, sent: str, must: str) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """What it decorates becomes the row ``name``."""

    def add(check: Callable[[], Awaitable[None]]) -> None:
        assert name not in TABLE
        TABLE[name] = Finding(sent, must, check)

    return add

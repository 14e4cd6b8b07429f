"""``GET /pdcluster/pool`` on a router's internal port: the engines as this router sees them, its requests and failures.

For people and tests; the document of the status page has it too. A reader ignores fields that it does not know.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

POOL_PATH: Final = "/pdcluster/pool"


class DiscoveryStatus(msgspec.Struct, frozen=True):
    """How the router finds engines. Where flags name the engines, only ``kind`` is set."""

    kind: str
    is_current: bool | UnsetType = UNSET
    """Whether changes reach the router."""
    reason: str | UnsetType = UNSET
    """Why changes do not reach the router; empty: they do."""
    unusable_slices: list[str] | UnsetType = UNSET


class Requests(msgspec.Struct, frozen=True):
    """The requests that this router has.

    ``queued`` and ``backlog_tokens`` are by the role whose engines will compute the prompts.
    """

    running: int
    queued: dict[str, int]
    backlog_tokens: dict[str, int]


class RecentFailures(msgspec.Struct, frozen=True):
    """Failures of the last ``seconds``, by their kind in ``pdcluster_router_failures_total``."""

    seconds: float
    kinds: dict[str, int]


class RevisionRow(msgspec.Struct, frozen=True):
    """One revision. ``serving``: its serving engines, by role. ``serves``: whether it gets new requests."""

    revision: str
    serving: dict[str, int]
    serves: bool


class EngineRow(msgspec.Struct, frozen=True):
    """One engine. Times are in seconds."""

    name: str
    role: str
    url: str
    pod: str
    revision: str
    state: str
    healthy: bool
    circuit: str
    ejected_s: float
    """Until it may be asked again; 0: it may be asked."""
    running: int
    outstanding_tokens: int
    slow_start_s: float = 0.0
    """Until its slow start is over; 0: it is over."""
    ejections: int = 0
    """How often it was ejected since the router has known it."""
    last_failure: str = ""
    """Kind and reason of the last failure there; empty: none is known."""
    last_failure_s: float | None = None
    """Seconds since that failure."""


class PoolPage(msgspec.Struct, frozen=True):
    """The whole page."""

    discovery: DiscoveryStatus
    policy: str
    requests: Requests
    failures: RecentFailures
    revisions: list[RevisionRow]
    engines: list[EngineRow]
    ended: dict[str, int] = {}
    """Requests that have ended since the router's start, by their outcome in ``pdcluster_router_requests_total``."""

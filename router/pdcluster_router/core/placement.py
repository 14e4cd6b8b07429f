"""Which engine takes the next request: who may at all, best first, and whom of them the policy takes.

Engines of one revision only are ever paired: decode is chosen among revisions that have both roles, prefill among
the engines of decode's revision. Who may is worked out when the pool changes, never for a request.
Decides from states and counts alone; a policy sees loads and names one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pdcluster_protocol.labels import Role
from pdcluster_router.core.membership import State

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What one engine has to do, as far as this router knows."""

    outstanding_tokens: int
    """Tokens of requests that were placed there and have not ended."""
    num_placed: int
    """Requests placed there since the router started."""


class Policy(Protocol):
    def choose(self, loads: Sequence[Load]) -> int:
        """The index of the engine to take. ``loads`` has at least one."""
        ...


class LeastTokens:
    """The engine with the least outstanding tokens; between equals the one that got fewer requests."""

    def choose(self, loads: Sequence[Load]) -> int:
        return min(range(len(loads)), key=lambda index: (loads[index].outstanding_tokens, loads[index].num_placed))


class Standing(Protocol):
    """What counts of an engine."""

    @property
    def role(self) -> Role: ...
    @property
    def revision(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def is_healthy(self) -> bool:
        """Whether it answered its last probe."""
        ...


S = TypeVar("S", bound=Standing)


def decode_tiers(engines: Sequence[S]) -> tuple[list[S], ...]:
    """Decode engines that may get new work, best first. A later tier counts when none of an earlier one is left.

    An engine that fails its probes is still better than no engine: the connection itself decides. But a revision
    without a serving engine of each role gets nothing.
    """
    serving = _serving(engines)
    revisions = serving_revisions(serving)
    healthy_revisions = serving_revisions(engine for engine in serving if engine.is_healthy)
    decodes = [engine for engine in serving if engine.role is Role.DECODE and engine.revision in revisions]
    healthy_decodes = [engine for engine in decodes if engine.is_healthy]
    best = [engine for engine in healthy_decodes if engine.revision in healthy_revisions]
    return tuple(tier for tier in (best, healthy_decodes, decodes) if tier)


def prefill_tiers(engines: Sequence[S], revision: str) -> tuple[list[S], ...]:
    """Prefill engines for a request that a decode engine of ``revision`` has, best first.

    The last tier are engines that terminate: the request has begun, and without them it could only be computed again.
    """
    ours = [engine for engine in engines if engine.role is Role.PREFILL and engine.revision == revision]
    serving = _serving(ours)
    healthy = [engine for engine in serving if engine.is_healthy]
    finishing = [engine for engine in ours if engine.state is State.FINISHING]
    return tuple(tier for tier in (healthy, serving, finishing) if tier)


def usable_prefills(engines: Sequence[S]) -> list[S]:
    """The prefill engines that new requests can count on: serving, healthy, and with a decode engine to push to."""
    serving = _serving(engines)
    revisions = serving_revisions(serving)
    prefills = [engine for engine in serving if engine.role is Role.PREFILL and engine.is_healthy]
    return [engine for engine in prefills if engine.revision in revisions]


def serving_revisions(engines: Iterable[S]) -> set[str]:
    """The revisions that have an engine of each role among ``engines``."""
    found: dict[Role, set[str]] = {role: set() for role in Role}
    for engine in engines:
        found[engine.role].add(engine.revision)
    return found[Role.PREFILL] & found[Role.DECODE]


def left_of(tiers: Iterable[Sequence[T]], excluded: Collection[T]) -> Sequence[T]:
    """Those of the first tier that are not excluded, or of the next one when all are; empty when nobody is left."""
    for tier in tiers:
        left = [engine for engine in tier if engine not in excluded] if excluded else tier
        if left:
            return left
    return ()


def _serving(engines: Iterable[S]) -> list[S]:
    return [engine for engine in engines if engine.state is State.SERVING]

"""The engines that may take the next request, best first, and the interface of a policy that chooses one of them.

Only engines of one revision are paired: decode is chosen among revisions that have both roles, prefill among the
engines of decode's revision. The engines are sorted into tiers when the pool changes, never for a request. An ejected
engine gets a request only when no healthy engine that is not ejected is left for it. Decides from states alone. The
policies are in ``policies/``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.rewrite import ClientBody
from pdcluster_router.core.engines.breaker import Breaker, Circuit
from pdcluster_router.core.engines.load import Load
from pdcluster_router.core.engines.membership import EngineState


class Placeable(Protocol):
    """An engine, as far as a policy may look at it."""

    @property
    def url(self) -> str:
        """The same in every router. Engines' names are not: each router gives its own."""
        ...

    @property
    def load(self) -> Load: ...


E = TypeVar("E", bound=Placeable)
E_co = TypeVar("E_co", covariant=True)
T = TypeVar("T")


class RequestFacts(msgspec.Struct, frozen=True):
    """The facts of a request that a policy may look at when it places it."""

    path: bytes
    headers: bytes
    """Whole lines, as engines get them."""
    body: ClientBody
    client: str
    """The client's name, as in the access log; empty where the router asks for none."""
    notes: list[int | None] = []
    """The policy's own notes on this request, for its next leg. Empty at first."""
    adapter: int | None = None
    """The number of its model's name, in 32 bits, if the model is an adapter; None: it is a base model, or unknown."""


class Home(Enum):
    """The kind of engine to which a policy that knows homes has sent a request."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and each request is counted.

    FIRST = "first"
    """The first home of the request's conversation."""
    NEXT = "next"
    """Another home: those before it were full."""
    FULL = "full"
    """The engine with the least to do: all homes of the conversation were full."""
    NONE = "none"
    """The engine with the least to do: the request belongs to no conversation."""


Tally: TypeAlias = dict[Home, int]
"""How many requests went to each kind of engine. The policy counts in it, its owner reads it."""


def new_tally() -> Tally:
    return dict.fromkeys(Home, 0)


class Chooser(Protocol[E_co]):
    """Chooses one of certain engines for a request."""

    def __call__(self, request: RequestFacts, /, *, now: float, chance: Callable[[], float]) -> E_co:
        """One of the engines. ``chance``: returns a new number in [0, 1) with each call."""
        ...


class Policy(Protocol):
    """A function that makes choosers. A protocol, and no ``Callable``, because it takes engines of any type."""

    def __call__(self, engines: Sequence[E], tally: Tally | None = None, /) -> Chooser[E]:
        """The chooser among ``engines``, of which there is at least one. Called when they change, and for a request
        that is tried again.

        ``tally``: counts its choices, if the policy knows homes. None: they are not counted.
        """
        ...


class Standing(Protocol):
    """The facts of an engine that decide whether it may get work."""

    @property
    def role(self) -> Role: ...
    @property
    def revision(self) -> str: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def is_healthy(self) -> bool:
        """Whether it answered its last probe with 200."""
        ...

    @property
    def breaker(self) -> Breaker: ...


S = TypeVar("S", bound=Standing)


def decode_tiers(engines: Sequence[S]) -> tuple[list[S], ...]:
    """Decode engines that may get new work, best first. A later tier is used when no engine of an earlier one is left.

    An engine that fails its probes, is ejected, or is not ready any more is still better than no engine: the last tiers
    have them, for a request that has failed on every better one. The router's own probe is newer than the kubelet's. So
    a pair that is not ready and healthy comes before one that is ready and not healthy. But a revision gets nothing
    without an engine of each role that is, or was, ready.
    """
    decodes = _paired_decodes(_serving(engines))
    once_ready = _paired_decodes(_once_ready(engines))
    well = _well(engines)
    best = _paired_decodes(_serving(well))
    answering = _paired_decodes(_once_ready(well))
    healthy = [engine for engine in once_ready if engine.is_healthy]
    tiers = (best, answering, healthy, decodes)
    return tuple(tier for tier in (*map(usable, tiers), decodes, once_ready) if tier)


def unpaired_tiers(engines: Sequence[S]) -> tuple[list[S], ...]:
    """Decode engines for requests that need no prefill engine, best first. As ``decode_tiers``, but a revision needs no
    prefill engine to get work."""
    decodes = [engine for engine in engines if engine.role is Role.DECODE]
    serving, once_ready = _serving(decodes), _once_ready(decodes)
    well = _well(decodes)
    healthy = [engine for engine in once_ready if engine.is_healthy]
    tiers = (_serving(well), _once_ready(well), healthy, serving)
    return tuple(tier for tier in (*map(usable, tiers), serving, once_ready) if tier)


def prefill_tiers(engines: Sequence[S], revision: str) -> tuple[list[S], ...]:
    """Prefill engines for a request that a decode engine of ``revision`` has, best first.

    Engines that terminate come behind those that answer and may be asked: without them decode would have to compute the
    prompt of this request. Those that are not ready any more come as in ``decode_tiers``.
    """
    ours = [engine for engine in engines if engine.role is Role.PREFILL and engine.revision == revision]
    serving, once_ready = _serving(ours), _once_ready(ours)
    well = _well(ours)
    answering = [engine for engine in once_ready if engine.is_healthy]
    finishing = [engine for engine in ours if engine.state is EngineState.FINISHING]
    tiers = (_serving(well), _once_ready(well), usable(answering), _well(finishing), usable(serving), serving)
    return tuple(tier for tier in (*tiers, once_ready, finishing) if tier)


def usable_prefills(engines: Sequence[S]) -> list[S]:
    """The prefill engines that new requests can count on: healthy, and of the revisions of the best pairs there are.

    The pairs come in the order of ``decode_tiers``.
    """
    well = _well(engines)
    kinds = (_serving(well), _once_ready(well), _serving(engines), _once_ready(engines))
    used = next((these for these in kinds if serving_revisions(these)), [])
    revisions = serving_revisions(used)
    prefills = [engine for engine in used if engine.role is Role.PREFILL and engine.is_healthy]
    return usable([engine for engine in prefills if engine.revision in revisions])


def usable(engines: Sequence[S]) -> list[S]:
    """The engines that are not ejected; if all are ejected, the one that may be asked again first."""
    left = [engine for engine in engines if not engine.breaker.is_ejected]
    return left or sorted(engines, key=lambda engine: engine.breaker.until)[:1]


def serving_revisions(engines: Iterable[S]) -> set[str]:
    """The revisions that have an engine of each role among ``engines``."""
    found: dict[Role, set[str]] = {role: set() for role in Role}
    for engine in engines:
        found[engine.role].add(engine.revision)
    return found[Role.PREFILL] & found[Role.DECODE]


def _paired_decodes(engines: Sequence[S]) -> list[S]:
    revisions = serving_revisions(engines)
    return [engine for engine in engines if engine.role is Role.DECODE and engine.revision in revisions]


def left_of(tiers: Iterable[Sequence[T]], excluded: Collection[T]) -> Sequence[T]:
    """The engines that are not ``excluded``, of the first tier that has such engines; empty: no tier has any."""
    for tier in tiers:
        left = [engine for engine in tier if engine not in excluded] if excluded else tier
        if left:
            return left
    return ()


def proven(engines: Sequence[S]) -> Sequence[S]:
    """The engines whose circuit is closed and whose last request did not fail. If there are none, those whose circuit
    is closed; if there are none either, all. A request that has failed once shall not be the one that tries an ejected
    engine out.
    """
    closed = [engine for engine in engines if engine.breaker.circuit is Circuit.CLOSED]
    return [engine for engine in closed if not engine.breaker.has_just_failed] or closed or engines


def _serving(engines: Iterable[S]) -> list[S]:
    return [engine for engine in engines if engine.state is EngineState.SERVING]


def _once_ready(engines: Iterable[S]) -> list[S]:
    return [engine for engine in engines if engine.state.was_ready]


def _well(engines: Iterable[S]) -> list[S]:
    return [engine for engine in engines if engine.is_healthy and not engine.breaker.is_ejected]

"""The engines that this router knows now: they come, change and go while requests run.

``core/engines/membership.py`` decides what happens to each; this file carries it out. ``candidates.py`` places requests
among them. A request holds the engine that it was given, also when the engine is removed here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

from pdcluster_protocol.labels import Role
from pdcluster_protocol.metaserver import Action
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.engines.breaker import Circuit
from pdcluster_router.core.engines.catalog import group_again, lists_of
from pdcluster_router.core.engines.listing import Listing
from pdcluster_router.core.engines.membership import (
    Add,
    EngineKey,
    EngineState,
    KnownEngine,
    Member,
    NewState,
    Remove,
    RosterChange,
    plan,
)
from pdcluster_router.core.engines.placement import Policy, RequestFacts, Tally, new_tally
from pdcluster_router.core.requests.pairing import Retries
from pdcluster_router.engines.candidates import Candidates, Heir
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.trust import EngineTrust
from pdcluster_router.http.connections import IdleConnections, PoolLimits
from pdcluster_router.processes.shared_loads import SharedLoad, SharedLoads

logger = logging.getLogger(__name__)

_MIN_TICK_S: Final = 0.01
"""The least delay of the timer. Timers may fire a little early, and without it the loop would spin until the time."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The engines that may serve a request, and how often it is tried. The same for all clients of one model."""

    place_decode: Callable[[RequestFacts, Collection[Engine]], Engine | None]
    """The decode engine to ask next, of those that have not failed the request; None when no engine is left."""
    place_prefill: Callable[[RequestFacts, Sequence[Engine], str], Engine | None]
    """The prefill engine to ask next, likewise. The last argument is decode's revision, which prefill must have too."""
    retries: Retries
    admissions: Mapping[Role, Admission[Any]]
    """The backlog and the queue of these engines, by the role that computes the prompt."""
    queue: str = ""
    """The base model whose queue that is; empty: the shared one."""
    wants_receipt: bool = False
    """Whether decode shall say how many tokens were pushed to it."""
    has_prefill: bool = True
    """Whether a prefill engine serves the request's model; False: decode has to compute the prompt itself."""
    engines_name: bytes = b""
    """The model's name for engines, as JSON, if the client's name is an alias of it."""
    model: str = ""
    """The model's name as engines list it; empty: none does."""
    adapter: int | None = None
    """The number of the request's adapter, the same in every process; None: it asks for a base model."""

    @property
    def on_prefill_failure(self) -> Action:
        """Decode's action when no prefill attempt is left."""
        return Action.RECOMPUTE if self.retries.recomputes else Action.FAIL


class Roster:
    """All engines of one router. Event loop only; ``close`` ends their connections."""

    def __init__(
        self,
        limits: PoolLimits,
        policy: Policy,
        on_change: Callable[[], None],
        on_ejected: Callable[[Role], None],
        now: Callable[[], float],
        trust: EngineTrust | None = None,
        shared: SharedLoads | None = None,
    ) -> None:
        """``on_change``: called when the engines that may get work are worked out again. ``on_ejected``: called when an
        engine of this role is ejected. ``now``: monotonic seconds. ``trust``: in engines with TLS.
        ``shared``: with the router's other processes; None: there are none."""
        self.engines: dict[Role, list[Engine]] = {role: [] for role in Role}
        self.members: tuple[Member, ...] = ()
        """The newest list of discovery."""
        self.policy = policy
        """Chooses among the engines that may get a request."""
        self.num_unknown = 0
        """Requests for a model that no engine serves: the engines' lists may be old."""
        self.tallies: dict[Role, Tally] = {role: new_tally() for role in Role}
        """Where the policy has sent requests at their first try on each leg."""
        self._limits = limits
        self._idle_connections = IdleConnections()
        self._on_change = on_change
        self._on_ejected = on_ejected
        self._now = now
        self._trust = trust
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._by_key: dict[EngineKey, Engine] = {}
        self._numbers = {role: count() for role in Role}
        self.whole = Candidates(policy, self.tallies, now)
        """All engines, for requests that any of them may get. Another object once engines serve other models."""
        self._candidates: WeakValueDictionary[tuple[Engine, ...], Candidates] = WeakValueDictionary()
        """Candidates for requests that only some of the engines may get, by these engines."""
        self._is_settling = False
        self.num_sorts = 0
        """How often the engines were worked out again."""

    def all_engines(self) -> list[Engine]:
        return [engine for engines in self.engines.values() for engine in engines]

    def update(self, members: Iterable[Member]) -> None:
        """``members`` are all engines that there are."""
        self.members = tuple(members)
        self._settle()

    def refresh(self) -> None:
        """The engines that may get work are worked out again. Call it when an engine's health has changed."""
        self.num_sorts += 1
        self.whole.sort(self.all_engines())
        self._on_change()  # The objects that keep candidates let go of them.
        for engines, candidates in list(self._candidates.items()):
            candidates.sort(engines)

    def candidates_of(self, engines: tuple[Engine, ...]) -> Candidates:
        """Places requests that only ``engines`` may get. Kept up to date for as long as any object refers to it."""
        candidates = self._candidates.get(engines)
        if candidates is None:
            candidates = self._candidates[engines] = Candidates(self.policy, self.tallies, self._now)
            candidates.sort(engines)
        return candidates

    def listed(self, engine: Engine, listing: Listing | None) -> None:
        """``engine`` has said which models it serves; None: it has not. Equal lists are kept once."""
        then = lists_of(self.all_engines())
        before, new = engine.listing, next((known for known in then if known == listing), listing)
        if new is before:
            return
        some = [(candidates, lists_of(engines)) for engines, candidates in self._candidates.items()]
        engine.listing = new
        if before is not None or len(lists_of(self.all_engines())) > 1:
            for candidates, theirs in some:
                candidates.renewed(_Heirs(self, theirs).of)
            self._candidates.clear()
            self.whole = self.whole.renewed(_Heirs(self, then).of)
        self.refresh()

    def limit(self, limits: PoolLimits) -> None:
        """``limits`` hold from now on for the connections to each engine."""
        self._limits = limits
        for engine in self.all_engines():
            engine.pool.limits = limits

    def use(self, policy: Policy) -> None:
        """``policy`` chooses from now on."""
        self.policy = policy
        for candidates in (self.whole, *self._candidates.values()):
            candidates.use(policy)
        self.refresh()

    @property
    def num_usable_decodes(self) -> int:
        """The decode engines that new requests are placed among."""
        return len(self.whole.decode_tiers[0]) if self.whole.decode_tiers else 0

    # The engines that any request may get, as they are when it is placed.

    def place_decode(self, request: RequestFacts, tried: Collection[Engine]) -> Engine | None:
        return self.whole.place_decode(request, tried)

    def place_unpaired(self, request: RequestFacts, tried: Collection[Engine]) -> Engine | None:
        return self.whole.place_unpaired(request, tried)

    def place_prefill(self, request: RequestFacts, tried: Sequence[Engine], revision: str) -> Engine | None:
        return self.whole.place_prefill(request, tried, revision)

    def other_decode(self, tried: Collection[Engine]) -> Engine | None:
        return self.whole.other_decode(tried)

    # Callbacks of engines, and the timer of their breakers.

    def _became_idle(self) -> None:
        """Looks in the loop's next turn whether an engine is to be removed, not within the call that ends its last
        request."""
        if not self._is_settling:
            self._is_settling = True
            self._loop.call_soon(self._settle)

    def _breaker_changed(self, engine: Engine) -> None:
        _log_breaker(engine, self._now())
        if engine.breaker.circuit is Circuit.EJECTED:
            self._on_ejected(engine.role)
        self.refresh()
        self._set_timer()

    async def close(self) -> None:
        """No connection and no task is left."""
        if self._timer is not None:
            self._timer.cancel()
        for engine in self.all_engines():
            await engine.close()

    def _set_timer(self) -> None:
        """Sets one timer for all breakers, to the time at which the next engine may be asked again."""
        if self._timer is not None:
            self._timer.cancel()
        waiting = [engine.breaker.until for engine in self.all_engines() if engine.breaker.is_ejected]
        delay_s = min(waiting, default=0.0) - self._now()
        self._timer = self._loop.call_later(max(_MIN_TICK_S, delay_s), self._wake) if waiting else None

    def _wake(self) -> None:
        self._timer = None
        now = self._now()
        woken = [engine for engine in self.all_engines() if engine.breaker.wake(now=now)]
        for engine in woken:
            _log_breaker(engine, now)
        if woken:
            self.refresh()
        self._set_timer()

    def _settle(self) -> None:
        self._is_settling = False
        known = {key: KnownEngine(engine.state, engine.is_busy) for key, engine in self._by_key.items()}
        commands = plan(known, self.members)
        for command in commands:
            self._carry_out(command)
        if commands:
            self.refresh()

    def _carry_out(self, command: RosterChange) -> None:
        match command:
            case Add(member):
                self._add(member)
            case NewState(key, state):
                self._by_key[key].change(state)
                _log(_NEWS.get(state, "draining"), self._by_key[key])
            case Remove(key):
                self._remove(self._by_key.pop(key))

    def _add(self, member: Member) -> None:
        shared = None if self._shared is None else self._shared.enter(member.role, repr(member.key))
        engine = Engine(
            self._name(member.role, shared),
            member,
            self._limits,
            self._idle_connections,
            on_idle=self._became_idle,
            on_breaker=self._breaker_changed,
            now=self._now,
            trust=self._trust,
            shared=shared,
        )
        self._by_key[member.key] = engine
        self.engines[member.role].append(engine)
        _log("added", engine)

    def _name(self, role: Role, shared: SharedLoad | None) -> str:
        """The same in all processes, if the engine's load is."""
        if self._shared is None:
            return f"{role.value}-{next(self._numbers[role])}"
        if shared is None:
            return f"{role.value}-{next(self._numbers[role])}-of-{self._shared.seat}"
        return f"{role.value}-{shared.number}"

    def _remove(self, engine: Engine) -> None:
        engine.change(EngineState.LEAVING)  # A question such as for its models may still be under way.
        self.engines[engine.role].remove(engine)
        engine.leave()
        _log("removed", engine)


class _Heirs:
    """Where requests go on that came when engines said ``then``. A name is looked up once for each change."""

    def __init__(self, roster: Roster, then: Sequence[Listing]) -> None:
        self._roster = roster
        self._then = then
        self._known: dict[str, Heir | None] = {}
        self._num_sorts = roster.num_sorts

    def of(self, name: str) -> Heir | None:
        if self._num_sorts != self._roster.num_sorts:
            self._num_sorts = self._roster.num_sorts
            self._known.clear()
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> Heir | None:
        roster = self._roster
        group = group_again(name, self._then, roster.all_engines())
        if group is None:
            return None
        return Heir(roster.whole if group.is_whole else roster.candidates_of(group.engines), group.has_prefill)


_NEWS: Final = {EngineState.SERVING: "serving", EngineState.NOT_READY: "not ready any more"}
"""The log's words for an engine's new state. In any other state the engine drains."""


def _log(what: str, engine: Engine) -> None:
    logger.info(
        "engine %s role=%s engine=%s revision=%s pod=%s state=%s",
        what,
        engine.role.value,
        engine.name,
        engine.revision or "-",
        engine.pod or "-",
        engine.state.value,
    )


_BREAKER_NEWS: Final = {
    Circuit.CLOSED: "is back: it has answered",
    Circuit.EJECTED: "ejected: its requests fail",
    Circuit.HALF_OPEN: "gets one request to show how it is",
}


def _log_breaker(engine: Engine, now: float) -> None:
    """One line for each change. TRYING has none: it says only that the one request was placed."""
    circuit = engine.breaker.circuit
    if circuit is Circuit.TRYING:
        return
    level = logging.WARNING if circuit is Circuit.EJECTED else logging.INFO
    seconds = engine.breaker.until - now if circuit is Circuit.EJECTED else 0.0
    logger.log(
        level,
        "engine %s role=%s engine=%s seconds=%.0f",
        _BREAKER_NEWS[circuit],
        engine.role.value,
        engine.name,
        seconds,
    )

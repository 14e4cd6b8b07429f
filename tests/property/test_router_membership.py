"""Laws of the pool, over random interleavings of what discovery says and what requests do."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.breaker import Breaker
from pdcluster_router.core.engines.membership import (
    Add,
    EngineKey,
    EngineState,
    KnownEngine,
    Member,
    NewState,
    Remove,
    plan,
)
from pdcluster_router.core.engines.placement import decode_tiers, prefill_tiers

MEMBERS = st.builds(
    Member,
    url=st.sampled_from(["http://a:1", "http://b:1"]),
    role=st.sampled_from(Role),
    revision=st.sampled_from(["r1", "r2"]),
    uid=st.sampled_from(["u1", "u2"]),
    is_ready=st.booleans(),
    is_serving=st.booleans(),
    is_terminating=st.booleans(),
)
LISTS = st.lists(MEMBERS, max_size=6)
STEPS = st.lists(LISTS | st.just("begin") | st.just("end"), max_size=30)


@dataclass
class Has:
    """One engine of the pool, as the roster would keep it."""

    role: Role
    revision: str
    state: EngineState
    is_healthy: bool = True
    num_running: int = 0
    breaker: Breaker = field(default_factory=Breaker)


@dataclass
class Pool:
    """A roster without engines: does what the plan says, and checks each command when it comes."""

    listed: list[Member] = field(default_factory=list)
    engines: dict[EngineKey, Has] = field(default_factory=dict)
    once_ready: set[EngineKey] = field(default_factory=set)
    """Those that have been ready since they came, or came back."""

    def settle(self) -> None:
        keys = {member.key for member in self.listed}
        for command in self.plan():
            match command:
                case Add(member):
                    assert member.key not in self.engines
                    self.engines[member.key] = Has(member.role, member.revision, member.state)
                case NewState(key, state):
                    assert self.engines[key].state is not state
                    self.engines[key].state = state
                    if not state.was_ready:
                        self.once_ready.discard(key)
                case Remove(key):
                    assert key not in keys, "an engine that is listed is never forgotten"
                    assert not self.engines.pop(key).num_running, "and one that works is never cut"
                    self.once_ready.discard(key)
        self.once_ready |= {key for key, one in self.engines.items() if one.state is EngineState.SERVING}
        assert self.plan() == [], "done once, there is nothing left to do"

    def plan(self) -> list[Add | NewState | Remove]:
        return plan(
            {key: KnownEngine(one.state, one.num_running > 0) for key, one in self.engines.items()}, self.listed
        )

    def check(self) -> None:
        states = {member.key: member.state for member in self.listed}
        for key, engine in self.engines.items():
            state = states.get(key, EngineState.LEAVING)
            if state is EngineState.STARTING and key in self.once_ready:
                state = EngineState.NOT_READY
            assert engine.state is state
        assert self.engines.keys() >= states.keys()

    def begin(self) -> None:
        """A request is placed where the first choice is, decode and prefill."""
        engines = list(self.engines.values())
        for decode in [engine for tier in decode_tiers(engines)[:1] for engine in tier[:1]]:
            assert decode.state.was_ready
            decode.num_running += 1
            (prefill, *_), *_ = prefill_tiers(engines, decode.revision)
            assert prefill.state.was_ready
            assert prefill.revision == decode.revision
            if paired(engines, EngineState.SERVING):
                assert {decode.state, prefill.state} == {EngineState.SERVING}
            prefill.num_running += 1

    def end(self) -> None:
        """The requests of one engine end."""
        busy = [engine for engine in self.engines.values() if engine.num_running]
        if busy:
            busy[0].num_running = 0
            self.settle()


def paired(engines: list[Has], *states: EngineState) -> set[str]:
    """The revisions that have an engine of each role in one of these states."""
    found = {role: {one.revision for one in engines if one.role is role and one.state in states} for role in Role}
    return found[Role.PREFILL] & found[Role.DECODE]


@given(STEPS)
def test_the_pool_follows_what_is_listed_and_cuts_nobody(steps: list[list[Member] | str]) -> None:
    pool = Pool()
    for step in steps:
        if isinstance(step, list):
            pool.listed = list({member.key: member for member in step}.values())
            pool.settle()
        elif step == "begin":
            pool.begin()
        else:
            pool.end()
        pool.check()
    while any(engine.num_running for engine in pool.engines.values()):
        pool.end()
    assert pool.engines.keys() == {member.key for member in pool.listed}, "when all is quiet nothing is left over"


ENGINES = st.builds(
    Has,
    role=st.sampled_from(Role),
    revision=st.sampled_from(["r1", "r2"]),
    state=st.sampled_from(EngineState),
    is_healthy=st.booleans(),
)


@given(st.lists(ENGINES, max_size=6))
def test_an_engine_that_may_get_work_was_ready_and_has_a_partner_of_its_revision(engines: list[Has]) -> None:
    tiers = decode_tiers(engines)
    for engine in (engine for tier in tiers for engine in tier):
        assert (engine.role, engine.state.was_ready) == (Role.DECODE, True)
        partners = prefill_tiers(engines, engine.revision)
        assert partners
        assert all(one.revision == engine.revision and one.role is Role.PREFILL for tier in partners for one in tier)
    assert bool(tiers) == bool(paired(engines, EngineState.SERVING, EngineState.NOT_READY))
    if paired([engine for engine in engines if engine.is_healthy], EngineState.SERVING):
        assert {(engine.state, engine.is_healthy) for engine in tiers[0]} == {(EngineState.SERVING, True)}

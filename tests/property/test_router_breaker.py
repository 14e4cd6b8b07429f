"""Laws of breakers and placement together, over any history of outcomes and passing time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from drawn import drawn
from pdcluster_protocol.labels import Role
from pdcluster_router.core.breaker import LAST_EJECTION_S, NUM_IN_A_ROW, TRYING_S, Breaker, Circuit, Era
from pdcluster_router.core.least_tokens import least_tokens
from pdcluster_router.core.load import Load
from pdcluster_router.core.membership import EngineState
from pdcluster_router.core.placement import RequestFacts, prefill_tiers
from pdcluster_router.core.rewrite import parse_body
from property.planted import check_it_is_found

ANY_REQUEST = RequestFacts(b"", b"", parse_body(b"{}"), "")


@dataclass(eq=False)
class Engine:
    """A prefill engine, and what a request there would find."""

    breaker: Breaker
    load: Load = field(default_factory=Load)
    role: Role = Role.PREFILL
    revision: str = ""
    state: EngineState = EngineState.SERVING
    is_healthy: bool = True
    is_broken: bool = False
    running: list[Era] = field(default_factory=list)
    ejected_at: float = 0.0


class History(RuleBasedStateMachine):
    """A role of a few engines, some of which break and come back."""

    kind: ClassVar[type[Breaker]] = Breaker

    @initialize(number=st.integers(1, 4))
    def begin(self, number: int) -> None:
        self.now = 0.0
        self.engines = [Engine(self.kind()) for _ in range(number)]
        self.chance = random.Random(number).random

    @rule(index=st.integers(0, 3))
    def breaks_or_comes_back(self, index: int) -> None:
        engine = self.engines[index % len(self.engines)]
        engine.is_broken = not engine.is_broken

    @rule(index=st.integers(0, 3))
    def breaks_down(self, index: int) -> None:
        """What is placed there now fails at once; what it has is still under way."""
        engine = self.engines[index % len(self.engines)]
        engine.is_broken = True
        for era in [engine.breaker.era] * NUM_IN_A_ROW:
            self.fails(engine, era)

    @rule()
    def a_request_is_placed(self) -> None:
        engine = self.place()
        was_half_open = engine.breaker.circuit is Circuit.HALF_OPEN
        assert engine.breaker.take(now=self.now) is was_half_open
        engine.running.append(engine.breaker.era)

    @rule(index=st.integers(0, 3), is_begun_only=st.booleans())
    def a_request_ends(self, index: int, is_begun_only: bool) -> None:
        engine = self.engines[index % len(self.engines)]
        if not engine.running:
            return
        era = engine.running.pop(0)
        if engine.is_broken:
            self.fails(engine, era)
            return
        engine.breaker.began(era)
        if not is_begun_only:
            engine.breaker.succeeded(era)

    @rule()
    def a_client_leaves(self) -> None:
        for engine in self.engines:
            engine.running = engine.running[1:]

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for engine in self.engines:
            engine.breaker.wake(now=self.now)

    def fails(self, engine: Engine, era: Era) -> None:
        was, current = engine.breaker.circuit, engine.breaker.era
        if engine.breaker.failed(era, now=self.now):
            assert was is not Circuit.EJECTED
            assert era == current, "old news"
            assert 1.0 <= engine.breaker.until - self.now <= LAST_EJECTION_S
            engine.ejected_at = self.now

    def place(self) -> Engine:
        engine = least_tokens(prefill_tiers(self.engines, "")[0], ANY_REQUEST, now=self.now, chance=self.chance)
        assert not engine.breaker.is_ejected or all(one.breaker.is_ejected for one in self.engines)
        return engine

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engines"):
            return
        tiers = prefill_tiers(self.engines, "")
        assert tiers[0], "never below one"
        assert set(tiers[-1]) == set(self.engines), "who has failed everywhere else may ask any of them"
        for engine in self.engines:
            assert engine.breaker.until <= self.now + LAST_EJECTION_S, "nobody is left alone for ever"
            if engine.breaker.is_ejected:
                assert engine.breaker.until > self.now or engine.breaker.circuit is Circuit.TRYING

    def teardown(self) -> None:
        """Whatever has happened: who works again is back soon, and who does not is soon left alone."""
        if not hasattr(self, "engines"):
            return
        self.now += LAST_EJECTION_S + TRYING_S
        for engine in self.engines:
            engine.breaker.wake(now=self.now)
            engine.running = []
            assert not engine.breaker.is_ejected
            if engine.breaker.take(now=self.now) or engine.breaker.circuit is Circuit.CLOSED:
                self.is_decided(engine)

    def is_decided(self, engine: Engine) -> None:
        era = engine.breaker.era
        if engine.is_broken:
            for _ in range(NUM_IN_A_ROW):
                self.fails(engine, era)
            assert engine.breaker.circuit is Circuit.EJECTED
        else:
            engine.breaker.began(era)
            assert engine.breaker.circuit is Circuit.CLOSED


THOROUGH = settings(max_examples=drawn(100), stateful_step_count=30, deadline=None)


def test_breakers_over_any_history_keep_their_laws() -> None:
    run_state_machine_as_test(History, settings=THOROUGH)


class NeverComesBack(Breaker):
    """An engine that was ejected is never asked again."""

    def wake(self, *, now: float) -> bool:
        return False


class HearsTheOldEra(Breaker):
    """What was under way ejects it again and again."""

    def failed(self, era: Era, *, now: float) -> bool:
        return super().failed(self.era, now=now)

    def began(self, era: Era) -> bool:
        changed = super().began(self.era)
        assert not changed or era == self.era, "old news"
        return changed


class LetsEverybodyTry(Breaker):
    """Half-open for all."""

    def take(self, *, now: float) -> bool:
        return False


class GrowsWithoutEnd(Breaker):
    """The time doubles for ever."""

    def _eject(self, now: float) -> None:
        super()._eject(now)
        self._ejection_s *= 4
        self.until = now + self._ejection_s


@pytest.mark.parametrize("kind", [NeverComesBack, HearsTheOldEra, LetsEverybodyTry, GrowsWithoutEnd])
def test_a_bug_that_is_put_in_on_purpose_is_found(kind: type[Breaker]) -> None:
    check_it_is_found(History, kind, num_histories=6_000, num_steps=30)

"""Laws of breakers and placement together, over any history of outcomes and passing time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from drawn import drawn
from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.breaker import LAST_EJECTION_S, NUM_IN_A_ROW, TRYING_S, Breaker, Circuit, Era
from pdcluster_router.core.engines.load import SLOW_START_S, Load
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.placement import RequestFacts, prefill_tiers
from pdcluster_router.core.engines.policies.least_tokens import FEW, least_tokens
from property.planted import check_it_is_found

TOKENS: Final = 100
ANY_REQUEST = RequestFacts(b"", b"", parse_body(b"{}"), "")


@dataclass(eq=False)
class Engine:
    """A prefill engine, and what a request there would find."""

    breaker: Breaker
    load: Load = field(default_factory=Load)
    role: Role = Role.PREFILL
    url: str = ""
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
        engine.load.outstanding_tokens += TOKENS

    @rule(index=st.integers(0, 3), is_begun_only=st.booleans())
    def a_request_ends(self, index: int, is_begun_only: bool) -> None:
        engine = self.engines[index % len(self.engines)]
        if not engine.running:
            return
        era = engine.running.pop(0)
        engine.load.outstanding_tokens -= TOKENS
        if engine.is_broken:
            self.fails(engine, era)
            return
        if engine.breaker.began(era):
            engine.load.start_slowly(now=self.now)
        if not is_begun_only:
            engine.breaker.succeeded(era)

    @rule()
    def a_client_leaves(self) -> None:
        for engine in self.engines:
            engine.load.outstanding_tokens -= TOKENS * len(engine.running[:1])
            engine.running = engine.running[1:]

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for engine in self.engines:
            engine.breaker.wake(now=self.now)

    def fails(self, engine: Engine, era: Era) -> None:
        was, current = engine.breaker.circuit, engine.breaker.era
        engine.load.add_failed(TOKENS, now=self.now)
        if engine.breaker.failed(era, now=self.now):
            assert was is not Circuit.EJECTED
            assert era == current, "old news"
            assert 1.0 <= engine.breaker.until - self.now <= LAST_EJECTION_S
            engine.ejected_at = self.now

    def place(self) -> Engine:
        engine = least_tokens(prefill_tiers(self.engines, "")[0])(ANY_REQUEST, now=self.now, chance=self.chance)
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
            counted = [engine.load.tokens(now=self.now + passed_s) for passed_s in (0.0, 1.0, SLOW_START_S + 60.0)]
            assert counted == sorted(counted, reverse=True), "what is over counts less and less"
            assert engine.load.outstanding_tokens <= counted[-1] < engine.load.outstanding_tokens + 1

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


@pytest.mark.long
@pytest.mark.parametrize("kind", [NeverComesBack, HearsTheOldEra, LetsEverybodyTry, GrowsWithoutEnd])
def test_a_bug_that_is_put_in_on_purpose_is_found(kind: type[Breaker]) -> None:
    check_it_is_found(History, kind, num_histories=6_000, num_steps=30)


@settings(max_examples=drawn(50), deadline=None)
@given(number=st.integers(2, 5), seed=st.integers(0, 99))
def test_an_engine_that_is_back_takes_a_tenth_of_what_others_have_and_in_ten_seconds_as_much(
    number: int, seed: int
) -> None:
    """Each request takes a second; as many run as keep the others at about 40 each."""
    engines = [Engine(Breaker()) for _ in range(number)]
    back, others = engines[0], engines[1:]
    back.load.start_slowly(now=0.0)
    running: deque[tuple[float, Engine]] = deque()
    chance = random.Random(seed).random
    for tick in range(40 * (number - 1) * int(SLOW_START_S + 2)):
        now = tick / (40 * (number - 1))
        while running and running[0][0] <= now:
            running.popleft()[1].load.outstanding_tokens -= TOKENS
        engine = least_tokens(engines)(ANY_REQUEST, now=now, chance=chance)
        engine.load.outstanding_tokens += TOKENS
        running.append((now + 1.0, engine))
        most = max(other.load.outstanding_tokens for other in others)
        if now == 1.0:
            assert back.load.outstanding_tokens <= 0.3 * most, "it is slow at first"
        elif now > SLOW_START_S + 1.0 and number <= FEW:
            assert back.load.outstanding_tokens >= 0.9 * most, "and then like the others"

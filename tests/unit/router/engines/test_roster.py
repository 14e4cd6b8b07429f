"""When engines that were left alone are asked again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from fakes.router import until
from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.breaker import FIRST_EJECTION_S, LAST_EJECTION_S, NUM_IN_A_ROW, Circuit
from pdcluster_router.core.engines.load import FIRST_PART, SLOW_START_S
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.outage import Sign
from pdcluster_router.core.engines.placement import Chooser, E, RequestFacts, Tally
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Roster
from pdcluster_router.http.connections import PoolLimits

pytestmark = pytest.mark.anyio


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def eject(engine: Engine) -> None:
    for _ in range(NUM_IN_A_ROW):
        engine.failed(engine.breaker.era)
    assert engine.breaker.circuit is Circuit.EJECTED


async def test_each_of_two_that_are_left_alone_is_asked_again_when_its_own_time_is_over() -> None:
    clock = Clock()
    roster = Roster(PoolLimits(4, 1.0, 1.0), least_tokens, lambda: None, lambda _: None, clock)
    roster.update([Member(f"http://127.0.0.1:{port}", Role.DECODE) for port in (1, 2)])
    first, second = roster.all_engines()
    eject(first)
    clock.now = FIRST_EJECTION_S - 0.01
    eject(second)
    clock.now += FIRST_EJECTION_S - 0.01
    await until(lambda: first.breaker.circuit is Circuit.HALF_OPEN)
    assert second.breaker.circuit is Circuit.EJECTED
    clock.now += 0.01
    await until(lambda: second.breaker.circuit is Circuit.HALF_OPEN)
    await roster.close()


async def test_who_is_left_alone_for_long_does_not_keep_another_from_being_asked_again() -> None:
    clock = Clock()
    roster = Roster(PoolLimits(4, 1.0, 1.0), least_tokens, lambda: None, lambda _: None, clock)
    roster.update([Member(f"http://127.0.0.1:{port}", Role.DECODE) for port in (1, 2)])
    first, second = roster.all_engines()
    eject(first)
    clock.now = FIRST_EJECTION_S
    eject(second)
    while second.breaker.until < clock.now + LAST_EJECTION_S:
        second.breaker.wake(now=second.breaker.until)
        second.failed(second.breaker.era)
    await until(lambda: first.breaker.circuit is Circuit.HALF_OPEN, LAST_EJECTION_S / 2)
    assert second.breaker.circuit is Circuit.EJECTED
    await roster.close()


async def test_an_engine_that_is_back_starts_slowly_after_its_probes_and_after_it_was_to_end() -> None:
    clock = Clock(1000.0)
    roster = Roster(PoolLimits(4, 1.0, 1.0), least_tokens, lambda: None, lambda _: None, clock)
    member = Member("http://127.0.0.1:1", Role.DECODE)
    roster.update([member])
    (engine,) = roster.all_engines()

    def weight() -> float:
        engine.load.outstanding_tokens = 100
        return engine.load.tokens(now=clock.now) / 100

    def is_silent_for_a_probe() -> None:
        for sign in (Sign.SILENT, Sign.WELL):
            engine.found(sign, most_s=3.0)

    def is_to_end_and_is_not() -> None:
        for is_terminating in (True, False):
            roster.update([replace(member, is_terminating=is_terminating)])

    for come_back in (is_silent_for_a_probe, is_to_end_and_is_not):
        engine.take(1)  # Else it is removed once it is to end.
        clock.now += SLOW_START_S
        assert weight() == 1
        come_back()
        assert weight() == pytest.approx(1 / FIRST_PART)
        clock.now += SLOW_START_S / 2
        engine.found(Sign.WELL, most_s=3.0)
        assert 1 < weight() < 1 / FIRST_PART, "it was well before: that is no news"
        clock.now += SLOW_START_S / 2
    await roster.close()


async def test_an_ejected_engine_that_answers_again_is_back_and_starts_slowly() -> None:
    clock = Clock(1000.0)
    roster = Roster(PoolLimits(4, 1.0, 1.0), least_tokens, lambda: None, lambda _: None, clock)
    roster.update([Member("http://127.0.0.1:1", Role.DECODE)])
    (engine,) = roster.all_engines()
    eject(engine)
    clock.now += FIRST_EJECTION_S
    await until(lambda: engine.breaker.circuit is Circuit.HALF_OPEN)
    engine.began(engine.take(100))
    assert engine.breaker.circuit is Circuit.CLOSED
    assert engine.load.tokens(now=clock.now) == pytest.approx(100 / FIRST_PART)
    await roster.close()


async def test_a_policy_is_asked_when_its_engines_change_and_only_then() -> None:
    asked: list[int] = []

    def policy(engines: Sequence[E], tally: Tally | None = None, /) -> Chooser[E]:
        asked.append(len(engines))
        return least_tokens(engines, tally)

    roster = Roster(PoolLimits(4, 1.0, 1.0), policy, lambda: None, lambda _: None, Clock())
    prefill = Member("http://127.0.0.1:1", Role.PREFILL)
    decodes = [Member(f"http://127.0.0.1:{port}", Role.DECODE) for port in (2, 3)]
    roster.update([prefill, *decodes])
    for engine in roster.all_engines():
        engine.found(Sign.WELL, most_s=3.0)
    roster.refresh()
    num_asked = len(asked)
    roster.refresh()
    assert len(asked) == num_asked
    first, second = roster.engines[Role.DECODE]
    request = RequestFacts(b"", b"", parse_body(b"{}"), "")
    assert roster.place_decode(request, []) in (first, second)
    assert roster.place_prefill(request, [], first.revision) in roster.engines[Role.PREFILL]
    assert len(asked) == num_asked, "no request looks at every engine"
    eject(first)
    assert roster.place_decode(request, []) is second
    roster.update([prefill, decodes[0]])
    assert roster.place_decode(request, []) is first, "it is ejected, and the only one left"
    num_asked = len(asked)
    roster.use(policy)
    assert len(asked) > num_asked, "another policy chooses from now on"
    await roster.close()

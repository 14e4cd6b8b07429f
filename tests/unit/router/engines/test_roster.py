"""When engines that were left alone are asked again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fakes.router import until
from pdcluster_protocol.labels import Role
from pdcluster_router.core.breaker import FIRST_EJECTION_S, LAST_EJECTION_S, NUM_IN_A_ROW, Circuit
from pdcluster_router.core.membership import Member
from pdcluster_router.core.policies.least_tokens import least_tokens
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

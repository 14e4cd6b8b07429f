"""Which engine learns that it failed a request, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.breaker import NUM_IN_A_ROW, Blame, Circuit, Era
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Roster
from pdcluster_router.http.connection import ResponseLost
from pdcluster_router.http.connections import PoolLimits
from pdcluster_router.requests.blame import Suspects, blame_for

pytestmark = pytest.mark.anyio

NOW: float = 5.0
TOKENS = 100


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """An engine that has failed nothing."""
    roster = Roster(PoolLimits(1, 1.0, 1.0), least_tokens, lambda: None, lambda _: None, lambda: NOW)
    roster.update([Member("http://10.0.0.1:8000", Role.DECODE)])
    (one,) = roster.all_engines()
    yield one
    await roster.close()


def has_failed(engine: Engine) -> bool:
    return engine.breaker.has_just_failed


@pytest.mark.parametrize(
    ("blame", "is_blamed_at_once", "tokens"),
    [(Blame.ENGINE, True, TOKENS), (Blame.PERHAPS, False, TOKENS), (Blame.NOBODY, False, 0)],
)
async def test_a_failure_weighs_on_the_engine_that_may_be_to_blame(
    engine: Engine, blame: Blame, is_blamed_at_once: bool, tokens: int
) -> None:
    Suspects().failed(engine, Era(0), TOKENS, blame)
    assert has_failed(engine) is is_blamed_at_once
    assert engine.load.tokens(now=NOW) == tokens


async def test_another_engine_that_serves_the_request_shows_who_was_to_blame_and_once(engine: Engine) -> None:
    suspects = Suspects()
    suspects.failed(engine, Era(0), TOKENS, Blame.PERHAPS)
    for _ in range(NUM_IN_A_ROW):
        suspects.accuse()
        assert has_failed(engine)
    suspects.close(num_asked=1)
    assert engine.breaker.circuit is Circuit.CLOSED


@pytest.mark.parametrize(("num_asked", "is_blamed"), [(1, True), (2, False)])
async def test_the_only_engine_that_was_asked_is_to_blame_and_of_several_that_failed_none(
    engine: Engine, num_asked: int, is_blamed: bool
) -> None:
    suspects = Suspects()
    suspects.failed(engine, Era(0), TOKENS, Blame.PERHAPS)
    suspects.close(num_asked=num_asked)
    assert has_failed(engine) is is_blamed


@pytest.mark.parametrize(
    ("lost", "blame"),
    [
        (ResponseLost("refused", is_unsent=True), Blame.ENGINE),
        (ResponseLost("hung up"), Blame.PERHAPS),
        (ResponseLost("hung up", is_stale=True), Blame.PERHAPS),
        (ResponseLost("no descriptor", is_unsent=True, is_ours=True), Blame.NOBODY),
        (ResponseLost("the client asked for it", is_ours=True), Blame.NOBODY),
    ],
)
async def test_what_was_surely_not_sent_is_the_engines_fault_at_once(lost: ResponseLost, blame: Blame) -> None:
    assert blame_for(lost) is blame

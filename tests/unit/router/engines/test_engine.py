"""What an engine is to others: well, free, and how often it has taken up a request."""

from __future__ import annotations

from typing import cast

import pytest

from fakes.quiet_world import QuietEngine, World
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.outage import Sign
from pdcluster_router.processes.shared_loads import SharedLoad

pytestmark = pytest.mark.anyio


def well() -> QuietEngine:
    engine = QuietEngine(Role.DECODE, 0, lambda: 100.0)
    engine.found(Sign.WELL, most_s=1.0)
    assert engine.is_well
    return engine


async def test_it_is_well_while_its_probes_are_good() -> None:
    engine = well()
    engine.found(Sign.SILENT, most_s=1.0)
    assert not engine.is_well


async def test_it_is_well_while_it_serves() -> None:
    engine = well()
    engine.change(EngineState.FINISHING)
    assert not engine.is_well


async def test_it_is_well_until_its_last_request_has_failed() -> None:
    engine = well()
    era = engine.take(1)
    engine.failed(era)
    assert not engine.is_well
    engine.breaker.succeeded(era)
    assert engine.is_well
    for _ in range(5):
        engine.failed(era)
    engine.breaker.succeeded(era)
    assert not engine.is_well, "it is ejected"


async def test_it_is_free_while_no_process_has_a_request_there() -> None:
    engine = well()
    assert engine.is_free
    engine.take(7)
    assert not engine.is_free
    engine.give_back(7)
    engine._shared = cast("SharedLoad", Shared())
    assert not engine.is_free


class Shared:
    """Its load in another process."""

    def tell(self, num_tokens: int) -> None: ...

    def others(self) -> int:
        return 3

    def leave(self) -> None: ...


async def test_it_takes_up_what_it_reserves_for_and_what_it_begins_to_answer() -> None:
    world = World()
    engine = world.engines[Role.DECODE][0]
    assert engine.num_taken_up == 0
    world.reserves()
    assert engine.num_taken_up == 1
    world.answers(Role.DECODE, 200, b"text/event-stream", b'data: {"choices":[]}\n\n', ends=False)
    assert engine.num_taken_up == 2


async def test_it_takes_up_what_it_says_to_prefill_by_itself() -> None:
    world = World()
    world.prefills_locally()
    assert world.engines[Role.DECODE][0].num_taken_up == 1


async def test_an_error_takes_nothing_up() -> None:
    world = World()
    world.answers(Role.DECODE, 404, b"application/json", b'{"error": {"message": "no", "code": 404}}')
    assert world.engines[Role.DECODE][0].num_taken_up == 0

"""Every engine has no load of a request that has ended, however it has ended; and the router nothing else of it.

The exchange and its legs are the real ones, and so are the engines, but nothing leaves them: what engines, decode, the
client and the clock do is played, in any order. A request that leaves load behind makes its engine look busy for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from fakes.quiet_world import PATIENT, World
from pdcluster_protocol.ids import Attempt
from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.openai_errors import stopped
from pdcluster_router.core.requests.pairing import Retries, Timeouts
from pdcluster_router.http.connection import ResponseLost
from pdcluster_router.settings.forms import EngineDialect

NO_TIME: Final = {
    "request": Timeouts(0.0, 600.0),
    "prefill": Timeouts(None, 0.0),
    "reservation": Timeouts(None, 600.0, 0.0),
    "first byte": Timeouts(None, 600.0, first_byte_s=0.0),
    "idle": Timeouts(None, 600.0, idle_s=0.0),
    "gone": Timeouts(None, 600.0, gone_s=0.0),
}
"""Timeouts of which one has passed as soon as the clock is looked at."""
TURNS: Final = 10
"""Of the event loop: enough for every timer of one request without time, one after the other."""
STREAM: Final = b"text/event-stream"
EVENT: Final = b'data: {"choices": [{"text": "a"}]}\n\n'
LAST_EVENT: Final = b"data: [DONE]\n\n"


class Move(Enum):
    """One thing that happens. ``_MOVES`` says how."""

    DECODE_BEGINS = auto()
    DECODE_ANSWERS = auto()
    DECODE_ANSWERS_WITH_AN_ERROR_EVENT = auto()
    DECODE_ANSWERS_NOTHING = auto()
    DECODE_ANSWERS_404 = auto()
    DECODE_ANSWERS_500 = auto()
    DECODE_ANSWERS_503 = auto()
    DECODE_HANGS_UP = auto()
    DECODE_CANNOT_BE_REACHED = auto()
    DECODE_HAD_HUNG_UP_BEFORE = auto()
    DECODE_RESERVES = auto()
    DECODE_PREFILLS_LOCALLY = auto()
    DECODE_LOSES_THE_ATTEMPT = auto()
    DECODE_LEAVES_THE_METASERVER = auto()
    PREFILL_ANSWERS = auto()
    PREFILL_ANSWERS_500 = auto()
    PREFILL_HANGS_UP = auto()
    PREFILL_HAD_HUNG_UP_BEFORE = auto()
    THE_CLIENT_LEAVES = auto()
    THE_ROUTER_STOPS = auto()
    A_BUG_IS_FOUND = auto()
    ENGINES_SEEM_GONE = auto()
    TIME_PASSES = auto()


_REFUSED: Final = b'{"error": {"message": "m", "type": "t", "code": 500}}'
_STALE: Final = ResponseLost("it had hung up", is_stale=True)
_MOVES: Final[dict[Move, Callable[[World], None]]] = {
    Move.DECODE_BEGINS: lambda world: world.answers(Role.DECODE, 200, STREAM, EVENT, ends=False),
    Move.DECODE_ANSWERS: lambda world: world.answers(Role.DECODE, 200, STREAM, EVENT, LAST_EVENT),
    Move.DECODE_ANSWERS_WITH_AN_ERROR_EVENT: lambda world: world.answers(
        Role.DECODE, 200, STREAM, b"data: " + _REFUSED + b"\n\n", LAST_EVENT
    ),
    Move.DECODE_ANSWERS_NOTHING: lambda world: world.answers(Role.DECODE, 200, STREAM),
    Move.DECODE_ANSWERS_404: lambda world: world.answers(Role.DECODE, 404, b"application/json", _REFUSED),
    Move.DECODE_ANSWERS_500: lambda world: world.answers(Role.DECODE, 500, b"application/json", _REFUSED),
    Move.DECODE_ANSWERS_503: lambda world: world.answers(Role.DECODE, 503, b"application/json", _REFUSED),
    Move.DECODE_HANGS_UP: lambda world: world.loses(Role.DECODE, ResponseLost("it hung up")),
    Move.DECODE_CANNOT_BE_REACHED: lambda world: world.loses(Role.DECODE, ResponseLost("refused", is_unsent=True)),
    Move.DECODE_HAD_HUNG_UP_BEFORE: lambda world: world.loses(Role.DECODE, _STALE),
    Move.DECODE_RESERVES: World.reserves,
    Move.DECODE_PREFILLS_LOCALLY: World.prefills_locally,
    Move.DECODE_LOSES_THE_ATTEMPT: lambda world: world.reserves(lost_attempt=Attempt(1), lost_reason="no bytes"),
    Move.DECODE_LEAVES_THE_METASERVER: World.hangs_up_on_the_metaserver,
    Move.PREFILL_ANSWERS: lambda world: world.answers(Role.PREFILL, 200, b"application/json", b"{}"),
    Move.PREFILL_ANSWERS_500: lambda world: world.answers(Role.PREFILL, 500, b"application/json", _REFUSED),
    Move.PREFILL_HANGS_UP: lambda world: world.loses(Role.PREFILL, ResponseLost("it hung up")),
    Move.PREFILL_HAD_HUNG_UP_BEFORE: lambda world: world.loses(Role.PREFILL, _STALE),
    Move.THE_CLIENT_LEAVES: lambda world: world.exchange.client_gone(),
    Move.THE_ROUTER_STOPS: lambda world: world.exchange.stop(stopped()),
    Move.A_BUG_IS_FOUND: lambda world: world.exchange.break_off(),
    Move.ENGINES_SEEM_GONE: World.seem_gone,
    Move.TIME_PASSES: lambda _: None,
}
ENDS: Final = (Move.THE_ROUTER_STOPS, Move.A_BUG_IS_FOUND)
"""Each of them ends whatever runs."""


async def play(world: World, moves: Sequence[Move]) -> None:
    """The moves happen one after the other, until the request has ended."""
    for move in moves:
        if not world.is_running:
            break
        _MOVES[move](world)
        for _ in range(TURNS if move is Move.TIME_PASSES else 0):
            await asyncio.sleep(0)


def after(
    moves: Sequence[Move],
    timeouts: Timeouts = PATIENT,
    retries: Retries | None = None,
    dialect: EngineDialect = EngineDialect.PDCLUSTER,
) -> None:
    """Nothing is left of a request once these moves have ended it."""

    async def run() -> None:
        world = World(timeouts, retries, dialect)
        await play(world, moves)
        assert not world.is_running, "these moves end it"
        world.require_nothing_left()
        await world.services.close()

    asyncio.run(run())


_ANSWERED: Final = (Move.DECODE_RESERVES, Move.PREFILL_ANSWERS)


@pytest.mark.parametrize(
    ("moves", "no_time"),
    [
        ((*_ANSWERED, Move.DECODE_ANSWERS), ""),
        ((*_ANSWERED, Move.DECODE_BEGINS, Move.DECODE_HANGS_UP), ""),
        ((*_ANSWERED, Move.DECODE_BEGINS, Move.THE_CLIENT_LEAVES), ""),
        ((*_ANSWERED, Move.DECODE_ANSWERS_WITH_AN_ERROR_EVENT, Move.DECODE_ANSWERS), ""),
        ((Move.DECODE_PREFILLS_LOCALLY, Move.DECODE_ANSWERS), ""),
        ((Move.DECODE_ANSWERS_404,), ""),
        ((Move.DECODE_ANSWERS_500, Move.DECODE_ANSWERS_500), ""),
        ((Move.DECODE_HANGS_UP, Move.DECODE_HANGS_UP), ""),
        ((Move.DECODE_CANNOT_BE_REACHED, Move.DECODE_CANNOT_BE_REACHED), ""),
        ((Move.DECODE_HAD_HUNG_UP_BEFORE, Move.DECODE_ANSWERS), ""),
        ((Move.DECODE_RESERVES, Move.PREFILL_HANGS_UP, Move.PREFILL_ANSWERS_500, Move.DECODE_ANSWERS), ""),
        ((Move.DECODE_RESERVES, Move.DECODE_LEAVES_THE_METASERVER, Move.DECODE_HANGS_UP, Move.DECODE_HANGS_UP), ""),
        ((Move.DECODE_RESERVES, Move.THE_CLIENT_LEAVES), ""),
        ((Move.DECODE_RESERVES, Move.THE_ROUTER_STOPS), ""),
        ((Move.DECODE_RESERVES, Move.A_BUG_IS_FOUND), ""),
        ((Move.TIME_PASSES,), "request"),
        ((Move.TIME_PASSES,), "first byte"),
        ((Move.DECODE_RESERVES, Move.TIME_PASSES, Move.DECODE_ANSWERS), "prefill"),
        ((*_ANSWERED, Move.DECODE_BEGINS, Move.TIME_PASSES), "idle"),
        ((*_ANSWERED, Move.DECODE_BEGINS, Move.TIME_PASSES, Move.ENGINES_SEEM_GONE, Move.TIME_PASSES), "gone"),
    ],
    ids=lambda moves: " then ".join(move.name.lower() for move in moves) if isinstance(moves, tuple) else moves or "-",
)
def test_each_way_in_which_a_request_ends_leaves_no_load(moves: tuple[Move, ...], no_time: str) -> None:
    after(moves, NO_TIME.get(no_time, PATIENT))


@given(
    st.tuples(st.sampled_from([(), _ANSWERED[:1], _ANSWERED]), st.lists(st.sampled_from(Move), max_size=12)),
    st.sampled_from(ENDS),
    st.sampled_from([PATIENT, *NO_TIME.values()]),
    st.builds(Retries, st.integers(1, 3), st.integers(1, 2), st.booleans()),
    st.sampled_from(EngineDialect),
)
@settings(max_examples=drawn(600), deadline=None)
def test_whatever_happens_to_a_request_it_leaves_no_load(
    moves: tuple[tuple[Move, ...], list[Move]],
    end: Move,
    timeouts: Timeouts,
    retries: Retries,
    dialect: EngineDialect,
) -> None:
    begin, then = moves
    after([*begin, *then, end], timeouts, retries, dialect)


@pytest.mark.parametrize(
    "moves",
    [
        (Move.DECODE_RESERVES, Move.PREFILL_HANGS_UP, *_ANSWERED, Move.DECODE_ANSWERS),
        (Move.DECODE_RESERVES, Move.THE_CLIENT_LEAVES),
    ],
    ids=["the whole request is sent again", "prefill goes on alone"],
)
def test_what_is_different_with_vllm_ascends_connector_leaves_no_load_either(moves: tuple[Move, ...]) -> None:
    after(moves, dialect=EngineDialect.VLLM_ASCEND)


def test_while_a_request_runs_its_engines_have_its_load() -> None:
    async def run() -> None:
        world = World()
        await play(world, [Move.DECODE_RESERVES])
        assert {name: running for name, (_, running) in world.load().items()} == {"decode-0": 1, "prefill-0": 1}
        assert all(tokens > 0 for tokens, _ in world.load().values())
        await world.services.close()

    asyncio.run(run())

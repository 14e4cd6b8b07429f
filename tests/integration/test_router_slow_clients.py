"""Clients that stop in the middle: of a body that they send, of an answer that they take, of their connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.answers import error_body, json_answer
from fakes.faults import Fault
from fakes.http import RawClient, request_bytes
from fakes.router import COMPLETIONS, PROMPT, Rig, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_router.engines.engine import MAX_FETCHED_BYTES
from pdcluster_router.front.pages import TAKEN_AT_ONCE_BYTES
from pdcluster_router.http.reading import SLICE_BYTES

pytestmark = pytest.mark.anyio

ASKED = request_bytes(COMPLETIONS, b"{}")


async def client_that_takes_nothing(rig: Rig, num_answer_bytes: int) -> RawClient:
    """It will be answered by decode's errors, which the router sends in one piece."""
    rig.decode.fault, rig.decode.raw = Fault.RAW, json_answer(400, error_body("x" * num_answer_bytes, 400))
    client = await rig.client()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
    await until(lambda: len(rig.server.server_state.connections) == 1)
    return client


async def ask(rig: Rig, client: RawClient) -> None:
    """One more request, which is answered as far as the router can."""
    await client.send(ASKED)
    await rig.decode.next_request()
    await rig.settled()


async def is_forgotten(rig: Rig) -> bool:
    await until(lambda: not rig.server.server_state.connections)
    return True


async def test_a_client_that_does_not_take_the_end_of_an_answer_is_cut_off() -> None:
    async with running_rig(idle_timeout_s=0.5) as rig:
        client = await client_that_takes_nothing(rig, 1_000_000)
        await client.send(ASKED * 64)
        assert await is_forgotten(rig)
        assert len(rig.decode.seen) < 64


async def test_a_client_that_has_taken_a_late_answer_is_not_cut_off_afterwards(rig: Rig) -> None:
    client = await client_that_takes_nothing(rig, 1_000_000)
    connection = rig.connection_of(client)
    await client.send(ASKED * 64)
    await until(lambda: connection._take_timer is not None)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # likewise
    async with asyncio.timeout(PATIENCE_S):
        assert [(await client.receive()).status for _ in range(64)] == [400] * 64
    assert connection._take_timer is None


async def ask_and_take_nothing(rig: Rig) -> RawClient:
    """A client that takes nothing of the largest answer to a question, which has come to the router."""
    client = await rig.client()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # likewise
    await client.send(request_bytes("/tokenize", b"{}"))
    return client


async def test_a_small_answer_is_one_whose_client_nothing_waits_for(rig: Rig) -> None:
    connection = rig.connection_of(await rig.served_client())
    assert connection.transport.get_write_buffer_limits()[1] == TAKEN_AT_ONCE_BYTES


async def has_taken(rig: Rig, num_bytes: int) -> None:
    await until(lambda: rig.router.room.used_bytes == num_bytes)


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "TLS"])
async def test_answers_that_clients_do_not_take_have_room_for_some_and_others_are_refused(
    *, is_secure: bool, tls_files: dict[str, Any]
) -> None:
    """An answer to a question is whole when it is written: many connections would fill the memory with them."""
    async with running_rig(max_buffered_bytes=4 * MAX_FETCHED_BYTES, **(tls_files if is_secure else {})) as rig:
        rig.decode.question_fault = Fault.MUCH
        room = rig.router.room
        clients = []
        for number in range(1, 4):
            clients.append(await ask_and_take_nothing(rig))
            await has_taken(rig, number * MAX_FETCHED_BYTES)
        refused = await (await rig.client()).post("/tokenize", b"{}")
        assert (refused.status, refused.json()["error"]["code"]) == (503, "no_room")
        assert room.used_bytes == 3 * MAX_FETCHED_BYTES
        clients[0].leave()
        await has_taken(rig, 2 * MAX_FETCHED_BYTES)
        for client in clients[1:]:
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # likewise
            assert len((await client.receive()).body) == MAX_FETCHED_BYTES
        await has_taken(rig, 0)
        assert await rig.failures() == {"no_room": 1}


async def test_an_idle_client_that_has_not_taken_its_last_answer_is_cut_off(rig: Rig) -> None:
    client = await client_that_takes_nothing(rig, 20_000)
    connection = rig.connection_of(client)
    while not connection.transport.get_write_buffer_size():
        await ask(rig, client)
    assert not connection.flow.write_paused
    connection.timeout_keep_alive_handler()  # As the loop does when the connection was idle for its time.
    assert await is_forgotten(rig)


async def test_what_is_unread_of_a_client_that_has_left_is_not_read() -> None:
    problems: list[dict[str, Any]] = []
    async with running_rig() as rig:
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        client = await rig.client()
        await until(lambda: len(rig.server.server_state.connections) == 1)
        connection = rig.connection_of(client)
        rig.feed(client, request_bytes(COMPLETIONS, b" " * (8 * SLICE_BYTES)))
        connection.abort()
        assert await is_forgotten(rig)
        assert (await (await send(rig, PROMPT)).receive()).status == 200
        await rig.settled()
        assert rig.router.room.used_bytes == 0
    assert problems == []


LATE_BODY = b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\n"


async def test_a_page_that_was_answered_before_its_request_had_ended_begins_a_pause(rig: Rig) -> None:
    client = await rig.client()
    await client.send(LATE_BODY)
    assert (await client.receive()).status == 404
    connection = rig.connection_of(client)
    rig.feed(client, b"bo")
    assert connection.idle_since is None
    rig.feed(client, b"dy")
    assert connection.idle_since is not None


async def test_a_request_right_behind_such_a_page_is_in_no_pause(rig: Rig) -> None:
    client = await rig.client()
    await client.send(LATE_BODY)
    assert (await client.receive()).status == 404
    connection = rig.connection_of(client)
    rig.feed(client, b"body" + ASKED)
    assert connection.idle_since is None

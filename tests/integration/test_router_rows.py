"""Rows of requests on one connection: what is ahead of its turn takes little memory, and so does what is not taken."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from fakes.faults import Gate
from fakes.http import RawClient, request_bytes
from fakes.router import COMPLETIONS, Rig, running_rig, until
from patience import PATIENCE_S
from pdcluster_router.front.server_protocol import MAX_BYTES_AHEAD, MAX_PIPELINED, RouterProtocol
from watched import num_watched

pytestmark = pytest.mark.anyio

HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
PAGE = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n"
BAD = request_bytes(COMPLETIONS, b"{")
GOOD = request_bytes(COMPLETIONS, b'{"prompt":"x"}')
FEW = 200
"""Requests that may be parsed ahead of their turn: what one piece brings, and those that wait before it."""
MOST_UNTAKEN_BYTES = 200_000
"""uvloop's 64 KiB, one more read of an answer, and the answers to one piece."""


def connection_of(rig: Rig, client: RawClient) -> RouterProtocol:
    port = client.writer.get_extra_info("sockname")[1]
    open_now = [each for each in rig.server.server_state.connections if isinstance(each, RouterProtocol)]
    return next(each for each in open_now if each.client and each.client[1] == port)


async def deaf_client(rig: Rig) -> tuple[RawClient, RouterProtocol]:
    """A client that reads nothing of its answers, and kernels that keep little of them."""
    client = await rig.client()
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
    await until(lambda: bool(rig.server.server_state.connections))
    connection = connection_of(rig, client)
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return client, connection


async def no_more_is_answered(rig: Rig) -> None:
    had = -1
    while had != (num := rig.server.server_state.total_requests) or not num:
        had = num
        await asyncio.sleep(0.5)


async def receive_all(client: RawClient, num: int, status: bytes) -> None:
    found, tail = 0, b""
    async with asyncio.timeout(PATIENCE_S):
        while found < num:
            tail += await client.reader.read(1 << 16)
            found += tail.count(status)
            tail = tail[-len(status) + 1 :]
    assert found == num


async def test_requests_behind_one_that_runs_are_not_parsed_before_their_turn(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client = await rig.client()
    await client.send(GOOD)
    await rig.decode.next_request()
    connection = connection_of(rig, client)
    rig.feed(client, HEALTH * 1000)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(connection.pipeline) < FEW
    rig.decode.open_gate(Gate.RESERVE)
    await receive_all(client, 1001, b"HTTP/1.1 200 OK")


async def test_a_row_of_pages_is_parsed_as_fast_as_it_is_answered(rig: Rig) -> None:
    client = await rig.client()
    connection = connection_of(rig, client)
    longest = 0
    rig.feed(client, HEALTH * 1000)
    for _ in range(300):
        await asyncio.sleep(0)
        longest = max(longest, len(connection.pipeline))
    assert longest < FEW
    await receive_all(client, 1000, b"HTTP/1.1 200 OK")


async def test_a_client_that_reads_nothing_gets_no_more_answers_until_it_does(rig: Rig) -> None:
    client, connection = await deaf_client(rig)
    client.writer.write(BAD * 3000)
    await no_more_is_answered(rig)
    assert connection.transport.get_write_buffer_size() < MOST_UNTAKEN_BYTES
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
    await receive_all(client, 3000, b"HTTP/1.1 400 Bad Request")


async def test_a_client_that_takes_its_answers_late_gets_them_in_order(rig: Rig) -> None:
    client, _ = await deaf_client(rig)
    client.writer.write((BAD + HEALTH) * 1500)
    await no_more_is_answered(rig)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
    for _ in range(1500):
        assert (await client.receive()).status == 400
        assert (await client.receive()).status == 200


@pytest.mark.parametrize("request_line", [BAD, PAGE], ids=["answers", "pages"])
async def test_a_client_that_takes_none_of_its_answers_is_cut_off(request_line: bytes) -> None:
    async with running_rig(idle_timeout_s=0.4) as rig:
        client, connection = await deaf_client(rig)
        client.writer.write(request_line * 2000)
        await until(lambda: connection not in rig.server.server_state.connections)


LEAVES: dict[str, Callable[[RawClient], None]] = {
    "in order": lambda client: client.writer.close(),
    "by a reset": lambda client: client.leave(),
}
AHEAD: dict[str, bytes] = {
    "a page": HEALTH,
    "as many requests as may wait": GOOD * MAX_PIPELINED,
    "more of a body than may be read": request_bytes(COMPLETIONS, b" " * (MAX_BYTES_AHEAD + 1)),
}
"""Each makes the router read no more of its connection before the request that runs is answered."""


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("way", LEAVES)
async def test_a_client_that_leaves_while_no_more_is_read_from_it_is_noticed_at_once(
    rig: Rig, ahead: str, way: str
) -> None:
    """The engines would work on for no client, up to the answer's end or the deadline."""
    rig.decode.close_gate(Gate.RESERVE)
    client = await rig.client()
    await client.send(GOOD)
    seen = await rig.decode.next_request()
    connection = connection_of(rig, client)
    await client.send(AHEAD[ahead])
    await until(lambda: connection.flow.read_paused)
    LEAVES[way](client)
    await asyncio.wait_for(seen.ended.wait(), PATIENCE_S)
    await until(lambda: connection not in rig.server.server_state.connections)
    assert len(rig.decode.seen) == 1


@pytest.mark.parametrize("ahead", AHEAD)
async def test_connections_that_go_on_after_a_pause_are_not_watched_any_more(rig: Rig, ahead: str) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client = await rig.client()
    await client.send(GOOD)
    await rig.decode.next_request()
    connection = connection_of(rig, client)
    await client.send(AHEAD[ahead])
    await until(lambda: connection.flow.read_paused)
    assert num_watched() == 1
    rig.decode.open_gate(Gate.RESERVE)
    await until(lambda: not connection.flow.read_paused)
    assert num_watched() == 0
    client.leave()
    await until(lambda: connection not in rig.server.server_state.connections)


async def test_a_client_that_leaves_while_pages_wait_in_a_row_is_no_error(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    client = await rig.client()
    connection = connection_of(rig, client)
    rig.feed(client, PAGE * 3)
    connection.abort()
    await until(lambda: connection not in rig.server.server_state.connections)
    await until(lambda: not rig.server.server_state.tasks)
    assert "Exception in ASGI application" not in caplog.text


async def test_a_client_that_leaves_before_the_body_of_a_page_is_whole_is_no_error(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    client = await rig.internal()
    await client.send(request_bytes("/pdcluster/verify", b"{", {"content-length": "2"}))
    await until(lambda: bool(rig.server.server_state.tasks))
    client.leave()
    await until(lambda: not rig.server.server_state.tasks)
    assert "Exception in ASGI application" not in caplog.text


async def test_a_page_whose_body_is_no_http_does_not_ask_for_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    client = await rig.internal()
    head = {"expect": "100-continue", "transfer-encoding": "chunked"}
    asked = request_bytes("/pdcluster/verify", b"zz\r\n", head).replace(b"content-length: 4\r\n", b"")
    await client.send(asked)
    assert (await client.receive()).status == 400
    await until(lambda: not rig.server.server_state.tasks)
    assert "Exception in ASGI application" not in caplog.text

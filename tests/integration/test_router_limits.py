"""What clients may take of a router: bytes, connections, engines' time. And what stays when a request has ended."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest

from fakes.faults import Fault, Gate
from fakes.http import RawClient, request_bytes
from fakes.reservations import reservation_call, reservation_of
from fakes.router import COMPLETIONS, PROMPT, Rig, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.secret import make_secret
from pdcluster_router.core.apis.rewrite import ClientBody
from pdcluster_router.core.clients.room import RoomLimit
from pdcluster_router.core.engines.load import AnswerLength
from pdcluster_router.front.server_protocol import RouterProtocol
from pdcluster_router.http.reading import LINE_OBJECTS_BYTES, MAX_HEADER_LINES, PIECE_BYTES

pytestmark = pytest.mark.anyio

MB = 1 << 20
HEAD_BYTES = PIECE_BYTES + 3 * LINE_OBJECTS_BYTES
"""What the head of ``request_bytes`` takes: it has three lines and comes in the first piece."""


def begun(num_bytes: int, *, missing: int = 1) -> bytes:
    """A body of ``num_bytes``, of which some are ``missing``."""
    return request_bytes(COMPLETIONS, b" " * (num_bytes - missing), {"content-length": str(num_bytes)})


async def code_of(client: RawClient) -> tuple[int, str]:
    answer = await asyncio.wait_for(client.receive(), PATIENCE_S)
    assert int(answer.headers["retry-after"]) >= 1
    return answer.status, answer.json()["error"]["code"]


async def test_a_body_that_finds_no_room_is_a_503_and_small_ones_still_do() -> None:
    async with running_rig(max_buffered_bytes=4 * MB, max_body_bytes=4 * MB) as rig:
        holder, late = await rig.client(), await rig.client()
        await holder.send(begun(2 * MB))
        await until(lambda: rig.router.room.used_bytes == 2 * MB - 1 + HEAD_BYTES)
        await late.send(begun(3 * MB))
        assert await code_of(late) == (503, "no_room")
        assert await rig.failures() == {"no_room": 1}
        assert (await (await rig.client()).post(COMPLETIONS, PROMPT)).status == 200
        holder.leave()
        await until(lambda: rig.router.room.used_bytes == 0)


async def test_an_engines_call_finds_room_when_clients_have_taken_theirs() -> None:
    async with running_rig(max_buffered_bytes=MB) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        client = await send(rig)
        await rig.decode.next_request()
        while rig.router.room.take(1000, RoomLimit.CLIENTS):
            pass
        rig.decode.open_gate(Gate.RESERVE)
        assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200


async def test_half_a_head_takes_room_too() -> None:
    async with running_rig(max_buffered_bytes=MB) as rig:
        clients = [await rig.client() for _ in range(20)]
        for client in clients:
            await client.send(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 60_000)
        await until(lambda: rig.router.room.used_bytes > MB // 2)
        statuses = [client.receive() for client in clients[15:]]
        assert {(await asyncio.wait_for(status, PATIENCE_S)).status for status in statuses[-1:]} == {503}
        for status in statuses[:-1]:
            status.close()
        for client in clients:
            client.leave()
        await until(lambda: rig.router.room.used_bytes == 0)


async def test_what_a_client_sends_behind_a_running_request_is_not_read() -> None:
    async with running_rig(max_body_bytes=8 * MB) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        client = await send(rig)
        await rig.decode.next_request()
        sending = asyncio.create_task(client.send(request_bytes(COMPLETIONS, b" " * (6 * MB) + b"{}") * 3))
        await until(lambda: rig.router.room.used_bytes > 60_000)
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert rig.router.room.used_bytes < MB
        rig.decode.open_gate(Gate.RESERVE)
        for _ in range(4):
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
        await sending
        await rig.settled()
        assert rig.router.room.used_bytes == 0


async def test_a_body_is_forgotten_with_its_request_and_not_when_the_collector_comes(rig: Rig) -> None:
    gc.collect()
    gc.disable()
    try:
        await (await rig.client()).post(COMPLETIONS, {"prompt": "x" * MB})
        gone = await send(rig, {"prompt": "y" * MB})
        await rig.decode.next_request()
        gone.leave()
        await rig.settled()
        large = large_bodies()
    finally:
        gc.enable()
    assert large == []


async def test_a_small_body_behind_another_request_has_the_same_limit() -> None:
    async with running_rig(max_body_bytes=1024) as rig:
        client = await rig.client()
        bodies = [json.dumps({"prompt": "x" * length}).encode() for length in (10, 1_800)]
        await client.send(b"".join(request_bytes(COMPLETIONS, body) for body in bodies))
        answers = [await asyncio.wait_for(client.receive(), PATIENCE_S) for _ in bodies]
        assert [answer.status for answer in answers] == [200, 413]


async def test_a_large_call_of_a_stranger_is_refused_before_its_json_is_read(rig: Rig) -> None:
    client = await rig.internal()
    answer = await client.post("/v1/metaserver", b"[" * 100_000)
    assert answer.status == 403
    await client.send(reservation_call(b"[" * 100_000, make_secret("of another cluster")))
    assert (await client.receive()).status == 403
    assert (await rig.reserve(b"[" * 100_000)).status == 400


async def test_a_large_reservation_of_a_living_transfer_is_taken(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client = await send(rig)
    params = (await rig.decode.next_request()).params or {}
    call = await rig.internal()
    reservation = reservation_of(params, remote_block_ids=[list(range(1, 50_000))])
    await call.send(reservation_call(reservation))
    assert (await asyncio.wait_for(call.receive(), PATIENCE_S)).json()["status"] == "ok"
    client.leave()


# Connections.


async def test_beyond_the_limit_clients_get_503_and_engines_and_probes_are_served() -> None:
    async with running_rig(max_connections=2) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        running = await send(rig)
        await rig.decode.next_request()
        idle, late, probe = [await rig.client() for _ in range(3)]
        await late.send(request_bytes(COMPLETIONS, b"{}"))
        assert await code_of(late) == (503, "too_many_connections")
        assert (await probe.get("/health")).headers["connection"] == "close"
        rig.decode.open_gate(Gate.RESERVE)  # Decode's call comes on a connection of its own.
        assert (await asyncio.wait_for(running.receive(), PATIENCE_S)).status == 200
        idle.leave()
        assert await served_in_the_end(rig)


async def test_what_follows_a_guests_probe_takes_no_answer_from_it() -> None:
    async with running_rig(max_connections=1) as rig:
        await rig.client()
        await until(lambda: rig.router.clients.num_open == 1)
        guest = await rig.client()
        probe = request_bytes("/health", b"", method="GET")
        await guest.send(probe + request_bytes(COMPLETIONS, b"{}") + probe)
        answer = await asyncio.wait_for(guest.receive(), PATIENCE_S)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await asyncio.wait_for(guest.reader.read(), PATIENCE_S) == b""
        assert rig.decode.seen == []


async def served_in_the_end(rig: Rig) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        while (await (await rig.client()).post(COMPLETIONS, PROMPT)).status != 200:
            await asyncio.sleep(0.01)
    return True


async def test_silent_clients_in_any_number_keep_no_engine_out() -> None:
    async with running_rig(max_connections=4) as rig:
        client = await rig.client()
        await until(lambda: rig.router.clients.num_open == 1)
        for _ in range(20):
            await rig.client()
        await until(lambda: rig.router.clients.num_open == 8)
        assert (await asyncio.wait_for(client.post(COMPLETIONS, PROMPT), PATIENCE_S)).status == 200


@pytest.mark.parametrize("num_bytes", [1, MB])
async def test_a_body_gives_its_room_back_when_its_answer_has_begun(rig: Rig, num_bytes: int) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await send(rig, {"prompt": "x" * num_bytes, "stream": True})
    await client.reader.readuntil(b"Hello")
    await until(lambda: rig.router.room.used_bytes == 0)
    assert large_bodies() == []
    rig.decode.open_gate(Gate.SECOND_TOKEN)
    assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")


async def test_a_body_keeps_its_room_while_prefill_may_still_be_sent_it(rig: Rig) -> None:
    rig.decode.fault = Fault.GO_ON_AFTER_PUSH
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    rig.prefill.close_gate(Gate.REPLY)
    client = await send(rig, {"prompt": "x" * MB, "stream": True})
    await client.reader.readuntil(b"Hello")
    assert rig.router.room.used_bytes > MB
    rig.prefill.open_gate(Gate.REPLY)
    await until(lambda: rig.router.room.used_bytes == 0)
    rig.decode.open_gate(Gate.SECOND_TOKEN)
    assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")


def large_bodies() -> list[ClientBody]:
    return [one for one in gc.get_objects() if type(one) is ClientBody and one.num_bytes > MB]


async def test_a_streams_kind_is_known_when_its_body_is_forgotten(rig: Rig) -> None:
    answers = rig.router.services.answers = KindsSeen()
    await (await rig.client()).post(COMPLETIONS, {"prompt": "x" * MB, "stream": True})
    await (await rig.client()).post(COMPLETIONS, {"prompt": "x" * MB})
    await rig.settled()
    assert answers.are_streams == [True, False]


class KindsSeen(AnswerLength):
    """Remembers which answers were streams."""

    def __init__(self) -> None:
        super().__init__()
        self.are_streams: list[bool] = []

    def saw(self, num_bytes: int, *, is_stream: bool) -> None:
        self.are_streams.append(is_stream)
        super().saw(num_bytes, is_stream=is_stream)


# Heads.


def with_large_head(path: str, method: str = "POST", num_bytes: int = 62_000, body: bytes = b"{}") -> bytes:
    return request_bytes(path, body if method == "POST" else b"", {"x": "y" * num_bytes}, method)


async def test_the_head_of_a_running_request_takes_room_until_it_is_answered() -> None:
    async with running_rig(max_buffered_bytes=MB) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        clients = [await rig.client() for _ in range(15)]
        for client in clients[:-1]:
            await client.send(with_large_head(COMPLETIONS))
            await rig.decode.next_request()
        assert rig.router.room.used_bytes > 14 * 62_000
        await clients[-1].send(with_large_head(COMPLETIONS))
        assert await code_of(clients[-1]) == (503, "no_room")
        assert await rig.failures() == {"no_room": 1}
        rig.decode.open_gate(Gate.RESERVE)
        for client in clients[:-1]:
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
        await until(lambda: rig.router.room.used_bytes == 0)


async def test_heads_behind_a_running_request_take_room_and_give_it_back_when_the_client_leaves(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client = await rig.client()
    await client.send(with_large_head(COMPLETIONS) * 4)
    await until(lambda: rig.router.room.used_bytes > 4 * 62_000)
    client.leave()
    await rig.settled()
    await until(lambda: rig.router.room.used_bytes == 0)


async def test_a_head_of_many_short_lines_takes_the_room_that_it_really_takes(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client, num_lines = await rig.client(), MAX_HEADER_LINES - 2
    await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * num_lines)
    await until(lambda: rig.router.room.used_bytes > num_lines * 150)
    await client.send(b"content-length: 2\r\n\r\n{}")
    await rig.decode.next_request()
    assert rig.router.room.used_bytes > num_lines * 150
    rig.decode.open_gate(Gate.RESERVE)
    assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
    await until(lambda: rig.router.room.used_bytes == 0)


@pytest.mark.parametrize(("path", "method"), [(COMPLETIONS, "POST"), ("/health", "GET")])
async def test_an_idle_connection_remembers_no_head(rig: Rig, path: str, method: str) -> None:
    client = await rig.client()
    mark = "y" * 59_999
    await client.send(request_bytes(path, b"{}" if method == "POST" else b"", {"x": mark}, method))
    assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
    await rig.settled()
    gc.collect()
    values = [value for value in everything_below(rig.connection_of(client)) if isinstance(value, bytes)]
    assert [value[:10] for value in values if mark.encode() in value] == []


def everything_below(connection: RouterProtocol) -> list[object]:
    """What the connection holds, three steps deep: its own, its requests' and their headers'."""
    found: list[object] = [connection]
    for _ in range(5):
        found = [*found, *gc.get_referents(*(one for one in found if not issubclass(type(one), (type, bytes))))]
        found = list({id(one): one for one in found}.values())
    return found


async def test_a_probe_finds_room_when_clients_have_taken_all() -> None:
    async with running_rig(max_buffered_bytes=MB) as rig:
        while rig.router.room.take(100, RoomLimit.CLIENTS):
            pass
        assert (await asyncio.wait_for((await rig.client()).get("/health"), PATIENCE_S)).status == 200
        client = await rig.client()
        await client.send(with_large_head("/v1/models", "GET"))
        assert await code_of(client) == (503, "no_room")

"""Bytes that have come and wait to be looked at are bytes of requests too: they take room, with TLS and without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import Authority
from fakes.faults import Gate
from fakes.http import RawClient
from fakes.router import Rig, raw, running_rig, send, until
from integration.tls_clients import ended
from patience import PATIENCE_S
from pdcluster_router.core.clients.room import RoomLimit
from pdcluster_router.front.server_protocol import RouterProtocol
from pdcluster_router.http import reading, records
from pdcluster_router.http.reading import SLICE_BYTES
from pdcluster_router.http.tls import TlsConnection
from watched import num_watched

pytestmark = pytest.mark.anyio

NUM_MANY = 1500
MANY = raw() * NUM_MANY
"""Behind a request that runs. Some thirty are parsed and wait, which takes 150,000 bytes of room. The others that came
in the same read of 128 KiB are not wanted before an answer. The kernel keeps few enough for an end behind them."""
MORE_THAN_HEADS = 200_000


@pytest.fixture(params=["plain", "tls"])
def files(request: pytest.FixtureRequest, authority: Authority, tmp_path: Path) -> dict[str, Any]:
    return {} if request.param == "plain" else authority.issue().write(tmp_path / "files")


async def send_many(rig: Rig) -> RawClient:
    """``MANY`` come to the router in one read. On a busy machine they would come in many."""
    rig.decode.close_gate(Gate.RESERVE)
    gathered = Gathered(RouterProtocol if rig.router.certificate is None else TlsConnection)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered.kind, "data_received", gathered.taker())
        client = await rig.client()
        await client.send(raw())
        await rig.decode.next_request()
    gathered.is_on = True
    client.writer.write(MANY)
    return client


class Gathered:
    """Keeps what connections of this kind receive until ``MANY`` are whole. A connection keeps the method that it was
    made with, so the class is itself again for all others."""

    def __init__(self, kind: type[RouterProtocol | TlsConnection]) -> None:
        self.kind = kind
        self.is_on = False
        self._kept = b""
        self._receive: Callable[..., None] = kind.data_received

    def taker(self) -> Callable[[object, bytes], None]:
        def take(connection: object, data: bytes) -> None:
            self._kept += data
            if not self.is_on or len(self._kept) >= len(MANY):
                self.is_on, whole, self._kept = False, self._kept, b""
                self._receive(connection, whole)

        return take


async def test_bytes_that_wait_take_room_until_their_client_leaves(files: dict[str, Any]) -> None:
    async with running_rig(**files) as rig:
        client = await send_many(rig)
        await until(lambda: num_watched() == 1)
        assert rig.router.room.used_bytes > MORE_THAN_HEADS
        client.leave()
        await until(lambda: rig.router.room.used_bytes == 0)


async def test_bytes_that_wait_give_their_room_back_when_they_are_read(files: dict[str, Any]) -> None:
    async with running_rig(**files) as rig:
        client = await send_many(rig)
        await until(lambda: num_watched() == 1)
        rig.decode.open_gate(Gate.RESERVE)
        for _ in range(1 + NUM_MANY):
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
        client.leave()
        await until(lambda: rig.router.room.used_bytes == 0)


def leave_free(rig: Rig, num_bytes: int) -> None:
    """Others have the room of clients but for so many bytes."""
    room = rig.router.room
    assert room.take(room.max_bytes * RoomLimit.CLIENTS // 8 - num_bytes - room.used_bytes, RoomLimit.CLIENTS)


async def test_a_client_whose_bytes_find_no_room_is_told_behind_its_answers(rig: Rig) -> None:
    leave_free(rig, MORE_THAN_HEADS)
    client = await send_many(rig)
    await until(lambda: rig.router.services.failures.recent() != {})
    rig.decode.open_gate(Gate.RESERVE)
    statuses: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while not statuses or statuses[-1] == 200:
            answer = await client.receive()
            statuses.append(answer.status)
    assert (len(statuses) < 100, answer.status, answer.json()["error"]["code"]) == (True, 503, "no_room")
    await ended(client.reader)
    assert await rig.failures() == {"no_room": 1}


async def test_a_client_with_tls_whose_bytes_find_no_room_is_cut_off(tls: Rig) -> None:
    leave_free(tls, MORE_THAN_HEADS)
    client = await send_many(tls)
    await ended(client.reader)
    await tls.settled()
    assert await tls.failures() == {"client_gone": 1, "no_room": 1}


class Uneven:
    """Seconds that a slice may take. On a busy machine one piece uses them up, and then they suffice for all."""

    def __init__(self) -> None:
        self._seconds = cycle((0.0, 60.0))

    def __radd__(self, now: float) -> float:
        return now + next(self._seconds)

    def __lt__(self, _: float) -> bool:
        return False  # No piece took longer.


async def test_no_byte_takes_room_twice_while_a_read_is_looked_at_in_slices(
    files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reading, records):
        monkeypatch.setattr(module, "SLICE_S", Uneven())
    async with running_rig(max_buffered_bytes=1 << 20, **files) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        for _ in range(14):  # Their heads leave 38,000 bytes of the clients' part.
            await send(rig, x="y" * 62_000)
            await rig.decode.next_request()
        assert await rig.failures() == {}
        rig.decode.open_gate(Gate.RESERVE)


async def test_bytes_are_not_counted_twice_while_they_are_read() -> None:
    """A head of two slices: while the second one is read, it is a part of the head, and waits no more."""
    async with running_rig(max_header_bytes=4 * SLICE_BYTES) as rig:
        leave_free(rig, 5 * SLICE_BYTES // 2)
        client = await rig.client()
        message = raw(x="y" * (2 * SLICE_BYTES - 1000))
        await until(lambda: rig.connection_of(client).transport is not None)
        rig.feed(client, message)
        assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200

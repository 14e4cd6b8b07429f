"""Half calls from one address leave room for engines' calls, and for clients: raw sockets on the internal port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import Authority
from fakes.faults import Gate
from fakes.router import Rig, post, running_rig, send, until
from integration.test_router_internal_crowd import HALF_A_CALL, crowd
from integration.test_router_internal_tls import files_of
from patience import PATIENCE_S
from pdcluster_router.telemetry.failures import FailureKind

pytestmark = pytest.mark.anyio

MB = 1 << 20
QUARTER: dict[str, Any] = {"max_buffered_bytes": 2 * MB, "max_reservation_bytes": MB // 8}
"""A room of which calls have a quarter."""
NUM = 500
"""Each takes 4 KiB at least."""
SAID: dict[str, bytes] = {"half bodies": HALF_A_CALL, "half heads": b"POST /v1"}


@asynccontextmanager
async def filled(said: bytes) -> AsyncIterator[Rig]:
    """A router whose room for calls is full of what strangers have begun to say, all from one address."""
    async with running_rig(**QUARTER) as rig, crowd(rig, NUM, said):
        await until(lambda: FailureKind.NO_ROOM in rig.router.services.failures.recent())
        yield rig


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_half_calls_of_one_address_keep_no_engines_call_out(said: bytes) -> None:
    async with filled(said) as rig:
        assert [(await post(rig)).status for _ in range(5)] == [200] * 5
        assert len(rig.prefill.seen) == 5
        assert (await rig.failures())["crowded_out"] > 0
    await until(lambda: rig.router.room.used_bytes == 0)


async def test_half_calls_leave_clients_their_room() -> None:
    async with filled(HALF_A_CALL) as rig:
        body = {"model": "m", "prompt": "x" * (3 * MB // 4)}
        assert (await post(rig, body)).status == 200


@pytest.mark.parametrize("has_tls", [False, True])
async def test_the_largest_call_has_room_in_a_small_room_too(
    authority: Authority, tmp_path: Path, *, has_tls: bool
) -> None:
    files: dict[str, Any] = files_of(authority, tmp_path / "internal") if has_tls else {}
    async with running_rig(max_buffered_bytes=4 * MB, max_reservation_bytes=3 * MB // 2, **files) as rig:
        await rig.reserve(b"x" * (3 * MB // 2))
        assert await rig.failures() == {"reservation_refused": 1}
    await until(lambda: rig.router.room.used_bytes == 0)


async def test_a_call_that_waits_is_not_closed_for_anothers_bytes() -> None:
    async with running_rig(**QUARTER) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        async with crowd(rig, NUM, HALF_A_CALL):
            await until(lambda: FailureKind.NO_ROOM in rig.router.services.failures.recent())
            rig.prefill.open_gate(Gate.PREFILL)
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200


async def test_bytes_that_are_not_decrypted_count_where_the_others_of_their_connection_do(
    authority: Authority, tmp_path: Path
) -> None:
    """Else a crowd that reads no answers could hold the room, and make none."""
    settings: dict[str, Any] = files_of(authority, tmp_path / "internal")
    async with running_rig(**settings) as rig:
        client = await rig.internal()
        await client.get("/health")
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport for both ways
        page, room = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n", rig.router.room
        client.writer.write(page * 20_000)
        connection = rig.connection_of(client)
        await until(lambda: connection.is_full and room.used_bytes > 16 << 10)
        assert rig.router.callers.room_of(connection).used_bytes == room.used_bytes
        client.leave()

"""Clients that leave while they are not read: each is told once, and no watch outlives its connection."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import pytest

from patience import PATIENCE_S
from pdcluster_router.http.leavers import Leavers
from watched import num_watched

pytestmark = pytest.mark.anyio


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of one connection: ours, and its client's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with ours, client:
        yield ours, client


class Told:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.ways: list[bool] = []
        self._is_told = asyncio.Event()

    def __call__(self, *, is_broken: bool) -> None:
        self.ways.append(is_broken)
        self._is_told.set()

    async def wait(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._is_told.wait()
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def leavers() -> Leavers:
    return Leavers(asyncio.get_running_loop())


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("has_left_before", [False, True])
async def test_a_client_that_leaves_is_told_once_also_behind_bytes_that_stay_unread(
    leavers: Leavers, ends: tuple[socket.socket, socket.socket], *, is_broken: bool, has_left_before: bool
) -> None:
    ours, client = ends
    told = Told()
    client.sendall(b"x" * 10_000)
    if is_broken:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if has_left_before:
        client.close()
    leavers.watch(ours.fileno(), told)
    client.close()
    await told.wait()
    assert told.ways == [is_broken]
    assert num_watched() == 0
    leavers.close()


async def test_a_client_that_stays_is_not_told_of_whatever_it_sends(
    leavers: Leavers, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, client = ends
    stays, leaves = Told(), Told()
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with theirs:
        leavers.watch(ours.fileno(), stays)
        leavers.watch(theirs.fileno(), leaves)
        client.sendall(b"x" * 10_000)
        other.close()
        await leaves.wait()
    assert stays.ways == []
    assert num_watched() == 1
    leavers.close()


async def test_a_connection_that_is_read_again_is_not_watched_and_may_be_once_more(
    leavers: Leavers, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, client = ends
    first, second = Told(), Told()
    leavers.watch(ours.fileno(), first)
    leavers.forget(ours.fileno())
    leavers.forget(ours.fileno())
    leavers.watch(ours.fileno(), second)
    client.close()
    await second.wait()
    assert (first.ways, second.ways) == ([], [False])
    leavers.close()


async def test_one_that_is_told_may_forget_another(leavers: Leavers, ends: tuple[socket.socket, socket.socket]) -> None:
    """Both have left at once: the first answer may end both."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    told: list[int] = []
    with theirs:
        both = [ours.fileno() for ours in (ends[0], theirs)]

        def forget_all(*, is_broken: bool) -> None:
            told.append(is_broken)
            for descriptor in both:
                leavers.forget(descriptor)

        other.close()
        ends[1].close()
        for descriptor in both:
            leavers.watch(descriptor, forget_all)
        async with asyncio.timeout(PATIENCE_S):
            while not told:
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
    assert told == [False]
    leavers.close()


async def test_after_its_end_nothing_is_watched_and_nothing_fails(
    leavers: Leavers, ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, client = ends
    told = Told()
    leavers.watch(ours.fileno(), told)
    leavers.close()
    leavers.forget(ours.fileno())
    leavers.watch(ours.fileno(), told)
    client.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert told.ways == []
    assert num_watched() == 0

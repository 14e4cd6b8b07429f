"""A request that is over and a connection that is lost are freed at once, and leave no timer: nothing of them waits
until Python looks for circles of objects, which takes long where thousands of connections come and go."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import Callable, Iterator

import pytest

from fakes.faults import Fault, Gate
from fakes.http import RawClient, request_bytes
from fakes.router import COMPLETIONS, PROMPT, Rig, raw, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_router.http.connection import Connection
from pdcluster_router.http.tls import TlsConnection
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.prefill_attempts import PrefillAttempts
from pdcluster_router.requests.relay import Relay
from pdcluster_router.requests.reservation import ReservationCalls

pytestmark = pytest.mark.anyio

BODIES = [PROMPT, {**PROMPT, "stream": True}, {**PROMPT, "echo": True}, {**PROMPT, "n": 2}]
PARTS = (Exchange, Relay, ReservationCalls, PrefillAttempts)

PAGE = request_bytes("/health", b"", method="GET")
SENT = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-A: b\r\n",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
    "too large a body": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n{",
    "no HTTP": b"nonsense\r\n\r\n",
    "a page": PAGE,
    "an upgrade": PAGE.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"),
    "a row of pages": PAGE * 3,
    "a request": raw(),
    "a row of all": raw() * 2 + PAGE + b"nonsense\r\n\r\n",
}
"""What a client may have sent when it leaves."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leave_orderly(client: RawClient) -> None:
    client.writer.close()


def leave_by_reset(client: RawClient) -> None:
    linger = client.writer.get_extra_info("socket").setsockopt
    linger(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.leave()


def left() -> list[str]:
    return sorted(type(one).__name__ for one in gc.get_objects() if type(one) in PARTS or is_lost(one))


def is_lost(one: object) -> bool:
    """Whether it is an engine's connection that is of no use any more."""
    return type(one) is Connection and not one.is_usable


def timers_of(owners: set[int]) -> list[object]:
    """Timers that will call one of these objects, by their ids."""
    timers = [one for one in gc.get_objects() if type(one).__name__ == "TimerHandle"]
    return [t for t in timers if any(id(getattr(of, "__self__", None)) in owners for of in gc.get_referents(t))]


@pytest.mark.parametrize("body", BODIES, ids=["plain", "stream", "local", "parts"])
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.ERROR_500, Fault.DIE, Fault.ERROR_MID_STREAM])
async def test_nothing_is_left_of_a_request(body: dict[str, object], fault: Fault, no_collector: None) -> None:
    async with running_rig(num_prefill=2, num_decode=2) as rig:
        rig.prefill.fault = rig.decode.fault = fault
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(4):
                await (await rig.client()).post(COMPLETIONS, body)
        await rig.settled()
        assert left() == []


async def test_nothing_is_left_of_a_request_whose_client_has_left(rig: Rig, no_collector: None) -> None:
    rig.prefill.close_gate(Gate.REPLY)
    client = await send(rig, PROMPT)
    await rig.prefill.next_request()
    assert left() != []
    client.leave()
    await rig.settled()
    assert left() == []


@pytest.mark.parametrize("leave", [leave_orderly, leave_by_reset])
@pytest.mark.parametrize("is_answered", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_nothing_is_left_of_a_connection(
    rig: Rig, no_collector: None, sent: bytes, is_answered: bool, leave: Callable[[RawClient], None]
) -> None:
    await leave_nothing(rig, sent, is_answered, leave)


@pytest.mark.parametrize("leave", [leave_orderly, leave_by_reset])
@pytest.mark.parametrize("is_answered", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_nothing_is_left_of_a_connection_with_tls(
    tls: Rig, no_collector: None, sent: bytes, is_answered: bool, leave: Callable[[RawClient], None]
) -> None:
    await leave_nothing(tls, sent, is_answered, leave)
    await until(lambda: not any(type(one) is TlsConnection for one in gc.get_objects()))


async def leave_nothing(rig: Rig, sent: bytes, is_answered: bool, leave: Callable[[RawClient], None]) -> None:
    """A client sends this and leaves."""
    client = await rig.client()
    await until(lambda: bool(rig.server.server_state.connections))
    connection = rig.connection_of(client)
    owners = {id(connection), id(connection.transport)}
    seen = weakref.ref(connection)
    del connection
    await client.send(sent)
    if is_answered and sent not in (SENT["nothing"], SENT["half a head"], SENT["half a body"]):
        await client.receive()
    leave(client)
    await until(lambda: not rig.server.server_state.connections)
    assert timers_of(owners) == []  # It would know the connection until its time has come.
    await until(lambda: seen() is None)
    await rig.settled()
    assert left() == []


async def test_nothing_is_left_of_a_connection_that_could_not_be_made(rig: Rig, no_collector: None) -> None:
    """An engine that is down refuses one for each of its probes and for each request that is sent there."""
    await rig.decode.stop()
    for _ in range(3):
        assert (await (await rig.client()).post(COMPLETIONS, PROMPT)).status == 503
    await rig.settled()
    assert left() == []

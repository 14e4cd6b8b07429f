"""Connections to engines: those that cannot be made, whose fault that is, and those that cannot be trusted."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from fakes.answers import END, STREAM_HEAD, chunk, get_answer, json_answer
from fakes.faults import Gate
from fakes.http import RawClient, read_body, read_head, request_bytes
from fakes.router import COMPLETIONS, PROMPT, Rig, running_rig, running_server, send, until
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.errors import Unavailable
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.models import Models
from pdcluster_router.engines.roster import Roster
from pdcluster_router.http import connections
from pdcluster_router.http.connection import Call, Request, ResponseHead, ResponseLost, ResponseSink
from pdcluster_router.http.connections import ConnectionPool, IdleConnections, PoolLimits

pytestmark = pytest.mark.anyio


class Hearer:
    """A sink that waits for bad news."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[ResponseLost] = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, lost: ResponseLost) -> None:
        self.lost.set_result(lost)


@asynccontextmanager
async def silent_engine() -> AsyncIterator[str]:
    """Reads and never answers. Its URL."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize("host", ["decode..svc", "d" * 64])
async def test_a_host_that_has_no_name_is_told_at_once(host: str) -> None:
    limits = PoolLimits(max_connections=1, connect_timeout_s=PATIENCE_S, idle_s=1)
    pool = ConnectionPool(host, 80, limits, IdleConnections())
    hearer = Hearer()
    pool.send((b"GET / HTTP/1.1\r\n\r\n",), hearer)
    lost = await asyncio.wait_for(hearer.lost, PATIENCE_S)
    assert lost.is_unsent
    assert "cannot connect" in lost.reason
    await pool.close()


async def test_a_host_that_takes_no_connection_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        port, hearer = full.getsockname()[1], Hearer()
        pool = ConnectionPool("127.0.0.1", port, PoolLimits(1, 0.1, 1), IdleConnections())
        pool.send((b"GET / HTTP/1.1\r\n\r\n",), hearer)
        lost = await asyncio.wait_for(hearer.lost, PATIENCE_S)
        assert (lost.is_unsent, lost.reason) == (True, "no connection within 0.1 s")
        await pool.close()


async def test_a_question_that_is_not_answered_in_time_keeps_no_connection() -> None:
    async with silent_engine() as url:
        member = Member(url, Role.PREFILL)
        limits = PoolLimits(1, EDGE_S, EDGE_S)
        idle, breaker = (lambda: None), (lambda _: None)
        engine = Engine(
            "prefill-0", member, limits, IdleConnections(), on_idle=idle, on_breaker=breaker, now=time.monotonic
        )
        with pytest.raises(Unavailable, match="no answer within"):
            await engine.fetch("/health", timeout_s=0.05)
        await until(lambda: engine.pool.num_busy == 0)
        await engine.close()


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def hang_up_on_engines(rig: Rig) -> None:
    """No connection is left from the probes, at either end."""
    num_before = num_descriptors()
    for engine in rig.router.services.all_engines():
        engine.pool.keep(False)
        engine.pool.keep(True)
    await until(lambda: num_descriptors() == num_before - 4)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 50, hard))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_router_without_a_descriptor_left_blames_no_engine(rig: Rig) -> None:
    client, internal = await rig.client(), await rig.internal()
    assert (await client.get("/health")).status == 200
    assert (await internal.get("/pdcluster/pool")).status == 200
    await hang_up_on_engines(rig)
    with no_descriptor_left():
        answers = [await client.post(COMPLETIONS, PROMPT) for _ in range(6)]
    assert {answer.status for answer in answers} == {503}
    assert b"Too many open files" in answers[0].body
    page = (await internal.get("/pdcluster/pool")).json()
    assert {engine["circuit"] for engine in page["engines"]} == {"closed"}
    assert (await client.post(COMPLETIONS, PROMPT)).status == 200


async def test_a_connection_that_was_idle_for_too_long_is_not_used_again() -> None:
    async with running_rig(engine_idle_s=0.05) as rig:
        client = await rig.client()
        assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        had = rig.decode.num_connections
        await asyncio.sleep(0.2)
        assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        assert rig.decode.num_connections == had + 1


async def test_a_list_of_models_that_is_known_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_router.engines.models.TIMEOUT_S", PATIENCE_S)
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await read_head(reader)
                if "authorization" in head.headers:
                    asked.append(head.path)
                    await asyncio.Event().wait()
                writer.write(json_answer(200, b'{"data":[]}') if head.path == "/v1/models" else get_answer(head.path))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    engine = await asyncio.start_server(serve, "127.0.0.1")
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    async with running_server(prefill_urls=[url], decode_urls=[url]) as (_, router_url):
        client, stranger = await RawClient.connect(router_url), await RawClient.connect(router_url)
        assert (await client.get("/v1/models")).status == 200
        await stranger.send(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer mine\r\n\r\n")
        while not asked:
            await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(client.get("/v1/models"), EDGE_S)  # The engine would be given up later.
        assert answer.json() == {"data": []}
        stranger.leave()
    engine.close()


async def test_an_engines_lists_of_models_are_remembered_for_sixteen_keys() -> None:
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await read_head(reader)
                if "authorization" in head.headers:  # The router's own question has none.
                    asked.append(head.headers["authorization"])
                writer.write(get_answer(head.path))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    engine = await asyncio.start_server(serve, "127.0.0.1")
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    async with running_server(prefill_urls=[url], decode_urls=[url]) as (server, _):
        roster = server.router.services.roster
        await until(lambda: all(one.is_healthy for one in roster.all_engines()))
        models = Models(roster, lambda: 0.0)
        for key in [*range(17), 16, 1, 0]:
            assert (await models.read(b"authorization: %d\r\n" % key)).head.status == 200
    assert asked == [str(key) for key in [*range(17), 0]]
    engine.close()


async def test_many_clients_that_ask_for_the_models_at_once_take_one_connection() -> None:
    async with running_rig(max_engine_connections=2) as rig:
        clients = [await rig.client() for _ in range(40)]
        for number, client in enumerate(clients):
            await client.send(request_bytes("/v1/models", b"", {"authorization": f"key-{number % 4}"}, method="GET"))
        assert [(await client.receive()).status for client in clients] == [200] * 40
        assert rig.decode.num_connections <= 2  # Its probes have the other one.


async def test_an_error_in_place_of_a_list_of_models_is_not_remembered() -> None:
    statuses = [503, 200]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while statuses:
            await read_head(reader)
            writer.write(json_answer(statuses.pop(0), b"{}"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    roster = Roster(PoolLimits(1, EDGE_S, EDGE_S), least_tokens, lambda: None, lambda _: None, time.monotonic)
    roster.update([Member(url, role) for role in Role])
    models = Models(roster, lambda: 0.0)
    assert [(await models.read(b"")).head.status for _ in range(2)] == [503, 200]
    await roster.close()
    server.close()


class StalePool(ConnectionPool):
    """Three connections, also new ones, are found closed by an engine that cannot have read what was sent."""

    def __init__(self) -> None:
        super().__init__(
            "127.0.0.1", 1, PoolLimits(max_connections=1, connect_timeout_s=1, idle_s=1), IdleConnections()
        )
        self.are_fresh: list[bool] = []

    def send(self, request: Request, sink: ResponseSink, *, fresh: bool = False, is_exempt: bool = False) -> Call:
        self.are_fresh.append(fresh)
        call = Call(sink)
        asyncio.get_running_loop().call_soon(call.fail, ResponseLost("hung up", is_stale=len(self.are_fresh) <= 3))
        return call


async def test_an_order_that_found_two_connections_closed_is_not_sent_a_third_time(rig: Rig) -> None:
    (engine,) = rig.router.services.engines[Role.PREFILL]
    pool, stale = engine.pool, StalePool()
    engine.pool = stale
    client = await send(rig)
    answer = await asyncio.wait_for(client.receive(), PATIENCE_S)
    assert (answer.status, stale.are_fresh) == (502, [False, True])
    await rig.settled()
    engine.pool = pool


async def test_a_request_waits_a_moment_for_a_descriptor(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_DESCRIPTOR_WAIT_S", PATIENCE_S)  # On a busy machine the moment is longer.
    client = await rig.client()
    await hang_up_on_engines(rig)
    with no_descriptor_left():
        asked = asyncio.create_task(client.post(COMPLETIONS, PROMPT))
        await asyncio.sleep(0.1)
        assert not asked.done()
    assert (await asked).status == 200


async def test_without_a_descriptor_an_idle_connection_to_another_engine_gives_its_own() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            writer.write(get_answer((await read_head(reader)).path))
            await reader.read()
        writer.close()

    idle, limits, hearer = IdleConnections(), PoolLimits(1, PATIENCE_S, PATIENCE_S), Hearer()
    engine = await asyncio.start_server(answer, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:  # Nobody accepts: that would need a descriptor too.
        ports = engine.sockets[0].getsockname()[1], other.getsockname()[1]
        quiet, busy = (ConnectionPool("127.0.0.1", port, limits, idle) for port in ports)
        quiet.send((b"GET /health HTTP/1.1\r\n\r\n",), Hearer())
        await until(lambda: quiet.num_busy == 0)
        with no_descriptor_left():
            busy.send((b"GET /health HTTP/1.1\r\n\r\n",), hearer)
            await until(lambda: hearer.lost.done() or bool(select.select([other], [], [], 0)[0]))
        assert not hearer.lost.done(), hearer.lost.result()
        await quiet.close()
        await busy.close()
    engine.close()


async def test_a_connection_that_speaks_unasked_is_not_used_again(rig: Rig) -> None:
    client = await rig.client()
    assert (await client.post(COMPLETIONS, PROMPT)).status == 200
    num_open = len(rig.decode.open_connections)
    rig.decode.say(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n")  # And the rest with the next answer.
    await until(lambda: len(rig.decode.open_connections) == num_open - 1)
    assert (await client.post(COMPLETIONS, PROMPT)).status == 200
    assert rig.decode.num_connections == 2


Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def client_of_an_engine(speak: Speak) -> AsyncIterator[RawClient]:
    """It has sent a request for a stream; the one engine is well and answers as ``speak`` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (await read_body(reader, await read_head(reader))).first_line.startswith("GET"):
                writer.write(get_answer("/health"))
            await speak(reader, writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    engine = await asyncio.start_server(serve, "127.0.0.1")
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    async with running_server(prefill_urls=[url], decode_urls=[url]) as (_, router_url):
        client = await RawClient.connect(router_url)
        await client.send(request_bytes(COMPLETIONS, b'{"prompt":"x","stream":true}'))
        yield client
    engine.close()


async def test_an_error_event_that_comes_in_two_reads_is_followed_by_an_event_of_its_own() -> None:
    torn = asyncio.Event()

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b'data: {"a":1}\n\ndata: {"err'))
        await torn.wait()
        writer.write(chunk(b'or": {"message": "EngineCore died"}}\n\n') + END)
        await writer.drain()

    async with client_of_an_engine(speak) as client:
        await client.reader.readuntil(b'{"err')
        torn.set()
        rest = await client.reader.read()
        assert b'data: {"error":{"message":"decode-0' in rest.partition(b"\n\n")[2]
        assert b"EngineCore died" in rest


async def test_an_engine_that_has_broken_off_its_answer_is_hung_up_on() -> None:
    """It may go on computing: nothing else tells it that nobody reads."""
    hung_up = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b'data: {"a":1}\n\n'))
        writer.write(chunk(b'data: {"error": {"message": "EngineCore died"}}\n\n'))
        with suppress(ConnectionError):
            await reader.read()
        hung_up.set()

    async with client_of_an_engine(speak) as client:
        assert b"EngineCore died" in await client.reader.read()
        await asyncio.wait_for(hung_up.wait(), EDGE_S)


async def test_a_connection_that_has_a_request_is_not_the_one_that_gives_up_its_descriptor(rig: Rig) -> None:
    """Descriptors run out: the connection that has been idle longest is closed, and none is idle here."""
    assert (await (await rig.client()).post(COMPLETIONS, PROMPT)).status == 200
    await rig.decode.next_request()
    await rig.settled()
    rig.decode.close_gate(Gate.RESERVE)
    client = await send(rig)
    await rig.decode.next_request()
    for _ in range(3):
        rig.router.services.roster._idle_connections.close_oldest()
        await asyncio.sleep(0)
    rig.decode.open_gate(Gate.RESERVE)
    assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
    assert await rig.failures() == {}

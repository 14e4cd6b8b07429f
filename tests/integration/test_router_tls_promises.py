"""A router's promises hold over TLS: ends, bounds, a certificate that is replaced, and bytes of all kinds."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import Authority
from fakes.faults import Fault, Gate
from fakes.http import RawClient, request_bytes
from fakes.router import CHAT, COMPLETIONS, PROMPT, STREAM, Rig, raw, running_rig, send, until
from integration.test_router_clients import assert_aborted
from integration.test_router_process import process
from integration.tls_clients import ByHand, connect, der_of, ended, hello, shown, trusting
from patience import PATIENCE_S
from pdcluster_router.front.server_protocol import RouterProtocol
from pdcluster_router.http.tls import TlsConnection
from watched import num_watched

pytestmark = pytest.mark.anyio

LOOK_S = 0.01
HELLO_AND_MORE = 16 << 10


# What a router promises.


async def test_tokens_reach_the_client_while_decode_still_makes_them(tls: Rig) -> None:
    tls.decode.close_gate(Gate.SECOND_TOKEN)
    client = await send(tls, STREAM)
    await client.reader.readuntil(b"Hello")
    tls.decode.open_gate(Gate.SECOND_TOKEN)
    assert (await client.reader.readuntil(b"0\r\n\r\n")).count(b"data:") == 4


def hang_up(client: RawClient) -> None:
    client.leave()


def end_in_order(client: RawClient) -> None:
    """TLS' last word, and the connection's end behind it."""
    client.writer.close()


def end_half(client: RawClient) -> None:
    """The connection's half end without TLS' last word."""
    with socket.socket(fileno=os.dup(client.writer.get_extra_info("socket").fileno())) as end:
        end.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [hang_up, end_in_order, end_half])
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_during_prefill_stops_both_engines(
    tls: Rig, leave: Callable[[RawClient], None], body: dict[str, object]
) -> None:
    tls.prefill.close_gate(Gate.PREFILL)
    client = await send(tls, body)
    order = await tls.prefill.next_request()
    leave(client)
    await assert_aborted(order)
    await tls.decode.seen[0].ended.wait()


async def test_a_client_that_leaves_while_it_is_not_read_stops_both_engines(tls: Rig) -> None:
    tls.prefill.close_gate(Gate.PREFILL)
    client = await send(tls, PROMPT)
    order = await tls.prefill.next_request()
    await client.send(raw(PROMPT) * 100)
    await until(lambda: num_watched() == 1)
    client.leave()
    await assert_aborted(order)


async def test_what_a_client_does_not_take_is_bounded(tls: Rig) -> None:
    tls.decode.tokens, tls.decode.padding = ["x"] * 400, "y" * 50_000
    client = await send(tls, STREAM)
    await client.reader.readuntil(b"x")
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport for both ways
    await until(lambda: any(engine.pool.num_busy and is_paused(engine) for engine in tls.router.services.all_engines()))
    assert tls.connection_of(client).transport.get_write_buffer_size() < 1 << 20
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
    rest = await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), PATIENCE_S)
    assert rest.count(b"data: ") == 400 + 1


def is_paused(engine: Any) -> bool:
    return any(connection._is_paused for connection in engine.pool._all)


async def test_a_large_body_arrives_whole(tls: Rig) -> None:
    body = {**PROMPT, "prompt": "x" * 7_000_000}
    assert (await (await tls.client()).post(COMPLETIONS, body)).status == 200
    assert len(tls.decode.seen[0].body["prompt"]) == 7_000_000


async def test_rows_of_requests_are_answered_in_order(tls: Rig) -> None:
    client = await tls.client()
    await client.send(raw(PROMPT) * 50)
    answers = [await client.receive() for _ in range(50)]
    assert [answer.status for answer in answers] == [200] * 50


async def test_an_answer_that_only_its_end_frames_has_no_orderly_end_when_it_is_cut(tls: Rig) -> None:
    tls.decode.fault = Fault.DIE_MID_STREAM
    client = await tls.client()
    await client.send(raw(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    with pytest.raises(ConnectionError):
        await client.reader.readuntil(b"no such words")


# A certificate that is replaced.


async def test_a_replaced_certificate_is_shown_without_a_connection_lost(
    tls_files: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    async with running_rig(**tls_files, tls_interval_s=LOOK_S) as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        clients = [await send(rig, STREAM) for _ in range(50)]
        for client in clients:
            await client.reader.readuntil(b"Hello")
        new = authority.issue()
        new.write(tmp_path / "secret")
        while await shown(rig, authority) != der_of(new):
            await asyncio.sleep(LOOK_S)
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        ends = [await client.reader.readuntil(b"0\r\n\r\n") for client in clients]
        assert [end.count(b"data:") for end in ends] == [4] * 50
        assert [(await client.post(COMPLETIONS, PROMPT)).status for client in clients] == [200] * 50


async def test_a_certificate_follows_a_link_as_kubernetes_moves_it(authority: Authority, tmp_path: Path) -> None:
    one, two = authority.issue(), authority.issue()
    one.write(tmp_path / "one")
    two.write(tmp_path / "two")
    (tmp_path / "data").symlink_to("one")
    paths: dict[str, Any] = {"tls_cert": tmp_path / "data" / "tls.crt", "tls_key": tmp_path / "data" / "tls.key"}
    async with running_rig(**paths, tls_interval_s=LOOK_S) as rig:
        assert await shown(rig, authority) == der_of(one)
        (tmp_path / "new").symlink_to("two")
        (tmp_path / "new").rename(tmp_path / "data")
        while await shown(rig, authority) != der_of(two):
            await asyncio.sleep(LOOK_S)


async def test_a_bad_replacement_keeps_the_certificate_and_is_told_once(
    tls_files: dict[str, Any], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_rig(**tls_files, tls_interval_s=LOOK_S) as rig:
        before = await shown(rig, authority)
        tls_files["tls_key"].write_bytes(authority.issue().key_pem())
        await until(lambda: "tls certificate not changed" in caplog.text)
        await asyncio.sleep(10 * LOOK_S)
        assert caplog.text.count("tls certificate not changed") == 1
        assert "the key is not that of the certificate" in caplog.text
        assert await shown(rig, authority) == before


async def test_sighup_reads_the_certificate_anew(
    tls_files: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    flags = ["--tls-cert", str(tls_files["tls_cert"]), "--tls-key", str(tls_files["tls_key"]), "--tls-interval", "3600"]
    async with process(*flags) as (router, url, _, _):
        assert url.startswith("https://")
        new = authority.issue()
        new.write(tmp_path / "secret")
        router.send_signal(signal.SIGHUP)
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        while await asyncio.to_thread(ssl.get_server_certificate, address) != new.pem.decode():
            await asyncio.sleep(LOOK_S)
        router.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.wait(), PATIENCE_S) == 0


# Bytes of all kinds.


def spoilt(random_: random.Random, whole: bytes) -> bytes:
    """Some bytes of it changed, cut, or said twice."""
    said = bytearray(whole)
    for _ in range(random_.randrange(1, 8)):
        said[random_.randrange(len(said))] = random_.randrange(256)
    return bytes(said[: random_.randrange(1, len(said) + 1)]) * random_.choice((1, 1, 1, 2))


async def test_bytes_of_all_kinds_leave_the_router_as_it_was(
    tls: Rig, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    random_ = random.Random(7)
    first = hello(authority)
    for _ in range(300):
        said = random_.choice((random_.randbytes(random_.randrange(1, 3000)), spoilt(random_, first)))
        client = await connect(tls, None)
        client.writer.write(said)
        client.writer.close()
    await until(lambda: tls.router.clients.num_open == 0)
    assert (await (await tls.client()).post(COMPLETIONS, PROMPT)).status == 200
    assert (problems, "Traceback" in caplog.text) == ([], False)


async def test_broken_records_of_an_open_connection_end_it(tls: Rig, authority: Authority) -> None:
    random_ = random.Random(7)
    for _ in range(100):
        client = await connect(tls, trusting(authority))
        assert (await client.get("/health")).status == 200
        (connection,) = tls_connections(tls)
        connection.data_received(random_.randbytes(random_.randrange(5, HELLO_AND_MORE * 3)))
        await until(lambda: not tls.server.server_state.connections)
        client.leave()
    assert tls.router.clients.num_open == 0


ANSWERED_AT_ONCE = {
    "no HTTP": b"nonsense\r\n\r\n",
    "too large a body": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    "a body that waits": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
}


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "open"])
@pytest.mark.parametrize("said", ANSWERED_AT_ONCE.values(), ids=ANSWERED_AT_ONCE)
async def test_broken_records_right_behind_a_request_end_the_connection(
    tls: Rig, authority: Authority, said: bytes, is_new: bool
) -> None:
    """OpenSSL encrypts nothing any more, and the request is answered before the protocol above hears of an end."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    client = await ByHand.agree(tls, authority)
    if not is_new:
        client.send()
        await until(lambda: any(isinstance(one, RouterProtocol) for one in tls.server.server_state.connections))
    client.send(said, behind=b"\xff" * 100)
    await ended(client.reader)
    client.writer.close()
    await until(lambda: tls.router.clients.num_open == 0)
    assert problems == []


def tls_connections(rig: Rig) -> list[TlsConnection]:
    """The router's ends of all connections with an agreement."""
    return [one.transport for one in rig.server.server_state.connections if isinstance(one.transport, TlsConnection)]


async def test_requests_in_the_smallest_records_are_answered(tls: Rig, authority: Authority) -> None:
    client = await connect(tls, trusting(authority))
    for byte in request_bytes(CHAT, json.dumps({"model": "m", "messages": []}).encode()):
        client.writer.write(bytes([byte]))
    assert (await client.receive()).status == 200

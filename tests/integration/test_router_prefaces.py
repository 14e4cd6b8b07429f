"""PROXY headers on the client port: whose connection it is, and which are closed."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from fakes.access_log import Log
from fakes.certificates import Authority
from fakes.http import RawClient
from fakes.prefaces import block, header, line
from fakes.router import COMPLETIONS, PROMPT, Rig, raw, running_rig, running_server, until
from integration.test_router_process import process
from integration.tls_clients import ended, port_of, trusting
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

CLIENT, MADE_UP = "203.0.113.7", "198.51.100.9"
REQUIRED: dict[str, Any] = {"trusted_proxies": ["127.0.0.1"], "proxy_protocol": "required"}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "access")


async def from_proxy(rig: Rig, preface: bytes, peer: str = "127.0.0.1") -> RawClient:
    """A connection that begins so."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port_of(rig), local_addr=(peer, 0)))
    rig.clients.append(client)
    await client.send(preface)
    return client


async def over_tls(client: RawClient, authority: Authority) -> RawClient:
    await client.writer.start_tls(trusting(authority), server_hostname="127.0.0.1")
    return client


PREFACES = {
    "1": (line(CLIENT), CLIENT),
    "1, IPv6": (line("2001:db8::7"), "2001:db8::7"),
    "1, unknown": (b"PROXY UNKNOWN\r\n", ""),
    "2": (header(CLIENT), CLIENT),
    "2, IPv6, TLVs": (header("2001:db8::7", tlvs=b"\x04\x00\x01x"), "2001:db8::7"),
    "2, IPv4 within IPv6": (header(f"::ffff:{CLIENT}"), CLIENT),
    "2, unknown": (block(b"", 0), ""),
    "2, local": (block(b"", 0, 0x20), "127.0.0.1"),
}


@pytest.mark.parametrize("case", PREFACES)
async def test_the_client_is_the_one_that_the_proxy_tells(case: str, log: Log) -> None:
    preface, address = PREFACES[case]
    async with running_rig(**REQUIRED, access_log=log.path) as rig:
        client = await from_proxy(rig, preface)
        for _ in range(2):
            assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        assert (await client.post("/tokenize", PROMPT)).status == 200
        assert await rig.failures() == {}
    assert [one["client_address"] for one in log.lines] == [address] * 3


@pytest.mark.parametrize("case", ["1", "2", "1, unknown", "2, unknown"])
async def test_of_a_connection_that_a_client_has_begun_no_header_is_believed(case: str, log: Log) -> None:
    """Also where its address is not known: a load balancer writes no headers, so they are the client's own."""
    preface, address = PREFACES[case]
    async with running_rig(**REQUIRED, access_log=log.path) as rig:
        client = await from_proxy(rig, preface)
        await client.post(COMPLETIONS, PROMPT, {"X-Forwarded-For": MADE_UP})
        await client.post("/tokenize", PROMPT, {"X-Forwarded-For": MADE_UP})
    assert [one["client_address"] for one in log.lines] == [address] * 2


async def test_a_proxy_behind_a_load_balancer_is_believed(log: Log) -> None:
    async with running_rig(**{**REQUIRED, "trusted_proxies": "127.0.0.1,10.0.0.0/8"}, access_log=log.path) as rig:
        client = await from_proxy(rig, header("10.1.2.3"))
        await client.post(COMPLETIONS, PROMPT, {"X-Forwarded-For": f"{MADE_UP}, {CLIENT}"})
    assert log.line["client_address"] == CLIENT


@pytest.mark.parametrize("case", ["1", "2"])
async def test_a_header_in_pieces_or_together_with_a_request_is_the_same(case: str, log: Log) -> None:
    preface, address = PREFACES[case]
    async with running_rig(**REQUIRED, access_log=log.path) as rig:
        whole = await from_proxy(rig, preface + raw(PROMPT))
        assert (await asyncio.wait_for(whole.receive(), PATIENCE_S)).status == 200
        pieces = await from_proxy(rig, preface[:1])
        for at in range(1, len(preface)):
            await pieces.send(preface[at : at + 1])
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(pieces.post(COMPLETIONS, PROMPT), PATIENCE_S)).status == 200
    assert [one["client_address"] for one in log.lines] == [address] * 2


@pytest.mark.parametrize("case", ["1", "2", "2, local"])
async def test_it_comes_before_tls(case: str, log: Log, tls_files: dict[str, Any], authority: Authority) -> None:
    preface, address = PREFACES[case]
    async with running_rig(**REQUIRED, **tls_files, access_log=log.path) as rig:
        client = await over_tls(await from_proxy(rig, preface), authority)
        assert (await asyncio.wait_for(client.post(COMPLETIONS, PROMPT), PATIENCE_S)).status == 200
        assert await rig.failures() == {}
    assert log.line["client_address"] == address


async def test_tls_without_it_is_refused(tls_files: dict[str, Any], authority: Authority) -> None:
    async with running_rig(**REQUIRED, **tls_files) as rig:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port_of(rig), ssl=trusting(authority))
        assert await rig.failures() == {"proxy_refused": 1}


REFUSED = {
    "no header": (raw(PROMPT), "no PROXY header"),
    "nonsense": (b"PROXY TCP4 a b c d\r\n" + raw(PROMPT), "a PROXY line that is not as specified"),
    "a line without end": (b"PROXY " + b"a" * 200, "a PROXY line of more than 107 bytes"),
    "too many TLVs": (header(CLIENT, tlvs=bytes(5000)), "a PROXY header of more than 4096 bytes"),
    "large nonsense": (b"x" * 1_000_000, "no PROXY header"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_begins_otherwise_is_closed_and_told_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    said, reason = REFUSED[case]
    async with running_rig(**REQUIRED) as rig:
        client = await from_proxy(rig, b"")
        client.writer.write(said)
        await ended(client.reader)
        await until(lambda: rig.router.clients.num_open == 0)
        assert await rig.failures() == {"proxy_refused": 1}
        assert rig.decode.seen == []
    lines = [one for one in caplog.text.splitlines() if "failure kind=proxy_refused" in one]
    assert [one.split("reason=")[1] for one in lines] == [reason]
    assert "Traceback" not in caplog.text


async def test_a_peer_that_is_no_trusted_proxy_is_closed_before_it_says_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_rig(**REQUIRED) as rig:
        for preface in (b"", line(CLIENT) + raw(PROMPT)):
            client = await from_proxy(rig, b"", peer="127.0.0.9")
            client.writer.write(preface)
            await ended(client.reader)
        await until(lambda: rig.router.clients.num_open == 0)
        assert await rig.failures() == {"proxy_refused": 2}
        assert rig.decode.seen == []
    assert "not in --trusted-proxies" in caplog.text
    assert "127.0.0.9" not in caplog.text


async def test_a_header_that_comes_too_slowly_or_never_is_not_waited_for() -> None:
    async with running_rig(**REQUIRED, client_read_timeout_s=6.0) as rig:
        for preface, failures in ((b"", {}), (header(CLIENT)[:20], {"proxy_refused": 1})):
            client = await from_proxy(rig, preface)
            await ended(client.reader)
            await until(lambda: rig.router.clients.num_open == 0)
            assert await rig.failures() == failures


async def test_a_proxy_that_leaves_before_its_header_is_whole_is_told_unless_it_said_nothing() -> None:
    async with running_rig(**REQUIRED) as rig:
        for preface, failures in ((b"", {}), (b"PROXY ", {"proxy_refused": 1})):
            client = await from_proxy(rig, preface)
            await until(lambda: rig.router.clients.num_open == 1)
            client.writer.close()
            await until(lambda: rig.router.clients.num_open == 0)
            assert await rig.failures() == failures


async def test_connections_count_before_their_header_and_after_it() -> None:
    async with running_rig(**REQUIRED, max_connections=1) as rig:
        silent = await from_proxy(rig, b"")
        await until(lambda: rig.router.clients.num_open == 1)
        guest = await from_proxy(rig, line(CLIENT))
        assert (await guest.post(COMPLETIONS, PROMPT)).json()["error"]["code"] == "too_many_connections"
        older = await from_proxy(rig, b"")
        await until(lambda: rig.router.clients.num_open == 2)
        newest = await from_proxy(rig, b"")
        assert await older.reader.read() == b""
        for client in (silent, newest):
            client.leave()
        await until(lambda: rig.router.clients.num_open == 0)
        assert (await (await from_proxy(rig, line(CLIENT))).post(COMPLETIONS, PROMPT)).status == 200


async def test_the_internal_port_needs_none() -> None:
    async with running_rig(**REQUIRED) as rig:
        assert (await (await rig.internal()).get("/health")).status == 200


async def test_a_router_that_ends_waits_for_no_header() -> None:
    urls = {"prefill_urls": ["http://127.0.0.1:1"], "decode_urls": ["http://127.0.0.1:1"]}
    async with running_server(**urls, **REQUIRED) as (server, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"PROXY ")
        await until(lambda: len(server.server_state.connections) == 1)
    await ended(reader)
    writer.close()


async def test_a_router_as_it_is_started_demands_it(log: Log) -> None:
    flags = ("--proxy-protocol", "required", "--trusted-proxies", "127.0.0.1", "--access-log", str(log.path))
    async with process(*flags) as (router, url, _, _):
        client = await RawClient.connect(url)
        await client.send(header(CLIENT))
        assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        stranger = await RawClient.connect(url)
        await stranger.send(raw(PROMPT))
        await ended(stranger.reader)
        router.terminate()
        assert await router.wait() == 0
    assert log.line["client_address"] == CLIENT

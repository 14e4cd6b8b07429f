"""Engines that are not trusted over TLS: what is said of each, and that no request goes to it."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import FOR_CLIENTS, Authority, Issued
from fakes.engine import FakeEngine, Wire
from fakes.http import RawClient
from fakes.router import PROMPT, raw, running_server, until
from integration.engine_tls import alone, ask, told
from integration.ports import fresh_port
from integration.test_router_process import start_router
from patience import EDGE_S, PATIENCE_S
from pdcluster_router.core.engines import breaker
from pdcluster_router.core.engines.breaker import Circuit

pytestmark = pytest.mark.anyio
DAY = timedelta(days=1)


# Engines that are not trusted. Each costs one request at most, and none of it is sent.


Issue = Callable[[Authority, Path], Issued]
UNTRUSTED: dict[str, tuple[Issue, str]] = {
    "expired": (
        lambda authority, _: authority.issue(begins=-2 * DAY, ends=-DAY),
        r"its certificate for <address> is valid from \d{4}-\d\d-\d\d to \d{4}-\d\d-\d\d, and not now (certificate has "
        "expired): renew it, or set the clock",
    ),
    "of tomorrow": (
        lambda authority, _: authority.issue(begins=DAY, ends=2 * DAY),
        "and not now (certificate is not yet valid): renew it, or set the clock",
    ),
    "foreign": (
        lambda _, folder: Authority(folder / "foreign.crt", "another").issue(),
        "its certificate for <address> is signed by 'another', and those of --engine-ca do not know that one (unable "
        "to get local issuer certificate): name the file of its authority with --engine-ca",
    ),
    "wrong name": (
        lambda authority, _: authority.issue(names=["engines.ns.svc", "127.0.0.2"]),
        "its certificate is for engines.ns.svc, <address>, and <address> was expected: give it one for that name, or "
        "name one that it has with --engine-tls-name",
    ),
    "for clients": (
        lambda authority, _: authority.issue(usage=FOR_CLIENTS),
        "is refused (unsuitable certificate purpose): give it one that is for servers",
    ),
}


@pytest.mark.parametrize("case", UNTRUSTED)
async def test_an_engine_that_is_not_trusted_gets_no_request_and_is_told_once(
    case: str, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issue, reason = UNTRUSTED[case]
    tls = issue(authority, tmp_path).server(tmp_path / "engine")
    async with alone(tls, engine_ca=authority.ca, probe_interval_s=0.01) as (server, url, engines):
        answer = await ask(url)
        assert answer.status == 503
        assert "decode-0" in answer.body.decode()
        counted = server.router.services.failures.recent
        await until(lambda: sum(counted().values()) > 10)
        assert not any(engine.is_healthy for engine in server.router.services.all_engines())
        assert [engine.seen for engine in engines] == [[], []]
        outages = [engine.outage for engine in server.router.services.all_engines()]
        assert not any(outage.why_lost(0.0, gone_s=0.0, silent_s=0.0) for outage in outages)  # Its requests go on.
    lines = told(caplog)
    assert sorted(line.split("engine=")[1].split()[0] for line in lines) == ["decode-0", "prefill-0"]
    assert all(fits(reason, line) for line in lines), lines


def fits(reason: str, line: str) -> bool:
    """``reason`` is in ``line``; a day in it is any."""
    return re.search(re.escape(reason).replace(re.escape(r"\d{4}-\d\d-\d\d"), r"\d{4}-\d\d-\d\d"), line) is not None


async def test_its_breaker_opens_and_another_engine_serves(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_EJECTION_S", breaker.LAST_EJECTION_S)  # It must not end before it is seen.
    wire = Wire()
    good, bad, prefill = FakeEngine(wire), FakeEngine(wire), FakeEngine(wire)
    tls = authority.issue().server(tmp_path / "good")
    for engine in (good, prefill):
        await engine.start(tls=tls)
    await bad.start(tls=authority.issue(names=["elsewhere"]).server(tmp_path / "bad"))
    try:
        settings: dict[str, Any] = {"engine_ca": authority.ca, "probe_interval_s": 60.0}
        async with running_server(prefill_urls=[prefill.url], decode_urls=[bad.url, good.url], **settings) as (
            server,
            url,
        ):
            bad_engine = server.router.services.all_engines()[1]
            bad_engine.is_healthy = True  # As before its certificate was replaced.
            server.router.services.roster.refresh()
            answers = await asyncio.gather(*(ask(url) for _ in range(60)))
            assert [answer.status for answer in answers] == [200] * 60
            assert bad.seen == []
            assert bad_engine.breaker.circuit is Circuit.EJECTED
    finally:
        for engine in (good, bad, prefill):
            await engine.stop()


async def test_an_engine_that_says_nothing_is_waited_for_until_the_connect_timeout(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_place_of_engines(lambda reader, writer: reader.read()) as urls:
        settings: dict[str, Any] = {"connect_timeout_s": 0.2, "probe_timeout_s": EDGE_S, "engine_ca": authority.ca}
        async with running_server(prefill_urls=urls, decode_urls=urls, **settings) as (_, url):
            answer = await ask(url)
            assert answer.status == 503
    assert "no TLS agreement within 0.2 s" in answer.body.decode()
    assert "no TLS agreement within 0.2 s" in told(caplog)[0]


async def test_an_engine_that_says_that_it_takes_no_certificate_of_ours_is_told_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By an alert behind our agreement, as OpenSSL's own servers do. vLLM's server hangs up without a word."""
    asks = authority.issue().server(tmp_path / "engine", asks=authority.ca)
    async with in_place_of_engines(partial(shake, asks)) as urls:
        settings: dict[str, Any] = {"engine_ca": authority.ca, "probe_interval_s": 0.01}
        async with running_server(prefill_urls=urls, decode_urls=urls, **settings) as (server, _):
            await until(lambda: sum(server.router.services.failures.recent().values()) > 10)
    lines = told(caplog)
    assert sorted(line.split("engine=")[1].split()[0] for line in lines) == ["decode-0", "prefill-0"]
    assert all("(tlsv13 alert certificate required): give the router one that" in line for line in lines)


async def test_a_certificate_whose_names_are_no_text_is_refused_as_any(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issued = Authority(tmp_path / "foreign.crt").issue(names=["QQQQ"])
    der = ssl.PEM_cert_to_DER_cert(issued.pem.decode())
    odd = ssl.DER_cert_to_PEM_cert(der.replace(b"QQQQ", b"\xff\xfe\xff\xfe"))
    tls = replace(issued, pem=odd.encode()).server(tmp_path / "engine")
    async with alone(tls, engine_ca=authority.ca) as (_, url, _):
        assert (await ask(url)).status == 503
    assert "its certificate is for no name, and <address> was expected" in told(caplog)[0]
    assert "Traceback" not in caplog.text


async def shake(tls: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that says by an alert why there is no agreement."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    end = tls.wrap_bio(incoming, outgoing, server_side=True)
    while data := await reader.read(1 << 16):
        incoming.write(data)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
        except ssl.SSLError:
            writer.write(outgoing.read())
            await reader.read()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received.",
            "it speaks no TLS, and it is to be asked by https: start it with --ssl-certfile and --ssl-keyfile, or name "
            "it by plain http, for requests in the clear",
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it speaks no TLS"),
        (b"", "it hung up during the TLS handshake"),
        (
            b"\x15\x03\x03\x00\x02\x02\x28",
            "it refuses TLS with this router (sslv3 alert handshake failure): see its log",
        ),
        (b"\x16\x03\x03\x00\x05hello", "its TLS makes no sense"),
        (b"\x16\x03\x03", "it hung up during the TLS handshake"),
    ],
    ids=["plain vLLM", "SSH", "nothing", "alert", "nonsense", "half a record"],
)
async def test_what_is_no_engine_with_tls_is_told_as_such(
    said: bytes, reason: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        writer.close()

    async with (
        in_place_of_engines(serve) as urls,
        running_server(prefill_urls=urls, decode_urls=urls, engine_ca=authority.ca) as (_, url),
    ):
        assert (await ask(url)).status == 503
    assert reason in told(caplog)[0]


@asynccontextmanager
async def in_place_of_engines(serve: Callable[..., Any]) -> AsyncIterator[list[str]]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionResetError):  # The router may leave with bytes that it did not read.
                await serve(reader, writer)
        finally:
            writer.transport.abort()

    other = await asyncio.start_server(connected, "127.0.0.1", fresh_port())
    try:
        yield [f"https://127.0.0.1:{other.sockets[0].getsockname()[1]}"]
    finally:
        other.close()


async def test_a_call_that_is_given_up_during_the_handshake_leaves_nothing(authority: Authority) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, _: object) -> None:
        arrived.set()
        await reader.read()
        left.set()

    async with in_place_of_engines(serve) as urls:
        settings: dict[str, Any] = {"engine_ca": authority.ca, "probe_timeout_s": 0.05, "probe_interval_s": 60.0}
        async with running_server(prefill_urls=urls, decode_urls=urls, **settings) as (server, url):
            arrived.clear()
            left.clear()
            client = await RawClient.connect(url)
            await client.send(raw(PROMPT))
            await arrived.wait()
            client.leave()
            await left.wait()
            await until(lambda: all(engine.pool.num_busy == 0 for engine in server.router.services.all_engines()))


# Files that cannot be used.


@pytest.mark.parametrize("flag", ["--engine-ca", "--internal-client-ca"])
async def test_a_file_that_cannot_be_used_is_refused_at_start_with_one_line(
    flag: str, tls_files: dict[str, Any], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.crt"
    empty.touch()
    ours = ["--internal-tls-cert", str(tls_files["tls_cert"]), "--internal-tls-key", str(tls_files["tls_key"])]
    router = await start_router("--prefill", "https://a:1", "--decode", "https://a:1", *ours, flag, str(empty))
    _, told = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert router.returncode == 2
    reason = "it has no certificate in PEM: name the file with the certificates to trust"
    assert told.decode() == f"pdcluster router: {flag} {empty}: {reason}\n"

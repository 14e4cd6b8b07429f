"""TLS on the client port: who is served, who is not, and what a start says."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from fakes.certificates import Authority
from fakes.hellos import CHANGE, claim, records, with_unknown_share
from fakes.reservations import SECRET
from fakes.router import COMPLETIONS, PROMPT, Rig, raw, running_rig, running_server, until
from integration.test_router_process import start_router
from integration.tls_clients import connect, ended, hello, port_of, trusting
from patience import PATIENCE_S
from pdcluster_router.front.start import warnings_of
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio
HUGE = 1 << 17
ALERT = b"\x15\x03\x03\x00\x02\x02\x2f"
"""``illegal_parameter``."""
TOO_MUCH = "a ClientHello of 131072 bytes, 16384 are allowed"


# Who is served.


async def test_a_client_that_trusts_the_authority_is_served(tls: Rig, authority: Authority) -> None:
    async with httpx.AsyncClient(verify=trusting(authority), base_url=tls.url) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=PROMPT) for _ in range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    assert answers[0].content == tls.decode.answer(tls.decode.seen[0])


async def test_the_openai_sdk_streams(tls: Rig, authority: Authority) -> None:
    over_tls = DefaultAsyncHttpxClient(verify=trusting(authority))
    async with AsyncOpenAI(base_url=f"{tls.url}/v1", api_key="none", max_retries=0, http_client=over_tls) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        words = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(words).startswith("Hello")


async def test_pages_know_that_they_are_asked_by_https(tls: Rig, authority: Authority) -> None:
    async with httpx.AsyncClient(verify=trusting(authority), base_url=tls.url) as client:
        assert (await client.get("/health/")).headers["location"].startswith("https://")


async def test_the_internal_port_stays_plain(tls: Rig) -> None:
    assert (await (await tls.internal()).get("/health")).status == 200
    assert await tls.metric("pdcluster_router_tls_certificate_expiry_seconds") > 0


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_of_today_are_spoken(tls: Rig, authority: Authority, version: ssl.TLSVersion) -> None:
    client = await connect(tls, trusting(authority, minimum_version=version, maximum_version=version))
    assert client.writer.get_extra_info("ssl_object").version() == f"TLSv1.{version - ssl.TLSVersion.TLSv1}"
    answers = [await client.post(COMPLETIONS, PROMPT) for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3


async def test_a_client_that_must_say_hello_twice_is_served(tls: Rig, authority: Authority) -> None:
    certificate = tls.router.certificate
    assert certificate is not None
    certificate.context.set_ecdh_curve("secp521r1")  # No client has a share of it in its first hello.
    async with httpx.AsyncClient(verify=trusting(authority), base_url=tls.url) as client:
        assert (await client.get("/health")).status_code == 200


async def test_a_client_that_offers_http2_too_gets_http1(tls: Rig, authority: Authority) -> None:
    context = trusting(authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    client = await connect(tls, context)
    assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


# Who is not. Each is told of once, and leaves nothing.


async def speak(rig: Rig, said: bytes) -> None:
    client = await connect(rig, None)
    await client.send(said)
    await client.reader.read()
    client.leave()


async def distrust(rig: Rig, _: Authority) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.to_thread(shake, port_of(rig))  # uvloop's own client says nothing before it leaves.


def shake(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as plain:
        ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")


async def offer_old_tls(rig: Rig, authority: Authority) -> None:
    old = ssl.TLSVersion.TLSv1_1
    context = trusting(authority, maximum_version=old)
    context.minimum_version = old
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await connect(rig, context)


async def offer_no_cipher_of_ours(rig: Rig, authority: Authority) -> None:
    context = trusting(authority, maximum_version=ssl.TLSVersion.TLSv1_2)
    context.set_ciphers("AES128-SHA")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await connect(rig, context)


async def leave_halfway(rig: Rig, authority: Authority) -> None:
    client = await connect(rig, None)
    await client.send(hello(authority))
    await client.reader.read(1)
    client.leave()


async def claim_too_much(rig: Rig, _: Authority) -> None:
    client = await connect(rig, None)
    await client.send(records(claim(HUGE)))
    assert await client.reader.read() == ALERT
    client.leave()


async def claim_too_much_in_the_second_hello(rig: Rig, authority: Authority) -> None:
    client = await connect(rig, None)
    await client.send(with_unknown_share(hello(authority)) + CHANGE + records(claim(HUGE), 1))
    assert (await client.reader.read()).endswith(ALERT)
    client.leave()


REFUSED: dict[str, tuple[Callable[[Rig, Authority], Any], str]] = {
    "plain HTTP": (lambda rig, _: speak(rig, raw(PROMPT)), "plain HTTP: use https://"),
    "another method": (lambda rig, _: speak(rig, b"DELETE / HTTP/1.1\r\n\r\n"), "plain HTTP: use https://"),
    "a proxy's words": (lambda rig, _: speak(rig, b"CONNECT a:1 HTTP/1.1\r\n\r\n"), "plain HTTP: use https://"),
    "HTTP/2 in the clear": (lambda rig, _: speak(rig, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "plain HTTP: use https://"),
    "zeros": (lambda rig, _: speak(rig, bytes(1000)), "wrong version number"),
    "a hello of 128 KiB": (claim_too_much, TOO_MUCH),
    "a second hello of 128 KiB": (claim_too_much_in_the_second_hello, TOO_MUCH),
    "two hellos in one record": (
        lambda rig, authority: speak(rig, records(with_unknown_share(hello(authority))[5:] + claim(HUGE))),
        "more behind its ClientHello in one record",
    ),
    "no hello": (lambda rig, _: speak(rig, b"\x16\x03\x01\x00\x04\xff\x00\x00\x00"), "unexpected message"),
    "no trust": (distrust, "tlsv1 alert unknown ca"),
    "TLS 1.1": (offer_old_tls, "unsupported protocol"),
    "no common cipher": (offer_no_cipher_of_ours, "no shared cipher"),
    "a client that leaves halfway": (leave_halfway, "the client left"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
@pytest.mark.parametrize("case", REFUSED)
async def test_no_agreement_is_told_once(
    case: str, tls: Rig, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    act, reason = REFUSED[case]
    await act(tls, authority)
    await until(lambda: not tls.server.server_state.connections)
    lines = [line for line in caplog.text.splitlines() if "failure kind=tls_refused" in line]
    assert [line.split("reason=")[1] for line in lines] == [reason]
    assert caplog.text.count("Traceback") == 0
    assert await tls.failures() == {"tls_refused": 1}
    assert tls.router.clients.num_open == 0


async def test_a_client_that_speaks_plain_http_is_told_what_to_do(tls: Rig) -> None:
    client = await connect(tls, None)
    answer = await client.post(COMPLETIONS, b"x" * 1_000_000)
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert answer.json()["error"]["message"] == "this port speaks TLS: use https://"
    assert await client.reader.read() == b""
    assert tls.decode.seen == []


async def test_a_probe_that_only_connects_is_no_failure(tls: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        (await connect(tls, None)).leave()
    await until(lambda: tls.router.clients.num_open == 0)
    assert await tls.failures() == {}
    assert "tls" not in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 1, 100])
async def test_a_handshake_has_no_longer_than_a_request(
    num_bytes: int, tls_files: dict[str, Any], authority: Authority
) -> None:
    async with running_rig(**tls_files, client_read_timeout_s=6.0) as rig:
        client = await connect(rig, None)
        await client.send(hello(authority)[:num_bytes])
        await ended(client.reader)
        await until(lambda: rig.router.clients.num_open == 0)
        assert await rig.failures() == ({"tls_refused": 1} if num_bytes else {})


async def test_connections_count_before_they_are_agreed_on(tls_files: dict[str, Any], authority: Authority) -> None:
    async with running_rig(**tls_files, max_connections=1) as rig:
        silent = await connect(rig, None)
        await until(lambda: rig.router.clients.num_open == 1)
        guest = await connect(rig, trusting(authority))
        assert (await guest.post(COMPLETIONS, PROMPT)).json()["error"]["code"] == "too_many_connections"
        older = await connect(rig, None)
        await until(lambda: rig.router.clients.num_open == 2)
        newest = await connect(rig, None)
        assert await older.reader.read() == b""
        for client in (silent, newest):
            client.leave()
        await until(lambda: rig.router.clients.num_open == 0)
        assert (await (await connect(rig, trusting(authority))).post(COMPLETIONS, PROMPT)).status == 200


async def test_a_router_that_ends_waits_for_no_handshake(tls_files: dict[str, Any], authority: Authority) -> None:
    urls = {"prefill_urls": ["http://127.0.0.1:1"], "decode_urls": ["http://127.0.0.1:1"]}
    async with running_server(**urls, **tls_files) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(hello(authority))
        await reader.read(1)
    await ended(reader)
    writer.close()


# What a start says.


@pytest.mark.parametrize(
    ("host", "has_tls", "is_told"),
    [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False)],  # bound by none
)
def test_a_start_says_where_what_clients_send_is_open(
    host: str, has_tls: bool, is_told: bool, tls_files: dict[str, Any]
) -> None:
    urls = {"prefill_urls": ["http://a:1"], "decode_urls": ["http://a:1"], "advertise_url": "http://b:1"}
    settings = build_settings(**{**urls, "host": host, **(tls_files if has_tls else {})})
    told = "clients are served without TLS: add --tls-cert and --tls-key, or put a gateway in front"
    assert (told in warnings_of(settings, SECRET)) is is_told


@asynccontextmanager
async def started(*flags: str) -> AsyncIterator[tuple[int, str]]:
    """The status and the words of a router that does not start."""
    router = await start_router("--prefill", "http://a:1", "--decode", "http://a:1", "--port", "0", *flags)
    _, told = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert router.returncode is not None
    yield router.returncode, told.decode()


async def test_a_certificate_without_its_key_is_refused_at_start(tls_files: dict[str, Any]) -> None:
    cert = tls_files["tls_cert"]
    async with started("--tls-cert", str(cert)) as (status, told):
        assert status == 2
        assert told == (
            f"pdcluster router: these settings do not fit: --tls-cert is {cert} and --tls-key is not given: "
            "give both files, or neither for plain HTTP\n"
        )


async def test_a_certificate_that_cannot_be_used_is_refused_at_start(
    tls_files: dict[str, Any], authority: Authority
) -> None:
    cert, key = tls_files["tls_cert"], tls_files["tls_key"]
    key.write_bytes(authority.issue().key_pem())
    async with started("--tls-cert", str(cert), "--tls-key", str(key)) as (status, told):
        assert status == 2
        assert told == (
            f"pdcluster router: --tls-cert {cert} and --tls-key {key}: "
            "the key is not that of the certificate: give two that belong together\n"
        )

"""A real Envoy asks a picker with TLS: who is served, who is refused, and what a renewed certificate changes."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from grpc import aio, ssl_channel_credentials

from fakes.certificates import FOR_CLIENTS, KINDS, Authority, Issued
from fakes.faults import Gate
from fakes.http import request_bytes
from fakes.reservations import SECRET
from fakes.router import COMPLETIONS, PROMPT, STREAM, Rig, until
from gateway.picker_tls import SERVER_NAME, PickerTls
from gateway.rig import EACH_MODE, Gatewayed, gateway, require_same
from integration.ports import fresh_port
from integration.test_router_process import start_router
from integration.tls_clients import der_of, trusting
from patience import PATIENCE_S
from pdcluster_router.front.start import warnings_of
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio

LOOK_S: Final = 0.02
NAMES: Final = (SERVER_NAME, "127.0.0.1")
REFUSED: Final = (500, 503)
HEALTH: Final = "/grpc.health.v1.Health/Check"


def picker_files(issued: Issued, folder: Path) -> dict[str, Any]:
    """The router's settings for this certificate."""
    return {f"picker_{name}": path for name, path in issued.write(folder).items()}


@pytest.fixture
def shown_files(authority: Authority, tmp_path: Path) -> dict[str, Any]:
    return picker_files(authority.issue(names=NAMES), tmp_path / "picker")


def client_folder(authority: Authority, folder: Path) -> Path:
    """A gateway's own certificate."""
    authority.issue(usage=FOR_CLIENTS).write(folder)
    return folder


@asynccontextmanager
async def tls_gateway(tls: PickerTls, modes: dict[str, str] | None = None, **settings: Any) -> AsyncIterator[Gatewayed]:
    async with gateway(modes, envoy={"picker_tls": tls}, **settings) as both:
        yield both


@EACH_MODE
async def test_a_gateway_that_trusts_the_authority_is_served(
    modes: dict[str, str], shown_files: dict[str, Any], authority: Authority
) -> None:
    async with tls_gateway(PickerTls(authority.ca), modes, **shown_files) as both:
        require_same(*await both.both(PROMPT))
        require_same(*await both.both(STREAM))


async def test_a_gateway_gives_nothing_to_a_picker_that_it_does_not_trust(
    shown_files: dict[str, Any], tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other.crt")
    async with tls_gateway(PickerTls(other.ca), **shown_files) as both:
        assert (await both.envoy.ask(PROMPT)).status in REFUSED
        assert both.rig.decode.seen == []


async def test_only_gateways_with_a_certificate_of_the_authority_may_ask(
    shown_files: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    good = client_folder(authority, tmp_path / "good")
    wrong = client_folder(Authority(tmp_path / "other.crt", "other"), tmp_path / "wrong")
    settings = {**shown_files, "picker_client_ca": authority.ca}
    async with tls_gateway(PickerTls(authority.ca, good), **settings) as both:
        require_same(*await both.both(PROMPT))
    for shows in (None, wrong):
        async with tls_gateway(PickerTls(authority.ca, shows), **settings) as both:
            assert (await both.envoy.ask(PROMPT)).status in REFUSED
            assert both.rig.decode.seen == []


async def test_a_gateway_in_the_clear_is_not_served(shown_files: dict[str, Any]) -> None:
    async with gateway(**shown_files) as both:
        assert (await both.envoy.ask(PROMPT)).status in REFUSED
        assert both.rig.decode.seen == []


# A certificate that is renewed.


async def shown(rig: Rig, authority: Authority) -> bytes:
    """The certificate that a new gateway is shown, which must trust it; empty: it does not."""
    address = ("127.0.0.1", rig.router.settings.picker_port)
    try:
        _, writer = await asyncio.open_connection(*address, ssl=trusting(authority))
    except ssl.SSLCertVerificationError:
        return b""
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


async def until_shown(rig: Rig, authority: Authority, issued: Issued) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await shown(rig, authority) != der_of(issued):
            await asyncio.sleep(LOOK_S)


async def test_new_connections_follow_a_renewal_while_an_old_stream_goes_on(
    shown_files: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    other, both_cas = Authority(tmp_path / "other.crt", "other"), tmp_path / "both.crt"
    both_cas.write_bytes(authority.ca.read_bytes() + other.ca.read_bytes())
    tls = PickerTls(both_cas, is_asked_anew=True)
    async with tls_gateway(tls, **shown_files, tls_interval_s=LOOK_S) as both:
        both.rig.decode.close_gate(Gate.SECOND_TOKEN)
        old = await both.envoy.client()
        await old.send(request_bytes(COMPLETIONS, json.dumps(STREAM).encode()))
        async with asyncio.timeout(PATIENCE_S):
            await old.reader.readuntil(b"Hello")
        new = other.issue(names=NAMES)
        new.write(tmp_path / "picker")
        await until_shown(both.rig, other, new)
        assert await shown(both.rig, authority) == b""
        assert (await both.envoy.ask(PROMPT)).status == 200
        both.rig.decode.open_gate(Gate.SECOND_TOKEN)
        async with asyncio.timeout(PATIENCE_S):
            assert (await old.reader.readuntil(b"0\r\n\r\n")).count(b"data:") == 4


async def test_a_renewed_authority_of_gateways_counts_for_the_next_connection(
    shown_files: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    other, trusted = Authority(tmp_path / "other.crt", "other"), tmp_path / "gateways.crt"
    trusted.write_bytes(other.ca.read_bytes())
    tls = PickerTls(authority.ca, client_folder(authority, tmp_path / "good"), is_asked_anew=True)
    async with tls_gateway(tls, **shown_files, picker_client_ca=trusted, tls_interval_s=LOOK_S) as both:
        assert (await both.envoy.ask(PROMPT)).status in REFUSED
        trusted.write_bytes(authority.ca.read_bytes())
        async with asyncio.timeout(PATIENCE_S):
            while (await both.envoy.ask(PROMPT)).status != 200:
                await asyncio.sleep(LOOK_S)


async def test_a_bad_replacement_changes_nothing_and_is_told_once(
    shown_files: dict[str, Any], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with tls_gateway(PickerTls(authority.ca, is_asked_anew=True), **shown_files, tls_interval_s=LOOK_S) as both:
        shown_files["picker_tls_key"].write_bytes(authority.issue().key_pem())
        await until(lambda: "tls certificate not changed" in caplog.text)
        await asyncio.sleep(10 * LOOK_S)
        assert caplog.text.count("tls certificate not changed") == 1
        require_same(*await both.both(PROMPT))


async def test_the_certificate_counts_in_the_metric_of_their_ends(
    shown_files: dict[str, Any], authority: Authority
) -> None:
    async with tls_gateway(PickerTls(authority.ca), **shown_files) as both:
        certificate = both.rig.router.picker_certificate
        assert certificate is not None
        told = await both.rig.metric("pdcluster_router_tls_certificate_expiry_seconds")
        assert told == certificate.expires_at


# The start, as a user has it.


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "gateways are answered without TLS, with the engines' key: let only them reach --picker-port"),
        (
            ("picker_tls_cert", "picker_tls_key"),
            "all that reach --picker-port are answered, with the engines' key: add --picker-client-ca, or let only "
            "gateways reach it",
        ),
        (("picker_tls_cert", "picker_tls_key", "picker_client_ca"), None),
    ],
    ids=["plain", "TLS", "mTLS"],
)
def test_a_start_says_what_gateways_port_leaves_open(flags: tuple[str, ...], told: str | None) -> None:
    urls = {"prefill_urls": ["http://1.1.1.1:1"], "decode_urls": ["http://1.1.1.1:1"], "advertise_url": "http://b:1"}
    files = dict.fromkeys(flags, "file")
    settings = build_settings(**urls, **files, host="0.0.0.0", picker_port=9002)  # bound by none
    found = [line for line in warnings_of(settings, SECRET) if "gateways" in line or "picker" in line]
    assert found == ([told] if told else [])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--picker-port=9002", "--picker-tls-cert=CERT"),
            "these settings do not fit: --picker-tls-cert is CERT and --picker-tls-key is not given: give both files, "
            "or neither for gRPC in the clear",
        ),
        (
            ("--picker-port=9002", "--picker-client-ca=CERT"),
            "these settings do not fit: --picker-client-ca: it needs --picker-tls-cert and --picker-tls-key",
        ),
        (
            ("--picker-tls-cert=CERT", "--picker-tls-key=KEY"),
            "these settings do not fit: --picker-tls-cert CERT: there is no port for gateways, give --picker-port "
            "with it",
        ),
        (
            ("--picker-port=9002", "--picker-tls-cert=CERT", "--picker-tls-key=KEY"),
            "--picker-tls-cert CERT and --picker-tls-key KEY: the key is Ed25519, with which Envoy and gRPC make no "
            "handshake: give one of RSA with 2048 bits or more, or of ECDSA with P-256 or P-384",
        ),
    ],
    ids=["half a pair", "an authority alone", "no port", "a key that gateways do not take"],
)
async def test_flags_that_cannot_work_are_refused_with_one_line(
    flags: tuple[str, ...], told: str, authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue(key=KINDS["Ed25519"]()).write(tmp_path / "picker")

    def named(text: str) -> str:
        return text.replace("CERT", str(files["tls_cert"])).replace("KEY", str(files["tls_key"]))

    engines = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--port", "0")
    router = await start_router(*engines, *map(named, flags))
    _, said = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert router.returncode == 2
    assert said.decode() == f"pdcluster router: {named(told)}\n"


async def test_a_router_process_follows_sighup_and_writes_no_line_of_grpcs(
    shown_files: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    port, other = fresh_port(), Authority(tmp_path / "other.crt", "other")
    files = [f"--{name.replace('_', '-')}={path}" for name, path in shown_files.items()]
    engines = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--port", "0")
    router = await start_router(*engines, f"--picker-port={port}", "--tls-interval=3600", *files)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await probe(port, authority.ca.read_bytes()) == b"\x08\x01"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()
            other.issue().write(tmp_path / "picker")
            router.send_signal(signal.SIGHUP)
            assert await probe(port, other.ca.read_bytes()) == b"\x08\x01"
    finally:
        router.terminate()
        said, logged = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert f"gateways ask at 127.0.0.1:{port} over TLS" in said.decode()
    assert ".cc:" not in logged.decode()


async def probe(port: int, ca: bytes) -> bytes:
    """What the port says of itself, as soon as it answers."""
    async with aio.secure_channel(f"127.0.0.1:{port}", ssl_channel_credentials(ca)) as channel:
        answer: bytes = await channel.unary_unary(HEALTH)(b"", wait_for_ready=True)
        return answer

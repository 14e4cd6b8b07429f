"""TLS on the internal port: decode's calls, by the connector's own client, and all else that is asked there."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.certificates import FOR_CLIENTS, Authority
from fakes.reservations import SECRET
from fakes.router import PROMPT, STREAM, Rig, post, running_rig, until
from integration.test_metaserver_client import RESERVATION, R
from integration.tls_clients import trusting
from patience import PATIENCE_S
from pdcluster_connector.metaserver_client import MetaserverClient
from pdcluster_connector.metaserver_tls import MetaserverTls, TlsFiles
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.metaserver import PrefillOutcome

pytestmark = pytest.mark.anyio
REACHED = "came without a token: ask through the router"
"""The router has read the call."""


def files_of(authority: Authority, folder: Path, **kinds: Any) -> dict[str, Any]:
    files = authority.issue(**kinds).write(folder)
    return {"internal_tls_cert": files["tls_cert"], "internal_tls_key": files["tls_key"]}


@pytest.fixture
async def inside(authority: Authority, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(**files_of(authority, tmp_path / "internal")) as rig:
        yield rig


async def reason_of(rig: Rig, tls: TlsFiles, url: str = "") -> str:
    """What decode learns of a call."""
    outcomes: deque[tuple[RequestId, PrefillOutcome]] = deque()
    client = MetaserverClient(outcomes, SECRET, MetaserverTls(tls))
    try:
        url = url or rig.router.settings.metaserver_url
        client.post(R, url, RESERVATION, deadline=time.monotonic() + PATIENCE_S)
        await until(lambda: bool(outcomes))
    finally:
        await asyncio.to_thread(client.close)
    return outcomes[0][1].reason


async def test_decode_is_told_an_https_url_and_requests_are_served(inside: Rig) -> None:
    answers = [await post(inside, body) for body in (PROMPT, STREAM)]
    assert [answer.status for answer in answers] == [200, 200]
    assert (inside.decode.seen[0].params or {})["metaserver"].startswith("https://127.0.0.1:")


async def test_the_connector_calls_a_router_that_it_trusts(inside: Rig, authority: Authority) -> None:
    assert REACHED in await reason_of(inside, TlsFiles(ca=str(authority.ca)))


async def test_a_connector_that_does_not_trust_the_router_says_what_it_expected(inside: Rig, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other.crt", "other")
    reason = await reason_of(inside, TlsFiles(ca=str(other.ca)))
    assert reason.startswith("the router's certificate is not trusted (unable to get local issuer certificate): ")
    assert "it must be signed by one of metaserver_ca" in reason


async def test_the_name_of_a_service_does_where_routers_are_called_by_address(
    authority: Authority, tmp_path: Path
) -> None:
    named = files_of(authority, tmp_path / "internal", names=["pool-router.ns.svc"])
    async with running_rig(**named) as rig:
        ca = str(authority.ca)
        assert "IP address mismatch" in await reason_of(rig, TlsFiles(ca=ca))
        assert REACHED in await reason_of(rig, TlsFiles(ca=ca, name="pool-router.ns.svc"))


async def test_no_call_goes_in_the_clear_where_tls_is_set(rig: Rig, authority: Authority) -> None:
    reason = await reason_of(rig, TlsFiles(ca=str(authority.ca)))
    assert reason.startswith("this engine calls routers by https, and this one's URL is plain http: start it with")
    assert await rig.failures() == {}


async def test_a_plain_port_that_is_called_by_https_is_told(rig: Rig, authority: Authority) -> None:
    url = rig.router.settings.metaserver_url.replace("http://", "https://")
    reason = await reason_of(rig, TlsFiles(ca=str(authority.ca)), url)
    assert reason.startswith("the router's internal port and this engine do not agree on TLS: ")


async def test_pages_are_asked_by_https_and_plain_http_is_told(inside: Rig, authority: Authority) -> None:
    async with httpx.AsyncClient(verify=trusting(authority), base_url=inside.internal_url) as client:
        assert (await client.get("/pdcluster/pool")).status_code == 200
    async with httpx.AsyncClient(base_url=inside.internal_url.replace("https", "http")) as client:
        refused = await client.get("/pdcluster/pool")
    assert refused.status_code == 400
    assert "use https://" in refused.text


async def test_connections_to_it_are_no_clients(authority: Authority, tmp_path: Path) -> None:
    async with running_rig(**files_of(authority, tmp_path / "internal"), max_connections=1) as rig:
        port = rig.router.settings.internal_port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        held = [await rig.internal() for _ in range(5)]
        assert (await post(rig)).status == 200
        assert [(await client.get("/health")).status for client in held] == [200] * 5
        for _, writer in silent:
            writer.close()


# Where callers must show who they are.


@pytest.fixture
async def asking(authority: Authority, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(**files_of(authority, tmp_path / "internal"), internal_client_ca=authority.ca) as rig:
        yield rig


async def test_a_connector_with_a_certificate_is_let_in(asking: Rig, authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(usage=FOR_CLIENTS, names=["decode"]).write(tmp_path / "decode")
    ours = TlsFiles(str(authority.ca), str(files["tls_cert"]), str(files["tls_key"]))
    assert REACHED in await reason_of(asking, ours)


async def test_who_shows_none_is_refused_and_told_of(
    asking: Rig, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    reason = await reason_of(asking, TlsFiles(ca=str(authority.ca)))
    assert "metaserver_cert" in reason
    assert "failure kind=tls_refused" in caplog.text
    assert "reason=the client has shown no certificate" in caplog.text


async def test_who_shows_a_foreign_one_is_refused(
    asking: Rig, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Authority(tmp_path / "foreign.crt", "foreign").issue(usage=FOR_CLIENTS).write(tmp_path / "foreign")
    context = trusting(authority)
    context.load_cert_chain(foreign["tls_cert"], foreign["tls_key"])
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        async with httpx.AsyncClient(verify=context, base_url=asking.internal_url) as client:
            await client.get("/health")
    await until(lambda: "reason=the client's certificate: unable to get local issuer certificate" in caplog.text)

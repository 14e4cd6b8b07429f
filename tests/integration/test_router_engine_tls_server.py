"""An engine's TLS by the server that vLLM has: uvicorn, with the arguments that vLLM's ``--ssl-...`` become.

As vLLM 0.32 ``entrypoints/openai/api_server.py``, ``serve_http``.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from fakes.certificates import FOR_CLIENTS, Authority
from fakes.router import until
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.errors import Unavailable
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.outage import Sign
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.trust import EngineTrust
from pdcluster_router.http.connections import IdleConnections, PoolLimits
from pdcluster_router.http.handshakes import Handshakes
from pdcluster_router.settings.router_settings import build_settings
from pdcluster_router.telemetry.failures import Failures

pytestmark = pytest.mark.anyio


async def app(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message.get("more_body"):
            break
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(**flags: Any) -> AsyncIterator[int]:
    """The port of a server with these arguments of uvicorn."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none", **flags))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.force_exit = True
        await server.shutdown()


@asynccontextmanager
async def asking(port: int, **settings: Any) -> AsyncIterator[Engine]:
    """The engine at this port, as a router with these settings asks it."""
    urls = {"prefill_urls": ["https://p:1"], "decode_urls": [f"https://127.0.0.1:{port}"]}
    loop, told = asyncio.get_running_loop(), build_settings(**urls, **settings)
    engine = Engine(
        "decode-0",
        Member(urls["decode_urls"][0], Role.DECODE),
        PoolLimits(4, EDGE_S, EDGE_S),
        IdleConnections(),
        on_idle=lambda: None,
        on_breaker=lambda _: None,
        now=loop.time,
        trust=EngineTrust(told, Handshakes(loop.call_soon), Failures(lambda _: None, loop.time)),
    )
    try:
        yield engine
    finally:
        await engine.close()


def files_of(authority: Authority, folder: Path, **kinds: Any) -> list[str]:
    return list(map(str, authority.issue(**kinds).write(folder).values()))


@pytest.fixture
def ssl_flags(authority: Authority, tmp_path: Path) -> dict[str, Any]:
    return dict(zip(("ssl_certfile", "ssl_keyfile"), files_of(authority, tmp_path / "engine"), strict=True))


async def test_large_bodies_go_both_ways(authority: Authority, ssl_flags: dict[str, Any]) -> None:
    body = bytes(range(256)) * (4 << 10)
    async with serving(**ssl_flags) as port, asking(port, engine_ca=authority.ca) as engine:
        assert await engine.probe(timeout_s=EDGE_S) is Sign.WELL
        answers = [await engine.fetch("/echo", timeout_s=PATIENCE_S, body=body) for _ in range(3)]
        assert [answer.body == body for answer in answers] == [True] * 3
        assert len(engine.pool._all) == 1


async def test_an_idle_connection_that_the_server_closes_is_gone_and_another_is_made(
    authority: Authority, ssl_flags: dict[str, Any]
) -> None:
    async with serving(**ssl_flags, timeout_keep_alive=1) as port, asking(port, engine_ca=authority.ca) as engine:
        for _ in range(2):
            assert (await engine.fetch("/echo", timeout_s=PATIENCE_S, body=b"x")).body == b"x"
            await until(lambda: not engine.pool._all)


async def test_a_server_that_asks_is_shown_our_certificate(
    authority: Authority, ssl_flags: dict[str, Any], tmp_path: Path
) -> None:
    asks = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": str(authority.ca)}
    cert, key = files_of(authority, tmp_path / "router", usage=FOR_CLIENTS)
    async with serving(**ssl_flags, **asks) as port:
        async with asking(port, engine_ca=authority.ca, engine_cert=cert, engine_key=key) as engine:
            assert (await engine.fetch("/echo", timeout_s=PATIENCE_S, body=b"x")).body == b"x"
        async with asking(port, engine_ca=authority.ca) as engine:
            with pytest.raises(Unavailable, match=r"hung up right behind the TLS handshake: .*--engine-cert"):
                await engine.fetch("/echo", timeout_s=PATIENCE_S, body=b"x")
            assert await engine.probe(timeout_s=EDGE_S) is Sign.UNKNOWN


async def test_a_plain_server_is_told_as_such(authority: Authority) -> None:
    async with serving() as port, asking(port, engine_ca=authority.ca) as engine:
        with pytest.raises(Unavailable, match="decode-0: it speaks no TLS, and it is to be asked by https"):
            await engine.fetch("/echo", timeout_s=PATIENCE_S, body=b"x")
        assert await engine.probe(timeout_s=EDGE_S) is Sign.UNKNOWN

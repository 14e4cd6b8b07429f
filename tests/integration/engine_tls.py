"""A router before engines with TLS that it may not trust."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from fakes.engine import FakeEngine, Wire
from fakes.http import Message, RawClient
from fakes.router import COMPLETIONS, PROMPT, running_server
from patience import PATIENCE_S
from pdcluster_router.front.server import RouterServer

LOOK_S: Final = 0.01


@asynccontextmanager
async def alone(tls: ssl.SSLContext, **settings: Any) -> AsyncIterator[tuple[RouterServer, str, list[FakeEngine]]]:
    """A router whose engines need not be well."""
    engines = [FakeEngine(wire) for wire in [Wire()] * 2]
    for engine in engines:
        await engine.start(tls=tls)
    urls = [engine.url for engine in engines]
    try:
        async with running_server(prefill_urls=[urls[0]], decode_urls=[urls[1]], **settings) as (server, url):
            yield server, url, engines
    finally:
        for engine in engines:
            await engine.stop()


async def ask(url: str) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await RawClient.connect(url)).post(COMPLETIONS, PROMPT)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.text.splitlines() if "failure kind=engine_tls_refused" in line]

"""``/healthz``, ``/readyz`` and ``/metrics``, on one port.

kopf's own probe is not used: it answers 200 as long as the event loop runs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from pdcluster_protocol.errors import ConfigError

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the page of metrics."""

WhyNot = Callable[[], list[str]]
"""Returns the reasons for which a probe fails, as sentences; an empty list: the probe passes."""


@asynccontextmanager
async def serve_probes(
    host: str | None, port: int, *, health: WhyNot, readiness: WhyNot, metrics: Callable[[], bytes]
) -> AsyncIterator[int]:
    """Answer probes and metrics until the block ends. Yields the port.

    Raises:
        ConfigError: Another process listens on the port, or ``host`` is no address of this machine.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _answer(health())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(readiness())

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", show_metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await _listen(runner, host, port)
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str | None, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        where = f"port {port} of {host or 'any address'}"
        raise ConfigError(
            f"cannot listen on {where} ({os.strerror(error.errno or 0)}): choose another --port or --host"
        ) from error


def _answer(problems: list[str]) -> web.Response:
    return web.Response(text="".join(f"{line}\n" for line in problems or ["ok"]), status=503 if problems else 200)

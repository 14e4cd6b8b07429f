"""A router process, started as a user does, with fake engines on sockets before it: for tests that attack it."""

from __future__ import annotations

import asyncio
import re
import resource
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fakes.engine import FakeEngine, Wire
from fakes.http import Message, RawClient
from fakes.router import COMPLETIONS, Peers
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.secret import Secret, load_secret

PATIENT: Final = ("--probe-timeout", str(EDGE_S), "--connect-timeout", str(EDGE_S))
"""Beside other work on the machine an engine of the test may answer late; that is nobody's attack."""


@dataclass
class Scene(Peers):
    """A router process and its peers."""

    pid: int
    said: list[str]
    """Its first lines."""
    log: Path
    secret: Secret

    @property
    def url(self) -> str:
        return self.said[0].split()[-1]

    @property
    def internal_url(self) -> str:
        return self.said[1].split()[-1]

    async def client(self) -> RawClient:
        return await self.connect(self.url)

    async def internal(self) -> RawClient:
        return await self.connect(self.internal_url)

    async def ask(self, body: object, path: str = COMPLETIONS, headers: dict[str, str] | None = None) -> Message:
        """The answer to one request on a connection of its own."""
        async with asyncio.timeout(PATIENCE_S):
            return await (await self.client()).post(path, body, headers)

    async def get(self, path: str, *, is_internal: bool = False, headers: dict[str, str] | None = None) -> Message:
        client = await (self.internal() if is_internal else self.client())
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        async with asyncio.timeout(PATIENCE_S):
            await client.send(f"GET {path} HTTP/1.1\r\nhost: a\r\n{lines}\r\n".encode())
            return await client.receive()

    async def metric(self, name: str) -> float:
        """The value of one sample, by its whole name with labels."""
        text = (await self.get("/metrics", is_internal=True)).body.decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return float(values[name])

    def num_bytes(self, field_name: str) -> int:
        """``VmRSS`` or ``VmHWM`` of the process."""
        found = re.search(rf"{field_name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) << 10


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_scene(
    *flags: str, num_prefill: int = 1, num_decode: int = 1, descriptors: int | None = None
) -> AsyncIterator[Scene]:
    """Everything runs and is healthy; at the end it has ended. ``descriptors``: as many the router may open."""
    secret, wire = load_secret({}, host="127.0.0.1"), Wire()  # Neither the router nor its engines are given one.
    prefills = [FakeEngine(wire, secret) for _ in range(num_prefill)]
    decodes = [FakeEngine(wire, secret) for _ in range(num_decode)]
    for engine in (*prefills, *decodes):
        await engine.start()
    urls = [f"--prefill={engine.url}" for engine in prefills] + [f"--decode={engine.url}" for engine in decodes]
    try:
        async with running_router([*urls, *PATIENT, *flags], descriptors) as (pid, said, log):
            yield Scene(pid, said, log, secret, prefills=prefills, decodes=decodes)
    finally:
        for engine in (*prefills, *decodes):
            await engine.stop()


@asynccontextmanager
async def running_router(
    flags: list[str], descriptors: int | None = None
) -> AsyncIterator[tuple[int, list[str], Path]]:
    """Process id, first lines and log of a router that says it is well."""
    limit = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "router", sys.executable, "-m", "pdcluster_router"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        router = await asyncio.create_subprocess_exec(*command, "--port=0", *flags, stdout=PIPE, stderr=log)
        try:
            said = await _first_lines(router.stdout)
            await until(lambda: _is_well(said[0].split()[-1]))
            yield router.pid, said, Path(folder) / "log"
        finally:
            with suppress(ProcessLookupError):  # A test may have killed it.
                router.kill()
            await router.wait()


async def _first_lines(stdout: asyncio.StreamReader | None) -> list[str]:
    """Up to what it says of a secret that is not set."""
    assert stdout is not None
    said: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while not said or "PDCLUSTER_SECRET" not in said[-1]:
            line = (await stdout.readline()).decode()
            assert line, f"the router has ended after {said}"
            said.append(line)
    return said


async def _is_well(url: str) -> bool:
    client = await RawClient.connect(url)
    try:
        return (await client.get("/health")).status == 200
    finally:
        client.leave()

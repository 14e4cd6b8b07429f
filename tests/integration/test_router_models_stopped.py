"""An engine that has stopped is asked for its models by many clients."""

from __future__ import annotations

import asyncio
import time

import pytest

from patience import EDGE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.engines import models as models_of_engines
from pdcluster_router.engines.roster import Roster
from pdcluster_router.http.connections import PoolLimits

pytestmark = pytest.mark.anyio


async def test_many_that_ask_for_its_models_take_one_connection_at_a_time_and_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models_of_engines, "TIMEOUT_S", 1.0)
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    # With one connection at most a second question at once would fail for want of another.
    roster = Roster(PoolLimits(1, EDGE_S, EDGE_S), least_tokens, lambda: None, lambda _: None, time.monotonic)
    roster.update([Member(url, role) for role in Role])
    models = models_of_engines.Models(roster, lambda: 0.0)
    began = time.monotonic()
    asked = await asyncio.gather(*(models.read(b"") for _ in range(80)), return_exceptions=True)
    assert [str(error) for error in asked] == ["decode-0 sent no list of models within 1 s"] * 80
    assert connections
    assert time.monotonic() - began < EDGE_S  # Not one limit after the other: 80 s.
    for writer in connections:
        writer.close()
    server.close()

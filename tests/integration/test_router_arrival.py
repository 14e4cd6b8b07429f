"""The time before a request's arrival, as ``pdcluster why`` is told it: its bytes come, and it waits for its turn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import pytest

from fakes.access_log import Log, ask, logged_rig
from fakes.faults import Gate
from fakes.router import PROMPT, raw, running_rig, until
from integration.test_router_why import about
from patience import PATIENCE_S
from pdcluster_router.http.reading import MAX_HEADER_LINES
from pdcluster_router.http.turns import FREE_BYTES

pytestmark = pytest.mark.anyio

PAUSE_S: Final = 0.02


async def pause() -> float:
    """Returns the seconds that it took: uvloop's timers have whole milliseconds, and may fire before ``PAUSE_S``."""
    began_at = time.monotonic()
    await asyncio.sleep(PAUSE_S)
    return time.monotonic() - began_at


@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=["whole", "in parts"])
async def test_the_time_in_which_a_body_comes_is_told(more: dict[str, int]) -> None:
    async with running_rig() as rig:
        client = await rig.client()
        head, end, body = raw({**PROMPT, **more}, **{"x-request-id": "R"}).partition(b"\r\n\r\n")
        begun_at = time.monotonic()
        await client.send(head + end)
        await until(lambda: rig.connection_of(client).cycle is not None)
        pause_s = await pause()
        await client.send(body)
        await client.receive()
        request = await about(rig, "R")
        whole_s = time.monotonic() - begun_at
    assert request.read_s is not None
    assert request.total_s is not None
    assert request.read_s >= pause_s
    assert request.turn_s is None
    assert request.read_s + request.total_s <= whole_s


async def test_the_wait_behind_an_earlier_request_of_its_connection_is_told_apart() -> None:
    async with running_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await rig.client()
        await client.send(raw() + raw(**{"x-request-id": "R"}))
        await rig.prefill.next_request()
        seen_at = time.monotonic()
        pause_s = await pause()
        rig.prefill.open_gate(Gate.PREFILL)
        for _ in range(2):
            await client.receive()
        request = await about(rig, "R")
        whole_s = time.monotonic() - seen_at
    assert request.read_s is not None
    assert request.turn_s is not None
    assert request.total_s is not None
    assert request.turn_s >= pause_s
    assert request.total_s <= whole_s - pause_s


async def test_a_large_body_that_came_at_once_has_waited_for_its_turn() -> None:
    async with running_rig() as rig:
        await ask(rig, {**PROMPT, "prompt": "x" * 2 * FREE_BYTES}, x_request_id="R")
        request = await about(rig, "R")
    assert request.turn_s is not None
    assert request.turn_s >= 0


async def test_a_request_that_came_too_slowly_says_how_long_it_was_waited_for() -> None:
    async with running_rig() as rig:
        client = await rig.served_client()
        rig.change_settings(client_read_timeout_s=2 * PAUSE_S)
        await client.send(raw(**{"x-request-id": "R"})[:-1])
        assert (await client.receive()).status == 408
        rig.change_settings(client_read_timeout_s=PATIENCE_S)
        request = await about(rig, "R")
    assert (request.error, request.total_s) == ("client_too_slow", None)
    assert request.read_s is not None
    assert request.read_s >= PAUSE_S


async def test_the_access_log_too_counts_from_the_first_byte_of_the_head(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    async with logged_rig(log) as rig:
        client = await rig.client()
        begun_at = time.monotonic()
        await client.send(raw()[:20])
        await until(lambda: rig.connection_of(client).is_in_message)
        pause_s = await pause()
        await client.send(raw()[20:])
        await client.receive()
        whole_s = time.monotonic() - begun_at
    assert pause_s <= log.line["read_s"] <= whole_s


@pytest.mark.parametrize("more", [{}, {"upgrade": "h2c", "connection": "Upgrade, HTTP2-Settings"}])
async def test_a_head_that_comes_slowly_is_counted_also_one_that_offers_an_upgrade(more: dict[str, str]) -> None:
    async with running_rig() as rig:
        client = await rig.client()
        message = raw(**{"x-request-id": "R", **more})
        await client.send(message[:20])
        await until(lambda: rig.connection_of(client).is_in_message)
        pause_s = await pause()
        await client.send(message[20:])
        await client.receive()
        request = await about(rig, "R")
    assert request.read_s is not None
    assert request.read_s >= pause_s


async def test_a_request_refused_in_its_turn_has_waited_for_it() -> None:
    async with running_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await rig.client()
        await client.send(raw() + raw("no object", **{"x-request-id": "R"}))
        await rig.prefill.next_request()
        pause_s = await pause()
        rig.prefill.open_gate(Gate.PREFILL)
        for _ in range(2):
            await client.receive()
        request = await about(rig, "R")
    assert request.error == "invalid_request"
    assert request.turn_s is not None
    assert request.turn_s >= pause_s


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("is_logged", [False, True])
async def test_a_head_that_is_refused_tells_its_time_with_an_access_log_and_without(
    is_logged: bool, is_behind: bool, tmp_path: Path
) -> None:
    async with logged_rig(Log(tmp_path / "log")) if is_logged else running_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await rig.client()
        if is_behind:
            await client.send(raw())
            await rig.prefill.next_request()
        head, _, _ = raw(**{"x-request-id": "R"}).partition(b"\r\n\r\n")
        await client.send(head + b"\r\n")
        await until(lambda: bool(rig.connection_of(client).headers))
        read_s = await pause()
        await client.send(b"x: 1\r\n" * MAX_HEADER_LINES + b"\r\n")
        await until(lambda: rig.connection_of(client).is_deaf)
        turn_s = await pause() if is_behind else 0.0
        rig.prefill.open_gate(Gate.PREFILL)
        for _ in range(1 + is_behind):
            await client.receive()
        request = await about(rig, "R")
    assert request.error == "too_many_headers"
    assert request.read_s is not None
    assert request.read_s >= read_s
    assert (request.turn_s or 0.0) >= turn_s

"""TLS to engines: who is asked, who is not and what is said of it, and that all promises of a plain engine hold."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import FOR_CLIENTS, Authority
from fakes.faults import Fault, Gate
from fakes.router import PROMPT, STREAM, Rig, post, raw, running_rig, send, until
from integration.engine_tls import LOOK_S, alone, ask, told
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

BOTH = ["decode-0", "prefill-0"]


@pytest.fixture
async def far(authority: Authority, tmp_path: Path) -> AsyncIterator[Rig]:
    """A router with engines that have TLS."""
    tls = authority.issue().server(tmp_path / "engine")
    async with running_rig(engine_tls=tls, engine_ca=authority.ca) as rig:
        yield rig


# Who is asked.


@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
async def test_a_pair_with_tls_serves(far: Rig, body: dict[str, object]) -> None:
    answer = await post(far, body)
    assert answer.status == 200
    assert answer.is_whole
    assert far.prefill.seen[0].params is not None


async def test_what_is_passed_on_takes_the_same_way(far: Rig) -> None:
    client = await far.client()
    assert (await client.get("/v1/models")).status == 200
    assert (await client.post("/tokenize", PROMPT)).status == 200


async def test_a_handshake_is_once_for_each_connection(far: Rig) -> None:
    before = far.decode.num_connections
    for _ in range(20):
        assert (await post(far)).status == 200
    assert far.decode.num_connections - before <= 2  # One may be a probe's.


async def test_a_large_body_arrives_whole(far: Rig) -> None:
    body = {**PROMPT, "prompt": "x" * 7_000_000}
    assert (await post(far, body)).status == 200
    assert len(far.decode.seen[0].body["prompt"]) == 7_000_000


async def test_a_client_that_leaves_stops_both_engines(far: Rig) -> None:
    far.prefill.close_gate(Gate.PREFILL)
    client = await send(far, STREAM)
    order = await far.prefill.next_request()
    client.leave()
    await order.ended.wait()
    await far.decode.seen[0].ended.wait()
    assert order.is_disconnected


async def test_what_a_client_does_not_take_stays_with_the_engine(far: Rig) -> None:
    far.decode.tokens, far.decode.padding = ["x"] * 400, "y" * 50_000
    client = await send(far, STREAM)
    await client.reader.readuntil(b"x")
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport for both ways
    pools = [engine.pool for engine in far.router.services.all_engines()]
    await until(lambda: any(connection._is_paused for pool in pools for connection in pool._all))
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
    rest = await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), PATIENCE_S)
    assert rest.count(b"data: ") == 400 + 1


async def test_an_answer_that_is_cut_is_told(far: Rig) -> None:
    far.decode.fault = Fault.DIE_MID_STREAM
    answer = await post(far, STREAM)
    assert b'"error"' in answer.body


async def test_connections_that_engines_have_closed_lose_no_request(far: Rig) -> None:
    assert (await post(far)).status == 200
    for engine in (far.prefill, far.decode):
        for writer in list(engine.open_connections):
            writer.close()
    answers = [await post(far) for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3


async def test_a_crowd_of_which_a_third_leaves_is_served_and_leaves_nothing(far: Rig) -> None:
    far.prefill.close_gate(Gate.PREFILL)
    clients = [await send(far, STREAM if number % 2 else PROMPT) for number in range(120)]
    await until(lambda: len(far.prefill.seen) == 120)
    for client in clients[::3]:
        client.leave()
    far.prefill.open_gate(Gate.PREFILL)
    stay = [client for number, client in enumerate(clients) if number % 3]
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*(client.receive() for client in stay))
    assert [(answer.status, answer.is_whole) for answer in answers] == [(200, True)] * 80


async def test_a_request_that_the_engine_had_hung_up_on_before_goes_to_it_again(far: Rig) -> None:
    assert (await post(far)).status == 200
    client = await far.client()
    far.decode.hang_up_on_all()
    far.feed(client, raw(PROMPT))
    assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
    assert await far.failures() == {"decode_unreached": 1}


async def test_the_name_that_was_given_is_expected_in_place_of_the_address(
    authority: Authority, tmp_path: Path
) -> None:
    tls = authority.issue(names=["engines.ns.svc"]).server(tmp_path / "engine")
    asked: list[str | None] = []
    tls.sni_callback = lambda _, name, __: asked.append(name)
    async with running_rig(engine_tls=tls, engine_ca=authority.ca, engine_tls_name="engines.ns.svc") as rig:
        assert (await post(rig)).status == 200
    assert set(asked) == {"engines.ns.svc"}


async def test_an_engines_own_certificate_can_be_trusted_itself(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue()
    alone = tmp_path / "alone.crt"
    alone.write_bytes(issued.pem)
    async with running_rig(engine_tls=issued.server(tmp_path / "engine"), engine_ca=alone) as rig:
        assert (await post(rig)).status == 200


# Engines that ask who the router is.


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_an_engine_that_asks_is_shown_our_certificate(
    version: ssl.TLSVersion, authority: Authority, tmp_path: Path
) -> None:
    tls = authority.issue().server(tmp_path / "engine", asks=authority.ca)
    tls.minimum_version = tls.maximum_version = version
    async with running_rig(engine_tls=tls, engine_ca=authority.ca, **ours(authority, tmp_path)) as rig:
        assert (await post(rig)).status == 200


def ours(authority: Authority, folder: Path) -> dict[str, Any]:
    """The router's settings for a certificate that it shows engines."""
    files = authority.issue(usage=FOR_CLIENTS, names=["router"]).write(folder / "router")
    return {"engine_cert": files["tls_cert"], "engine_key": files["tls_key"]}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_an_engine_that_asks_a_router_without_one_is_told_of(
    version: ssl.TLSVersion, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.issue().server(tmp_path / "engine", asks=authority.ca)
    tls.minimum_version = tls.maximum_version = version
    async with alone(tls, engine_ca=authority.ca, probe_interval_s=LOOK_S) as (server, url, engines):
        answer = await ask(url)
        assert answer.status >= 500
        await until(lambda: sum(server.router.services.failures.recent().values()) > 10)
        assert [engine.seen for engine in engines] == [[], []]
        lines = told(caplog)
        assert sorted(line.split("engine=")[1].split()[0] for line in lines) == BOTH
        words = (*lines, answer.body.decode())
        assert all("--engine-cert" in word for word in words), words


# Files that change.


async def test_a_replaced_authority_is_trusted_without_a_restart(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = tmp_path / "trusted.crt"
    other = Authority(tmp_path / "other.crt", "other")
    ca.write_bytes(other.ca.read_bytes())
    tls = authority.issue().server(tmp_path / "engine")
    async with alone(tls, engine_ca=ca, tls_interval_s=LOOK_S, probe_interval_s=LOOK_S) as (server, url, engines):
        assert (await ask(url)).status == 503
        ca.write_bytes(other.ca.read_bytes() + authority.ca.read_bytes())
        await until(lambda: all(engine.is_healthy for engine in server.router.services.all_engines()))
        assert (await ask(url)).status == 200
        assert len(told(caplog)) == 2
        trusted = server.router.services.trust._context
        ca.write_bytes(other.ca.read_bytes())
        await until(lambda: server.router.services.trust._context is not trusted)

        def is_each_told_again() -> bool:
            """They were trusted meanwhile. A handshake that began before may end after a look, and its connection is
            then as good as any until the engine hangs up."""
            for engine in engines:
                engine.hang_up_on_all()
            return all(sum(f"engine={name}" in line for line in told(caplog)) >= 2 for name in BOTH)

        await until(is_each_told_again)


async def test_files_that_cannot_be_used_change_nothing(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = tmp_path / "trusted.crt"
    ca.write_bytes(authority.ca.read_bytes())
    tls = authority.issue().server(tmp_path / "engine")
    async with running_rig(engine_tls=tls, engine_ca=ca, tls_interval_s=LOOK_S) as rig:
        ca.write_bytes(b"nothing")
        await until(lambda: "engines' tls not changed reason=--engine-ca" in caplog.text)
        for engine in (rig.prefill, rig.decode):
            engine.hang_up_on_all()
        assert (await post(rig)).status == 200

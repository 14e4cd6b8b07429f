"""Who the client is: in the access log, in what ``pdcluster why`` is told, and in nothing that an engine gets."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fakes.access_log import KEY, Log, ask, logged_rig, some
from fakes.faults import Gate
from fakes.http import Message, RawClient
from fakes.router import COMPLETIONS, PROMPT, Rig, orders, post, running_rig, send, until
from integration.test_router_process import process
from integration.tls_clients import port_of
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

CLIENT, MADE_UP = "203.0.113.7", "198.51.100.9"
TRUSTING: dict[str, Any] = {"trusted_proxies": ["127.0.0.1"]}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "access")


async def ask_from(rig: Rig, address: str, **headers: str) -> Message:
    """The answer to a peer of the loopback network."""
    ends = await asyncio.open_connection("127.0.0.1", port_of(rig), local_addr=(address, 0))
    client = RawClient(*ends)
    rig.clients.append(client)
    async with asyncio.timeout(PATIENCE_S):
        return await client.post(COMPLETIONS, PROMPT, {name.replace("_", "-"): headers[name] for name in headers})


async def test_without_trusted_proxies_the_peer_is_the_client_whatever_headers_say(log: Log) -> None:
    async with logged_rig(log) as rig:
        await ask(rig, x_forwarded_for=CLIENT, forwarded=f"for={CLIENT}", x_real_ip=CLIENT)
        await ask_from(rig, "127.0.0.9", x_forwarded_for=CLIENT)
        await ask(rig, PROMPT, "/tokenize", x_forwarded_for=CLIENT)
    assert [line["client_address"] for line in log.lines] == ["127.0.0.1", "127.0.0.9", "127.0.0.1"]


async def test_a_trusted_proxy_is_believed_and_no_other_peer(log: Log) -> None:
    async with logged_rig(log, **TRUSTING) as rig:
        await ask(rig, x_forwarded_for=f"{MADE_UP}, {CLIENT}, 127.0.0.1")
        await ask_from(rig, "127.0.0.9", x_forwarded_for=MADE_UP)
    assert [line["client_address"] for line in log.lines] == [CLIENT, "127.0.0.9"]


async def test_each_request_of_a_proxys_connection_has_its_own_client(log: Log) -> None:
    async with logged_rig(log, **TRUSTING) as rig:
        client = await rig.client()
        for address in (CLIENT, "2001:db8::7", "unknown"):
            await client.post(COMPLETIONS, PROMPT, {"X-Forwarded-For": address})
        await client.post("/tokenize", PROMPT, {"X-Forwarded-For": CLIENT})
        await client.post("/nowhere", PROMPT, {"X-Forwarded-For": CLIENT})
    told = [line["client_address"] for line in log.lines]
    assert told == [CLIENT, "2001:db8::7", "127.0.0.1", CLIENT, CLIENT]


async def test_the_header_of_rfc_7239_is_read_where_it_is_chosen(log: Log) -> None:
    async with logged_rig(log, **TRUSTING, forwarded_header="forwarded") as rig:
        await ask(rig, forwarded=f'for=", for="{CLIENT}:47"', x_forwarded_for=MADE_UP)
    assert log.line["client_address"] == CLIENT


async def test_no_client_takes_its_proxys_word_away(log: Log) -> None:
    async with logged_rig(log, **TRUSTING) as rig:
        await ask(rig, connection="X-Forwarded-For", x_forwarded_for=CLIENT)
    assert log.line["client_address"] == CLIENT


async def test_of_a_head_that_is_not_whole_no_header_is_believed(log: Log) -> None:
    """The proxy's own line may be one of those that have not come."""
    lines = b"".join(b"x-%d: a\r\n" % number for number in range(300))
    async with logged_rig(log, **TRUSTING) as rig:
        client = await rig.client()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-forwarded-for: %b\r\n" % MADE_UP.encode()
        await client.send(head + lines + b"x-forwarded-for: %b\r\n\r\n" % CLIENT.encode())
        assert (await client.receive()).status == 431
    assert some(log.line, "client_address", "status") == ("127.0.0.1", 431)


async def test_refused_and_limited_requests_have_their_clients(log: Log, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()} team-a requests_per_minute=1\n")
    async with logged_rig(log, **TRUSTING, api_key_file=keys) as rig:
        for number, key in enumerate(("wrong", KEY, KEY)):
            await ask(rig, authorization=f"Bearer {key}", x_forwarded_for=CLIENT, x_request_id=f"R-{number}")
        kept = [rig.router.services.kept.find(f"R-{number}")[0] for number in range(3)]
    assert [some(line, "status", "client_address") for line in log.lines] == [(s, CLIENT) for s in (401, 200, 429)]
    assert [(one.status, one.client_address) for one in kept] == [(s, CLIENT) for s in (401, 200, 429)]


async def test_a_request_that_runs_or_waits_tells_its_client(log: Log) -> None:
    async with logged_rig(log, **TRUSTING, max_prefill_backlog_tokens=1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await send(rig, **{"x-request-id": "runs", "x-forwarded-for": CLIENT})]
        await rig.prefill.next_request()
        clients.append(await send(rig, **{"x-request-id": "waits", "x-forwarded-for": CLIENT}))
        await until(lambda: rig.router.services.num_queued == 1)
        for name in ("runs", "waits"):
            answer = (await (await rig.internal()).get(f"/pdcluster/requests?id={name}")).json()
            assert answer["requests"][0]["client_address"] == CLIENT
        rig.prefill.open_gate(Gate.PREFILL)
        for client in clients:
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200


async def test_without_an_access_log_no_address_is_kept() -> None:
    async with running_rig(**TRUSTING) as rig:
        assert (await post(rig, headers={"X-Forwarded-For": CLIENT, "X-Request-Id": "R-7"})).status == 200
        (kept,) = rig.router.services.kept.find("R-7")
    assert kept.client_address == ""


async def test_no_address_goes_to_an_engine() -> None:
    names = ("X-Forwarded-For", "Forwarded", "X-Real-IP", "True-Client-IP", "CF-Connecting-IP", "X-Client-IP")
    async with running_rig(**TRUSTING) as rig:
        await post(rig, headers={**dict.fromkeys(names, CLIENT), "X-Forwarded-Proto": "https", "X-Other": "kept"})
        for seen in (*rig.decode.seen, *orders(rig)):
            assert seen.message.headers["x-other"] == "kept"
            assert CLIENT not in str(seen.message.headers)


async def test_a_router_as_it_is_started_tells_its_clients(log: Log) -> None:
    flags = ("--access-log", str(log.path), "--trusted-proxies", "10.0.0.0/8,127.0.0.1", "--log-format", "json")
    async with process(*flags) as (router, url, _, _):
        client = await RawClient.connect(url)
        answer = await client.post(COMPLETIONS, PROMPT, {"X-Forwarded-For": f"{MADE_UP}, {CLIENT}, 10.1.2.3"})
        assert answer.status == 200
        router.terminate()
        assert await router.wait() == 0
    assert log.line["client_address"] == CLIENT

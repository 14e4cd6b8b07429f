"""M7 to M14: what was wrong, unsafe or slow in a setup that people have."""

from __future__ import annotations

import asyncio
import json

from benchmarks.router_attacks import on_cpu_s

from fakes.engine import FakeEngine, Wire
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.reservations import reservation_of
from fakes.router import COMPLETIONS, PROMPT, STREAM
from integration.review.table import finding
from integration.router_scene import PATIENT, Scene, running_router, running_scene, until
from integration.wire_rows import ENGINE_ROWS, ROWS, send_engine_row, send_row
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.metaserver import METASERVER_PATH, SEAL_HEADER
from pdcluster_protocol.secret import load_secret


async def send_engine_rows(name: str) -> None:
    """All answers of an engine with this name, to one process."""
    async with running_scene("--max-decode-attempts=1") as scene:
        for row in ENGINE_ROWS[name].values():
            await send_engine_row(scene, row)


@finding(
    "M7",
    sent="authorization, a deadline and x-headers as trailers, from a client and from an engine; trailers without end",
    must="drop them, both ways, and answer 431 to those without end",
)
async def smuggle_by_trailers() -> None:
    async with running_scene() as scene:
        for row in ROWS["M7"].values():
            await send_row(scene, row)
    await send_engine_rows("M7")


@finding(
    "M8",
    sent="a stream that flows for longer than every limit but the total, and one that stops in the middle",
    must="pass the first on whole; cut the second with the error stalled",
)
async def stream_for_long() -> None:
    async with running_scene("--first-byte-timeout=2", "--idle-timeout=2") as scene:
        scene.decode.tokens, scene.decode.token_s = ["x"] * 40, 0.1
        assert b"[DONE]" in (await scene.ask(STREAM)).body
        scene.decode.close_gate(Gate.SECOND_TOKEN)
        answer = await scene.ask(STREAM)
        assert not answer.is_whole
        last = [part for part in answer.chunks if part][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stalled"


@finding(
    "M9",
    sent="a stream with max_tokens of a million, and of 2**63, and 30 requests beside it",
    must="give its engine at least 8 of the 30",
)
async def ask_for_very_many_tokens() -> None:
    for limit in (1_000_000, 2**63):
        async with running_scene(num_decode=2) as scene:
            for engine in scene.decodes:
                engine.tokens, engine.token_s = ["x"] * 20_000, 0.02
            client = await scene.client()
            body = json.dumps({"prompt": "x", "stream": True, "max_tokens": limit}).encode()
            await client.send(request_bytes(COMPLETIONS, body))
            await client.reader.readuntil(b"data: ")
            taken = [len(engine.seen) for engine in scene.decodes]
            for engine in scene.decodes:
                engine.work_s = 0.02
            await ask_in_rows(scene, 30, 10)
            gone = [len(engine.seen) - before for engine, before in zip(scene.decodes, taken, strict=True)]
            assert min(gone) >= 8, gone
            client.leave()


async def ask_in_rows(scene: Scene, number: int, at_once: int) -> None:
    """So many requests from so many clients, each of which asks when it has its answer."""
    left = iter(range(number))

    async def ask_in_a_row(client: RawClient) -> None:
        for _ in left:
            assert (await client.post(COMPLETIONS, {"prompt": "y" * 200, "max_tokens": 256})).status == 200

    clients = [await scene.client() for _ in range(at_once)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(ask_in_a_row(client) for client in clients))


@finding(
    "M10",
    sent="300 requests to pools of 2 and of 256 engines of each role",
    must="cost less than three times as much CPU (4.6 times when each choice looked at every engine)",
)
async def ask_a_large_pool() -> None:
    few, many = await cpu_of_requests(2), await cpu_of_requests(256)
    assert many < 3 * few, (few, many)


async def cpu_of_requests(num_engines: int) -> float:
    """Seconds of the router's loop for 300 requests. All engines of a role are one, under many addresses."""
    secret, wire = load_secret({}, host="127.0.0.1"), Wire()
    engines = [FakeEngine(wire, secret) for _ in range(2)]
    flags = [*PATIENT, f"--probe-interval={EDGE_S}"]
    for role, engine in zip(("prefill", "decode"), engines, strict=True):
        await engine.start(host="0.0.0.0")  # all of loopback's addresses
        port = engine.url.rpartition(":")[2]
        flags += [f"--{role}=http://127.0.{1 + index // 128}.{1 + index % 128}:{port}" for index in range(num_engines)]
    try:
        async with running_router(flags) as (pid, said, log):
            scene = Scene(pid, said, log, secret, prefills=engines[:1], decodes=engines[1:])
            await until(lambda: have_all_been_asked(scene, num_engines))
            await ask_in_rows(scene, 2 * num_engines, 8)  # Connections are there.
            before = on_cpu_s(pid)
            await ask_in_rows(scene, 300, 8)
            return on_cpu_s(pid) - before
    finally:
        for engine in engines:
            await engine.stop()


async def have_all_been_asked(scene: Scene, num_engines: int) -> bool:
    """Whether the router has found each engine healthy."""
    page = (await scene.get("/", is_internal=True)).json()
    return [engine["healthy"] for engine in page["engines"]] == [True] * (2 * num_engines)


@finding(
    "M11",
    sent="100 idle clients to a router that may open 80 files, and then a request of a client that was there before",
    must="answer 200: descriptors for engines are kept",
)
async def take_all_descriptors() -> None:
    async with running_scene(descriptors=80) as scene:
        first = await scene.client()
        assert (await first.get("/health")).status == 200
        for _ in range(100):
            await scene.client()
        async with asyncio.timeout(PATIENCE_S):
            answer = await first.post(COMPLETIONS, PROMPT)
            assert answer.status == 200, (answer.body, scene.log.read_text())
            assert (await first.post(COMPLETIONS, STREAM)).is_whole


@finding(
    "M12",
    sent="40 clients with 4 keys ask for the models at once, with at most 2 connections to an engine",
    must="answer all over one connection to one engine",
)
async def ask_for_the_models() -> None:
    async with running_scene("--max-engine-connections=2") as scene:
        asked = [scene.get("/v1/models", headers={"authorization": f"key-{number % 4}"}) for number in range(40)]
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 40
        assert scene.decode.num_connections <= 2  # Its probes have the other one.


@finding(
    "M13",
    sent="a reservation of a stranger who has read decode's parameters, sealed by decode for another address",
    must="answer 403, order nothing, and take decode's own reservation after it",
)
async def forge_a_reservation() -> None:
    async with running_scene() as scene:
        scene.decode.close_gate(Gate.RESERVE)
        asked = asyncio.create_task(scene.ask(PROMPT))
        params = (await scene.decode.next_request()).params or {}
        moved = json.dumps(reservation_of(params, remote_host="127.6.6.6", remote_engine_id="evil")).encode()
        for seal in ({}, {SEAL_HEADER: scene.secret.seal_call(json.dumps(reservation_of(params)).encode())}):
            assert (await refused(scene, moved, seal)).status == 403
        assert scene.prefill.seen == []
        scene.decode.open_gate(Gate.RESERVE)
        assert (await asked).status == 200
        assert [(seen.params or {})["remote_host"] for seen in scene.prefill.seen] == ["127.0.0.1"]


async def refused(scene: Scene, body: bytes, seal: dict[str, str]) -> Message:
    stranger = await scene.internal()
    await stranger.send(request_bytes(METASERVER_PATH, body, seal))
    async with asyncio.timeout(PATIENCE_S):
        return await stranger.receive()


@finding(
    "M14",
    sent="five requests to a router whose trace file is on a full disk",
    must="answer all, close no engine's connection, count five lost lines and say so once",
)
async def fill_the_disk() -> None:
    async with running_scene("--trace-file=/dev/full") as scene:
        client = await scene.client()
        for _ in range(5):
            assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        await until(lambda: has_lost(scene, 5))
        assert scene.log.read_text().count("lines are lost file=--trace-file") == 1
        assert scene.decode.fault is Fault.NONE
        assert max(scene.decode.num_connections, scene.prefill.num_connections) <= 2  # A probe may have one.


async def has_lost(scene: Scene, num_lines: int) -> bool:
    return await scene.metric("pdcluster_router_trace_lost_lines_total") == num_lines

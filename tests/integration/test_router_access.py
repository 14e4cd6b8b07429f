"""Who reaches what: clients with keys and without, two ports, and the engines' own key."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fakes.faults import Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.reservations import SECRET, reservation_of
from fakes.router import CHAT, COMPLETIONS, PATIENT, PROMPT, Rig, params_of, running_rig, until
from integration.test_router_process import process, start_router
from integration.test_router_verify import verify
from patience import PATIENCE_S
from pdcluster_router.front.server import RouterServer, listen
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio

KEY, OTHER = "sk-first", "sk-second"


def line(key: str, name: str) -> str:
    return f"{sha256(key.encode()).hexdigest()}  {name}\n"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(line(KEY, "team-a"))
    return file


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(rig: Rig, headers: dict[str, str], path: str = COMPLETIONS) -> Message:
    return await (await rig.client()).post(path, PROMPT, headers)


async def get(client: RawClient, path: str, headers: dict[str, str] | None = None) -> Message:
    await client.send(request_bytes(path, b"", headers, "GET"))
    return await client.receive()


def authorizations(rig: Rig) -> list[str | None]:
    """What prefill and decode were shown, in this order."""
    return [engine.seen[-1].message.headers.get("authorization") for engine in (rig.prefill, rig.decode)]


# Keys.


@pytest.mark.parametrize("headers", [{}, bearer(OTHER), bearer(""), bearer(KEY + "x"), {"authorization": KEY}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_without_a_key_that_is_known_no_engine_hears_of_a_request(
    key_file: Path, headers: dict[str, str], path: str
) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        answer = await ask(rig, headers, path)
        assert answer.status == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert await rig.metric('pdcluster_router_requests_total{outcome="rejected"}') == 1
        assert (rig.prefill.seen, rig.decode.seen) == ([], [])
        assert await rig.metric('pdcluster_router_requests_total{outcome="rejected"}') == 1


async def test_a_body_without_a_key_is_not_waited_for(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        client = await rig.client()
        await client.send(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: 5000000\r\n\r\n".encode())
        assert (await client.receive()).status == 401


async def test_a_known_key_lets_in_and_goes_no_further(key_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with running_rig(api_key_file=key_file, trace_file=trace) as rig:
        assert (await ask(rig, bearer(KEY))).status == 200
        assert authorizations(rig) == [None, None]
    assert json.loads(trace.read_text())["client"] == "team-a"


async def test_engines_with_a_key_of_their_own_are_shown_the_routers_in_place_of_the_clients(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file, engine_api_key="engines") as rig:
        assert (await ask(rig, bearer(KEY))).status == 200
        assert authorizations(rig) == ["Bearer engines", "Bearer engines"]


@pytest.mark.parametrize("engine_api_key", [None, "engines"])
async def test_where_clients_need_no_key_what_they_show_is_for_the_engines(engine_api_key: str | None) -> None:
    async with running_rig(engine_api_key=engine_api_key) as rig:
        assert (await ask(rig, bearer("engines"))).status == 200
        assert authorizations(rig) == ["Bearer engines", "Bearer engines"]
        assert (await ask(rig, {})).status == 200
        assert authorizations(rig) == [None, None]


async def test_a_verification_shows_the_engines_their_own_key() -> None:
    async with running_rig(engine_api_key="engines") as rig:
        assert (await verify(rig)).status == 200
        assert authorizations(rig) == ["Bearer engines", "Bearer engines"]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/health", "GET", 200),
        ("/health", "HEAD", 200),
        ("/docs", "GET", 200),
        ("/openapi.json", "GET", 200),
        ("/v1/models", "GET", 401),
        (COMPLETIONS, "GET", 401),
        ("/", "GET", 401),
        ("/v1/nothing", "POST", 401),
        ("/health/", "POST", 401),
        ("/docs/../v1/models", "GET", 401),
        ("/v1/metaserver", "POST", 401),
    ],
)
async def test_all_but_health_and_the_docs_asks_for_the_key(
    key_file: Path, path: str, method: str, status: int
) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        client = await rig.client()
        await client.send(request_bytes(path, b"", None, method))
        assert int((await client.reader.readuntil(b"\r\n\r\n")).split()[1]) == status


async def test_the_list_of_models_needs_a_key_too(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        assert (await get(await rig.client(), "/v1/models", bearer(KEY))).status == 200
        assert (await get(await rig.client(), "/v1/models", bearer(OTHER))).status == 401


async def test_a_request_behind_one_that_runs_is_refused_at_its_turn(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        client = await rig.client()
        body = json.dumps(PROMPT).encode()
        await client.send(request_bytes(COMPLETIONS, body, bearer(KEY)) + request_bytes(COMPLETIONS, body))
        await rig.decode.next_request()
        rig.decode.open_gate(Gate.RESERVE)
        assert (await client.receive()).status == 200
        assert (await client.receive()).status == 401
        assert len(rig.decode.seen) == 1


# The file.


async def test_keys_follow_their_file(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file, api_key_interval_s=0.01) as rig:
        keys = rig.router.access
        key_file.write_text(line(OTHER, "team-b") + line("third", "team-c"))
        await until(lambda: keys.admit([(b"authorization", b"Bearer third")]) == "team-c")
        assert (await ask(rig, bearer(OTHER))).status == 200
        assert (await ask(rig, bearer(KEY))).status == 401


async def test_keys_follow_a_link_as_kubernetes_moves_it(tmp_path: Path) -> None:
    for folder, key in (("one", KEY), ("two", OTHER)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "keys").write_text(line(key, "team-a"))
    (tmp_path / "data").symlink_to("one")
    async with running_rig(api_key_file=tmp_path / "data" / "keys", api_key_interval_s=0.01) as rig:
        (tmp_path / "new").symlink_to("two")
        (tmp_path / "new").rename(tmp_path / "data")
        await until(lambda: isinstance(rig.router.access.admit([(b"authorization", b"Bearer sk-second")]), str))


async def test_a_pipe_in_the_place_of_the_file_stops_nobody(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_rig(api_key_file=key_file, api_key_interval_s=0.01) as rig:
        key_file.unlink()
        os.mkfifo(key_file)
        await until(lambda: "it has 0 keys" in caplog.text)
        assert (await ask(rig, bearer(KEY))).status == 200


@pytest.mark.parametrize("broken", ["", "sk-plain\n", "gone"])
async def test_a_file_that_breaks_changes_no_key_and_is_told_once(
    key_file: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_rig(api_key_file=key_file, api_key_interval_s=0.01) as rig:
        if broken == "gone":
            key_file.unlink()
        else:
            key_file.write_text(broken)
        await until(lambda: "api keys not changed" in caplog.text)
        await asyncio.sleep(0.1)
        assert caplog.text.count("api keys not changed") == 1
        assert "sk-plain" not in caplog.text
        assert (await ask(rig, bearer(KEY))).status == 200
        key_file.write_text(line(OTHER, "team-b"))
        await until(lambda: isinstance(rig.router.access.admit([(b"authorization", b"Bearer sk-second")]), str))


async def test_sighup_reads_the_keys_anew(key_file: Path) -> None:
    # And not the look at the file, which is an hour away.
    async with process("--api-key-file", str(key_file), "--api-key-interval", "3600") as (router, url, _, _):
        client = await RawClient.connect(url)
        assert (await client.post(COMPLETIONS, PROMPT, bearer(KEY))).status == 200
        state = key_file.stat()
        key_file.write_text(line(KEY[::-1], "team-a"))
        assert key_file.stat().st_size == state.st_size
        router.send_signal(signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            while (await (await RawClient.connect(url)).post(COMPLETIONS, PROMPT, bearer(KEY[::-1]))).status != 200:
                await asyncio.sleep(0.01)
        router.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.wait(), PATIENCE_S) == 0


async def test_sighup_behind_its_first_line_does_not_end_the_router(key_file: Path) -> None:
    async with process("--api-key-file", str(key_file)) as (router, url, _, _):
        router.send_signal(signal.SIGHUP)
        client = await RawClient.connect(url)
        assert (await client.post(COMPLETIONS, PROMPT, bearer(KEY))).status == 200


class HungUpOn(RouterServer):
    """Gets SIGHUP as its start begins, and hears of it before that has ended."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)
        await super().startup(sockets)


async def test_sighup_during_the_start_does_not_end_the_router(key_file: Path) -> None:
    ended: list[int] = []
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    before = signal.signal(signal.SIGHUP, lambda number, _: ended.append(number))  # Not the end of this process.
    urls = {"prefill_urls": ["http://127.0.0.1:1"], "decode_urls": ["http://127.0.0.1:1"]}
    sockets, settings = listen(build_settings(**{**PATIENT, **urls, "api_key_file": key_file}))
    server = HungUpOn(settings, SECRET)
    try:
        serving = asyncio.create_task(server.serve(sockets))
        await until(lambda: server.started or serving.done())
        server.should_exit = True
        await serving
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (ended, problems) == ([], [])


# Ports.

INTERNAL = ["/", "/metrics", "/status", "/pdcluster/status", "/pdcluster/pool", "/pdcluster/requests?id=R"]


@pytest.mark.parametrize("path", INTERNAL)
async def test_what_is_for_the_cluster_is_on_the_internal_port_only(rig: Rig, path: str) -> None:
    assert (await get(await rig.internal(), path)).status == 200
    assert (await get(await rig.client(), path)).status == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing"])
async def test_what_is_for_clients_is_not_on_the_internal_port(rig: Rig, path: str) -> None:
    assert (await get(await rig.internal(), path)).status == 404
    assert (await (await rig.internal()).post(COMPLETIONS, PROMPT)).status == 404
    assert rig.decode.seen == []


async def test_the_metaserver_does_not_answer_clients(rig: Rig) -> None:
    assert (await (await rig.client()).post("/v1/metaserver", reservation_of(params_of()))).status == 404
    assert (await (await rig.client()).post("/pdcluster/verify", {})).status == 404
    assert (await rig.reserve(reservation_of(params_of()))).status == 404
    answer = await rig.reserve(reservation_of(params_of()))
    assert "is not known here" in answer.json()["reason"]
    assert (await get(await rig.internal(), "/v1/metaserver")).status == 405


async def test_both_ports_say_how_the_router_is(rig: Rig) -> None:
    for client in (await rig.client(), await rig.internal()):
        assert (await get(client, "/health")).json() == {"status": "ok"}


async def test_the_internal_port_asks_for_no_key(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        assert (await get(await rig.internal(), "/metrics")).status == 200
        assert (await verify(rig)).status == 200


# What the start says.


@pytest.mark.parametrize("has_keys", [True, False])
async def test_a_start_says_who_may_use_the_router(has_keys: bool, key_file: Path) -> None:
    flags = ["--api-key-file", str(key_file)] if has_keys else []
    urls = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--port", "0"]
    router = await start_router(*urls, *flags)
    assert router.stdout is not None
    lines = [
        (await asyncio.wait_for(router.stdout.readline(), PATIENCE_S)).decode() for _ in range(3 if has_keys else 4)
    ]
    router.terminate()
    rest, _ = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert lines[0].startswith("router on http://127.0.0.1:")
    assert lines[1].startswith("engines, operator and monitoring on http://127.0.0.1:")
    open_to_all = "clients are not authenticated: add --api-key-file, or put a gateway in front\n"
    assert (open_to_all in lines) is not has_keys
    assert lines[-1] == "PDCLUSTER_SECRET is not set: any user of this machine may order verifications\n"
    assert rest == b""


# Keys that go while a request comes, and keys that take more than their part.


def read_again(rig: Rig) -> None:
    """As on SIGHUP."""
    for watch in rig.router.watches:
        watch.reload()


async def half_of(rig: Rig, key: str, num_bytes: int = 1000) -> RawClient:
    """A request of which the last byte is missing; the router has read the rest."""
    client = await rig.client()
    body = b'{"prompt":"%b"}' % (b"x" * num_bytes)
    before = rig.router.room.used_bytes
    await client.send(request_bytes(COMPLETIONS, body, bearer(key))[:-1])
    await until(lambda: rig.router.room.used_bytes >= before + len(body) - 1)
    return client


async def test_a_key_that_is_removed_while_a_body_comes_serves_no_more(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        removed = await half_of(rig, KEY)
        key_file.write_text(line(OTHER, "team-b"))
        read_again(rig)
        await removed.send(b"}")
        answer = await asyncio.wait_for(removed.receive(), PATIENCE_S)
        assert (answer.status, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert rig.decode.seen == []


async def test_a_key_that_stays_serves_though_the_file_has_changed(key_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with running_rig(api_key_file=key_file, trace_file=trace) as rig:
        kept = await half_of(rig, KEY)
        key_file.write_text(line(OTHER, "team-b") + line(KEY, "team-c"))
        read_again(rig)
        await kept.send(b"}")
        assert (await asyncio.wait_for(kept.receive(), PATIENCE_S)).status == 200
    assert json.loads(trace.read_text())["client"] == "team-c"


async def test_a_key_that_is_removed_serves_nothing_that_waits_for_its_turn(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        client = await rig.client()
        await client.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode(), bearer(KEY)) * 2)
        await rig.decode.next_request()
        key_file.write_text(line(OTHER, "team-b"))
        read_again(rig)
        rig.decode.open_gate(Gate.RESERVE)
        assert [(await asyncio.wait_for(client.receive(), PATIENCE_S)).status for _ in range(2)] == [200, 401]
        assert len(rig.decode.seen) == 1


async def test_one_keys_slow_uploads_leave_room_for_others(key_file: Path) -> None:
    key_file.write_text(line(KEY, "team-a") + line(OTHER, "team-b"))
    async with running_rig(api_key_file=key_file, max_buffered_bytes=4 << 20) as rig:
        slow = await half_of(rig, KEY, 1_400_000)
        more = await rig.client()
        body = b'{"prompt":"%b"}' % (b"x" * 1_400_000)
        await more.send(request_bytes(COMPLETIONS, body, bearer(KEY))[:-1])
        other = await rig.client()
        await until(lambda: rig.router.room.used_bytes > 2_800_000 or has_ended(rig, more))
        answer = await other.post(COMPLETIONS, b'{"prompt":"%b"}' % (b"x" * 500_000), bearer(OTHER))
        assert answer.status == 200
        assert (await asyncio.wait_for(more.receive(), PATIENCE_S)).json()["error"]["code"] == "no_room"
        await slow.send(b"}")
        assert (await asyncio.wait_for(slow.receive(), PATIENCE_S)).status == 200
        await until(lambda: rig.router.room.used_bytes == 0)


def has_ended(rig: Rig, client: RawClient) -> bool:
    """Whether the router has refused what this client sends."""
    return rig.connection_of(client)._is_ending


async def test_a_key_alone_may_take_all_the_room(key_file: Path) -> None:
    async with running_rig(api_key_file=key_file, max_buffered_bytes=4 << 20) as rig:
        halves = [await half_of(rig, KEY, 1_400_000) for _ in range(2)]
        for half in halves:
            await half.send(b"}")
            assert (await asyncio.wait_for(half.receive(), PATIENCE_S)).status == 200

"""A router with several processes, started as a user does, before fake engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fakes.faults import Gate
from fakes.http import RawClient, request_bytes
from fakes.reservations import PROMPT_TOKENS
from fakes.router import COMPLETIONS, PROMPT, STREAM
from integration.authorities import make_authority
from integration.processes import descendants, is_running
from integration.router_scene import Scene, running_scene, until
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

NUM = 2
FILES = (("cert", ".crt"), ("key", ".key"))
OK = 'pdcluster_router_requests_total{outcome="ok"}'
PROMPT_SUM = 'pdcluster_router_model_prompt_tokens_sum{model="m"}'
_FOLDER = re.compile(r'"folder":"([^"]+)"')
STREAM_BODY = json.dumps(STREAM).encode()


HAS_READ = "settings read anew changed=--max-body-bytes"


@asynccontextmanager
async def processes(*flags: str, num_prefill: int = 1, num_decode: int = 1) -> AsyncIterator[Scene]:
    """Whatever the test does, all processes have ended after it, and the folder that they shared is gone."""
    async with running_scene(f"--processes={NUM}", *flags, num_prefill=num_prefill, num_decode=num_decode) as scene:
        await until(lambda: all_are_ready(scene))
        pids = descendants(scene.pid)
        [folder] = {Path(_FOLDER.findall(Path(f"/proc/{pid}/environ").read_text())[0]) for pid in pids}
        yield scene
        pids |= descendants(scene.pid)
    async with asyncio.timeout(PATIENCE_S):
        while any(map(is_running, pids)) or folder.exists():
            await asyncio.sleep(0.01)


async def all_are_ready(scene: Scene) -> bool:
    return num_lines(scene, "process ready") >= NUM


def num_lines(scene: Scene, text: str) -> int:
    return len(lines_with(scene, text))


def lines_with(scene: Scene, text: str) -> list[str]:
    return [line for line in scene.log.read_text().splitlines() if text in line]


async def read_until(client: RawClient, end: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await client.reader.readuntil(end)


def pids_serving(scene: Scene) -> list[int]:
    return sorted(descendants(scene.pid))


async def by_process(scene: Scene, num_clients: int = 12) -> dict[int, list[RawClient]]:
    """Clients' connections, by the process that has them, until each process has some."""
    found: dict[int, list[RawClient]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < NUM or sum(map(len, found.values())) < num_clients:
            client = await scene.client()
            assert (await client.get("/health")).status == 200
            found.setdefault(owner_of(scene, client), []).append(client)
    return found


def owner_of(scene: Scene, client: RawClient) -> int:
    """The process that has the other end of this connection, by the kernel's list."""
    theirs, ours = (client.writer.get_extra_info(name)[1] for name in ("peername", "sockname"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [f":{port:04X}" for port in (theirs, ours)]
    [inode] = {row[9] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])}
    for pid in pids_serving(scene):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(file.readlink()) == f"socket:[{inode}]":
                    return pid
            except FileNotFoundError:
                continue
    raise AssertionError(f"no process has the connection from port {ours}")


async def test_all_processes_serve_and_pages_are_their_sums_and_sighup_reaches_all(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("max-body-bytes = 2048\n")
    async with processes(f"--settings={settings}", num_prefill=2, num_decode=2) as scene:
        clients = [client for some in (await by_process(scene)).values() for client in some]
        for number, client in enumerate(clients):
            answer = await client.post(COMPLETIONS, PROMPT, {"x-request-id": f"R-{number}"})
            assert answer.status == 200
        for _ in range(2 * NUM):  # Whichever process is asked.
            assert await scene.metric(OK) == len(clients)
            assert await scene.metric(PROMPT_SUM) == len(clients) * PROMPT_TOKENS
            pool = (await scene.get("/pdcluster/pool", is_internal=True)).json()
            assert [one["name"] for one in pool["engines"]] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
            assert pool["ended"] == {"ok": len(clients)}
            status = (await scene.get("/pdcluster/status", is_internal=True)).json()
            assert len(status["recent"]) == 12
            assert (await scene.get("/", is_internal=True)).json()["in_flight"] == 0
        for number in range(len(clients)):
            page = (await scene.get(f"/pdcluster/requests?id=R-{number}", is_internal=True)).json()
            [request] = page["requests"]
            assert (request["request_id"], request["status"]) == (f"R-{number}", 200)
        assert await statuses_of_a_large_body(scene) == {413}
        settings.write_text("max-body-bytes = 8192\n")
        os.kill(scene.pid, signal.SIGHUP)
        await until(lambda: have_read(scene))
        assert len({line.split(" seat=")[1].split()[0] for line in lines_with(scene, HAS_READ)}) == NUM
        assert await statuses_of_a_large_body(scene) == {200}


async def statuses_of_a_large_body(scene: Scene) -> set[int]:
    """From all processes."""
    body = {**PROMPT, "prompt": "a" * 4096}
    return {(await clients[0].post(COMPLETIONS, body)).status for clients in (await by_process(scene)).values()}


async def have_read(scene: Scene) -> bool:
    return num_lines(scene, HAS_READ) == NUM


async def test_a_process_knows_what_others_have_placed() -> None:
    """Each of two engines gets one of two long requests, though different processes place them. Then SIGTERM lets both
    end, before the processes do."""
    async with processes(num_decode=2) as scene:
        for decode in scene.decodes:
            decode.close_gate(Gate.SECOND_TOKEN)
        clients = [some[0] for some in (await by_process(scene)).values()][:2]
        for client in clients:
            await client.send(request_bytes(COMPLETIONS, STREAM_BODY))
            await read_until(client, b"Hello")
        assert [len(decode.seen) for decode in scene.decodes] == [1, 1]
        pool = (await scene.get("/pdcluster/pool", is_internal=True)).json()
        assert [one["running"] for one in pool["engines"] if one["role"] == "decode"] == [1, 1]
        for pid in (scene.pid, *pids_serving(scene)):  # As systemd does by default: each hears it twice.
            os.kill(pid, signal.SIGTERM)
        late = await scene.client()
        async with asyncio.timeout(PATIENCE_S):
            while (await late.get("/health")).status != 503:
                await asyncio.sleep(0.01)
        for decode in scene.decodes:
            decode.open_gate(Gate.SECOND_TOKEN)
        for client in clients:
            assert (await read_until(client, b"0\r\n\r\n")).count(b"data: ") == 4
        async with asyncio.timeout(PATIENCE_S):
            while is_running(scene.pid):  # Else it would be killed before it has removed what its processes shared.
                await asyncio.sleep(0.01)


@pytest.mark.costly
async def test_a_process_that_is_killed_is_replaced_and_all_end_with_a_keeper_that_is_killed(tmp_path: Path) -> None:
    """With TLS on both ports."""
    cert, _ = make_authority(tmp_path, "router")
    files = [f"--{port}tls-{what}={cert.with_suffix(end)}" for port in ("", "internal-") for what, end in FILES]
    async with processes(*files) as scene:
        owners = await by_process(scene)
        for clients in owners.values():
            for client in clients:
                assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        before = await scene.metric(OK)
        killed, *others = owners
        os.kill(killed, signal.SIGKILL)
        for other in others:
            assert (await owners[other][0].post(COMPLETIONS, PROMPT)).status == 200
        assert await scene.metric(OK) == before + 1
        await until(lambda: is_replaced(scene, killed))
        assert set(await by_process(scene)) == set(pids_serving(scene))
        assert await scene.metric(OK) == before + 1
        os.kill(scene.pid, signal.SIGKILL)  # ``processes`` waits for the end of all others.


async def is_replaced(scene: Scene, pid: int) -> bool:
    return pid not in pids_serving(scene) and num_lines(scene, "process ready") > NUM


async def test_processes_are_replaced_without_a_failed_request() -> None:
    """Clients with a connection for each request, clients that keep one, and streams that outlast it all."""
    async with processes() as scene:
        first = set(pids_serving(scene))
        scene.decode.close_gate(Gate.SECOND_TOKEN)
        streams = [clients[0] for clients in (await by_process(scene)).values()]
        for client in streams:
            await client.send(request_bytes(COMPLETIONS, STREAM_BODY))
            await read_until(client, b"Hello")
        is_over = asyncio.Event()
        asking = [asyncio.create_task(ask(scene, is_over, keeps=number % 2 == 0)) for number in range(6)]
        os.kill(scene.pid, signal.SIGUSR2)
        await until(lambda: are_all_new(scene))
        is_over.set()
        answers = await asyncio.gather(*asking)
        num_asked = sum(num for num, _ in answers)
        assert any(num_ended for _, num_ended in answers[::2]), "a process that leaves ends the connections that it has"
        assert first <= set(pids_serving(scene)), "their streams are not over"
        scene.decode.open_gate(Gate.SECOND_TOKEN)
        for client in streams:
            assert (await read_until(client, b"0\r\n\r\n")).count(b"data: ") == 4
        for client in scene.clients:
            client.leave()
        await until(lambda: none_is_left(scene, first))
        assert await scene.metric(OK) == num_asked + len(streams)
        assert await scene.metric(OK.replace("ok", "lost")) == 0


async def ask(scene: Scene, is_over: asyncio.Event, *, keeps: bool) -> tuple[int, int]:
    """Asks until it is over, and then once more. ``keeps``: on one connection, until the router ends it. Returns how
    often it has asked, and how often the router has ended a connection."""
    client, num, num_ended, is_last = await scene.client(), 0, 0, False
    while not is_last:
        is_last = is_over.is_set()
        answer = await client.post(COMPLETIONS, PROMPT)
        assert answer.status == 200
        num += 1
        num_ended += answer.headers.get("connection") == "close"
        if not keeps or answer.headers.get("connection") == "close":
            client.leave()
            client = await scene.client()
    return num, num_ended


async def are_all_new(scene: Scene) -> bool:
    return num_lines(scene, "processes are replaced") == 1


async def none_is_left(scene: Scene, pids: set[int]) -> bool:
    return not pids & set(pids_serving(scene))


@pytest.mark.costly
async def test_signals_that_come_during_the_start_are_heard(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("max-body-bytes = 2048\n")
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdcluster_router", "--processes=2", f"--settings={tmp_path / 'settings.toml'}"),
        *("--port=0", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"),
        stdout=PIPE,
        stderr=PIPE,
    )
    assert router.stdout is not None
    assert router.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        await router.stdout.readline()
        for number in (signal.SIGHUP, signal.SIGUSR2):
            router.send_signal(number)
        while b"processes are replaced" not in (line := await router.stderr.readline()):
            assert line, "the router has ended"
        router.send_signal(signal.SIGTERM)
        assert b"Traceback" not in await router.stderr.read()
        assert await router.wait() == 0


@pytest.mark.parametrize("what", ["port", "trace", "picker", "stdout", "advertise"])
async def test_what_cannot_work_is_one_line_with_the_cure_and_status_2(what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags, cure = {
            "port": (["--port", str(taken.getsockname()[1])], "another --port"),
            "trace": (["--port", "0", "--trace-file", "/nowhere/trace"], "name a file"),
            "picker": (["--port", "0", "--picker-port", "1"], "start several routers"),
            "stdout": (["--port", "0", "--access-log", "-"], "name a file"),
            "advertise": (["--port", "0", "--host", "0.0.0.0"], "--advertise-url"),
        }[what]
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdcluster_router", "--processes", "2"),
            *("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", *flags),
            stdout=PIPE,
            stderr=PIPE,
        )
        _, error = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert router.returncode == 2
    [line] = error.decode().splitlines()
    assert cure in line

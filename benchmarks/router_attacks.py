"""What one rude client costs the others: streams, memory and the event loop of a router while it is attacked.

    .venv/bin/python -m benchmarks.router_attacks [--streams 100] [ATTACK ...]

For each attack: a fresh router with fake engines, ``--streams`` clients that stream all the time, one client that asks
for ``/health`` without a pause, and the attack from one more. Read *RSS growth*: the most memory above what the router
had before; *stall, CPU*: the longest that the router computed between a question for its health and the answer, which
other load on the machine does not change (*wall* is what the client saw); *gap*: the longest between two events of a
stream; *whole*: streams that were complete; *unhealthy*: how often the router took an engine for dead.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import uvloop
from benchmarks.router import PATH, FakeEngines, Peer, serve, spawn

from pdcluster_protocol.metaserver import METASERVER_PATH, SEAL_HEADER

MB: Final = 1 << 20
EVENT: Final = b'data: {"choices":[{"index":0,"text":"token"}]}\n\n'
NUM_EVENTS: Final = 50
INTERVAL_S: Final = 0.02
SMALL: Final = b'{"model":"m","prompt":"hi","stream":true}'


def request(path: str, body: bytes = b"", *lines: str, length: int | None = None) -> bytes:
    """A POST. ``length``: what it says of its body, where that is not the truth; -1: nothing."""
    num_bytes = len(body) if length is None else length
    framing = [] if num_bytes < 0 else [f"content-length: {num_bytes}"]
    head = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", *framing, *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


NUMBERS: Final = b'{"version":1,"x":[' + b"1," * (4 * MB - 20) + b"1]}"
CHUNKED: Final = request(PATH, b"", "transfer-encoding: chunked", length=-1)


@dataclass(frozen=True, slots=True)
class Attack:
    """``send`` does it from one thread, given the router's address."""

    what: str
    send: Callable[[tuple[str, int]], None]
    is_internal: bool = False
    """Whether it goes to the port for engines, the operator and monitoring."""


def flood(first: bytes, more: Iterable[bytes] = (), linger_s: float = 2.0) -> Callable[[tuple[str, int]], None]:
    """Send all of it on one connection, or as much as is taken; then wait for an answer."""

    def send(router: tuple[str, int]) -> None:
        with socket.create_connection(router) as client, suppress(OSError):
            client.settimeout(linger_s)
            for part in (first, *more):
                client.sendall(part)
            client.recv(1000)

    return send


def hold_connections(num: int, begun: bytes) -> Callable[[tuple[str, int]], None]:
    """Many connections, each with half a head."""

    def send(router: tuple[str, int]) -> None:
        held: list[socket.socket] = []
        with suppress(OSError):
            for _ in range(num):
                held.append(socket.create_connection(router))
                held[-1].sendall(begun)
        time.sleep(2)
        for client in held:
            client.close()

    return send


def many_bodies(num: int, num_bytes: int) -> Callable[[tuple[str, int]], None]:
    """Bodies that do not end, all at once."""
    half = request(PATH, b" " * num_bytes, length=num_bytes + 1)

    def send(router: tuple[str, int]) -> None:
        senders = [threading.Thread(target=flood(half), args=(router,)) for _ in range(num)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    return send


ATTACKS: Final = {
    "none": Attack("nothing", lambda _: time.sleep(3)),
    "t6": Attack("trailers of 6 bytes, 30 MB", flood(CHUNKED + b"2\r\n{}\r\n0\r\n", [b"a: b\r\n" * 100_000] * 50)),
    "t1k": Attack("trailers of 1 KB, 60 MB", flood(CHUNKED + b"2\r\n{}\r\n0\r\n", [b"a: " + b"x" * MB + b"\r\n"] * 60)),
    "c2": Attack("chunks of 2 bytes, 17 MB", flood(CHUNKED, [b"2\r\n  \r\n" * 100_000] * 25)),
    "pipe": Attack(
        "a running request, and 7 x 7 MB behind it",
        flood(request(PATH, SMALL), [request(PATH, b" " * (7 * MB))] * 7),
    ),
    "meta": Attack(
        "a reservation of 8 MB of numbers without a seal", flood(request(METASERVER_PATH, NUMBERS)), is_internal=True
    ),
    "forge": Attack(
        "the same ten times, each with a wrong seal",
        flood(b"", [request(METASERVER_PATH, NUMBERS, f"{SEAL_HEADER}: {'0' * 32}")] * 10),
        is_internal=True,
    ),
    "jb": Attack(
        "an array of 2.6 million objects, 8 MB", flood(request(PATH, b'{"a":[' + b"{}," * 2_600_000 + b"{}]}"))
    ),
    "str": Attack("a prompt of 8 MB", flood(request(PATH, b'{"prompt":"' + b"x" * (8 * MB - 20) + b'"}'))),
    "ext": Attack("a chunk's extension of 100 MB", flood(CHUNKED + b"1b;", [b"x" * MB] * 100)),
    "idle": Attack(
        "1,000 connections with half a head of 40 KB", hold_connections(1000, b"GET / HTTP/1.1\r\na: " + b"x" * 40_000)
    ),
    "upload": Attack("60 bodies of 7 MB at once", many_bodies(60, 7 * MB)),
}
"""``upload`` may cost ``max_buffered_bytes``; the others next to nothing."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one attack."""

    growth_bytes: int
    stall_cpu_s: float
    stall_wall_s: float
    gap_s: float
    num_whole: int
    num_broken: int
    num_unhealthy: int


class StreamingEngines(FakeEngines):
    """Decode streams its answer; all else is as in the other benchmark."""

    def _outcome(self, caller: Peer, body: bytes) -> None:
        assert b'"ok"' in body, body
        self._idle.append(caller)
        peer = self._waiting.pop(caller)
        peer.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._send_event(peer, NUM_EVENTS)

    def _send_event(self, peer: Peer, num_left: int) -> None:
        if peer.transport.is_closing():
            return
        if not num_left:
            peer.transport.write(b"0\r\n\r\n")
            return
        peer.transport.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        asyncio.get_running_loop().call_later(INTERVAL_S, self._send_event, peer, num_left - 1)


class Streams:
    """Clients that stream one answer after the other. One thread runs them."""

    def __init__(self, router: tuple[str, int], num: int) -> None:
        self.gap_s = 0.0
        self.num_whole = 0
        self.num_broken = 0
        self._router = router
        self._num = num
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._stream_on(index) for index in range(self._num)))

    async def _stream_on(self, index: int) -> None:
        await asyncio.sleep(index / self._num)
        while not self._has_ended.is_set():
            try:
                await self._stream()
                self.num_whole += 1
            except (OSError, asyncio.IncompleteReadError):
                self.num_broken += 1
                await asyncio.sleep(0.1)

    async def _stream(self) -> None:
        reader, writer = await asyncio.open_connection(*self._router)
        writer.write(request(PATH, SMALL))
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                raise ConnectionError(head)
            last = time.monotonic()
            while await reader.readuntil(b"\r\n") != b"0\r\n":
                await reader.readuntil(b"\n\n\r\n")
                now = time.monotonic()
                self.gap_s, last = max(self.gap_s, now - last), now
        finally:
            writer.close()


class Health:
    """Asks for ``/health`` without a pause. One thread."""

    def __init__(self, router: tuple[str, int], pid: int) -> None:
        self.cpu_s = 0.0
        self.wall_s = 0.0
        self._router = router
        self._pid = pid
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        with socket.create_connection(self._router) as client:
            while not self._has_ended.is_set():
                cpu, wall = on_cpu_s(self._pid), time.monotonic()
                client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
                client.recv(1000)
                self.cpu_s = max(self.cpu_s, on_cpu_s(self._pid) - cpu)
                self.wall_s = max(self.wall_s, time.monotonic() - wall)
                time.sleep(0.002)


def on_cpu_s(pid: int) -> float:
    """Seconds that the process's main thread has run: nanoseconds fine, where ``stat`` has steps of 10 ms."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def memory_bytes(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


@contextmanager
def running_router(
    log: Path,
    flags: Sequence[str] = (),
    *,
    engines: str = "benchmarks.router_attacks",
    router_module: str = "pdcluster_router",
) -> Iterator[tuple[int, tuple[str, int], tuple[str, int]]]:
    """Process id, clients' address and internal address of a router with engines; all have ended when it is left.

    ``engines``: the module whose ``--engines`` they are. ``router_module``: what the router is started by.
    """
    engine, url = spawn("-m", engines, "--engines")
    command = [sys.executable, "-m", router_module, "--prefill", url, "--decode", url, "--port", "0", *flags]
    with log.open("wb") as errors:
        router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert router.stdout is not None
        clients, internal = _address_in(router.stdout.readline()), _address_in(router.stdout.readline())
        wait_healthy(clients)
        yield router.pid, clients, internal
    finally:
        for child in (router, engine):
            child.terminate()
            child.wait()


def _address_in(line: bytes) -> tuple[str, int]:
    """Of the URL that this line ends with."""
    host, _, port = line.decode().split("/")[-1].partition(":")
    return host, int(port)


def wait_healthy(router: tuple[str, int]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(router) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            if b" 200 " in client.recv(1000):
                return
        time.sleep(0.1)
    raise TimeoutError("the router found no engines within 60 s")


def measure(name: str, num_streams: int, flags: Sequence[str] = ()) -> Figures:
    """What the attack cost. Takes some seconds. ``flags``: of the router."""
    attack = ATTACKS[name]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_router(Path(folder) / "log", flags) as (pid, router, internal),
    ):
        with Streams(router, num_streams) as streams:
            time.sleep(3)  # All of them stream, and what they need is there.
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew.
            before = memory_bytes(pid, "VmRSS")
            streams.gap_s = 0.0
            with Health(router, pid) as health:
                attack.send(internal if attack.is_internal else router)
                time.sleep(1)
            growth = memory_bytes(pid, "VmHWM") - before
        num_unhealthy = (Path(folder) / "log").read_text().count("engine unhealthy")
    return Figures(
        growth, health.cpu_s, health.wall_s, streams.gap_s, streams.num_whole, streams.num_broken, num_unhealthy
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"some of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engines:
        uvloop.run(serve(StreamingEngines()))
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    print("attack  RSS growth MB  stall CPU ms  wall ms  gap ms  whole  broken  unhealthy")
    for name in given.attacks or ATTACKS:
        figures = measure(name, given.streams)
        print(
            f"{name:>6} {figures.growth_bytes / MB:>14.0f} {figures.stall_cpu_s * 1e3:>13.0f}"
            f" {figures.stall_wall_s * 1e3:>8.0f} {figures.gap_s * 1e3:>7.0f} {figures.num_whole:>6}"
            f" {figures.num_broken:>7} {figures.num_unhealthy:>10}  {ATTACKS[name].what}",
            flush=True,
        )


if __name__ == "__main__":
    main()

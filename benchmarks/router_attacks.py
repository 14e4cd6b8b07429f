"""Measures what attacks by some clients cost the others: streams, memory and the event loop of the attacked router.

    .venv/bin/python -m benchmarks.router_attacks [--streams 100] [--senders 4] [--nice -10] [ATTACK ...]

Each attack gets a fresh router with fake engines, and ``--streams`` clients in a process of their own, which get an
event every 100 ms. After ``WINDOW_S`` in peace, ``--senders`` threads repeat the attack for ``WINDOW_S``, while one
more client asks for ``/health`` every 2 ms. Prints a table in Markdown:

    gap              without the attack and with it, the longest time between two events of any stream
    stall, no core   the longest CPU time of the router, and wait for a core, while a health question is open
    growth, kept     the most memory above what the router had before; the part left a second after the last attacker
    whole, broken, unhealthy    streams that ended so; how often the router took an engine for dead
"""

from __future__ import annotations

import argparse
import asyncio
import os
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
from benchmarks.router_streams import BODY as SMALL
from benchmarks.router_streams import EVENT, INTERVAL_S, NUM_EVENTS, StreamProcess, Window

from pdcluster_protocol.metaserver import METASERVER_PATH, SEAL_HEADER

MB: Final = 1 << 20
WINDOW_S: Final = 2.0


def request(path: str, body: bytes = b"", *lines: str, length: int | None = None) -> bytes:
    """A POST request. ``length``: a false content-length; -1: no content-length."""
    num_bytes = len(body) if length is None else length
    framing = [] if num_bytes < 0 else [f"content-length: {num_bytes}"]
    head = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", *framing, *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


NUMBERS: Final = b'{"version":1,"x":[' + b"1," * (4 * MB - 20) + b"1]}"
CHUNKED: Final = request(PATH, b"", "transfer-encoding: chunked", length=-1)


@dataclass(frozen=True, slots=True)
class Attack:
    """``send`` attacks once, from the calling thread; it gets the router's address."""

    what: str
    send: Callable[[tuple[str, int]], None]
    is_internal: bool = False
    """Whether it attacks the internal port."""
    is_crowd: bool = False
    """Whether one sender already opens many connections; then only one sender attacks."""


def flood(first: bytes, more: Iterable[bytes] = (), linger_s: float = 2.0) -> Callable[[tuple[str, int]], None]:
    """An attack that sends all parts on one connection, as far as the router takes them, then waits for an answer."""

    def send(router: tuple[str, int]) -> None:
        with socket.create_connection(router) as client, suppress(OSError):
            client.settimeout(linger_s)
            for part in (first, *more):
                client.sendall(part)
            client.recv(1000)

    return send


def hold_connections(num: int, begun: bytes) -> Callable[[tuple[str, int]], None]:
    """An attack that holds ``num`` connections for 2 s, each with ``begun`` as the beginning of a request."""

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


def whole_at_once(num: int, num_bytes: int) -> Callable[[tuple[str, int]], None]:
    """An attack by bodies that all get their last byte at the same moment; the clients do not wait for answers."""
    raw = request(PATH, b'{"prompt":[' + b"1," * (num_bytes // 2) + b"1]}")

    def send(router: tuple[str, int]) -> None:
        clients = [socket.create_connection(router) for _ in range(num)]
        with suppress(OSError):
            for client in clients:
                client.sendall(raw[:-1])
            time.sleep(0.5)
            for client in clients:
                client.send(raw[-1:])
            time.sleep(0.5)
        for client in clients:
            client.close()

    return send


def many_bodies(num: int, num_bytes: int) -> Callable[[tuple[str, int]], None]:
    """An attack by ``num`` bodies at once, each without its last byte."""
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
    "args": Attack("lists in vllm_xargs", flood(request(PATH, b'{"vllm_xargs":{"a":[%b1]}}' % (b"[1]," * 2_097_000)))),
    "keys": Attack("a key 299,999 times", flood(request(PATH, b'{%b"a":[1]}' % (b'"n":1,' * 299_998)))),
    "blank": Attack("8 MB of blanks", flood(request(PATH, b'{"prompt":[%b"x"]}' % (b" " * (8 * MB - 20))))),
    "ext": Attack("a chunk's extension of 100 MB", flood(CHUNKED + b"1b;", [b"x" * MB] * 100)),
    "idle": Attack(
        "1,000 connections with half a head of 40 KB",
        hold_connections(1000, b"GET / HTTP/1.1\r\na: " + b"x" * 40_000),
        is_crowd=True,
    ),
    "silent": Attack("2,000 connections that say nothing", hold_connections(2000, b""), is_crowd=True),
    "upload": Attack("60 bodies of 7 MB at once", many_bodies(60, 7 * MB), is_crowd=True),
    "whole": Attack("32 bodies of 4 MB of token ids, whole at once", whole_at_once(32, 4 * MB), is_crowd=True),
}
"""``upload`` and ``whole`` may cost up to ``max_buffered_bytes``; the others cost next to nothing for each sender."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one attack. ``quiet``: the time before it."""

    quiet: Window
    attacked: Window
    growth_bytes: int
    kept_bytes: int
    stall_s: float
    starved_s: float
    num_unhealthy: int

    @property
    def num_whole(self) -> int:
        return self.quiet.num_whole + self.attacked.num_whole

    @property
    def num_broken(self) -> int:
        return self.quiet.num_broken + self.attacked.num_broken


class StreamingEngines(FakeEngines):
    """Decode streams its answer. It refuses a large body without parsing it, so that no stream waits for the parser."""

    def serve(self, peer: Peer, body: bytes) -> None:
        if len(body) > MB:
            peer.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        else:
            super().serve(peer, body)

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


class Health:
    """Asks for ``/health`` every 2 ms, in a thread of its own."""

    def __init__(self, router: tuple[str, int], pid: int) -> None:
        self.stall_s = 0.0
        """The longest CPU time of the router between a question and its answer."""
        self.starved_s = 0.0
        """The longest time in which the router waited for a core between a question and its answer."""
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
                before = scheduled_s(self._pid)
                client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
                client.recv(1000)
                after = scheduled_s(self._pid)
                self.stall_s = max(self.stall_s, after[0] - before[0])
                self.starved_s = max(self.starved_s, after[1] - before[1])
                time.sleep(0.002)


def scheduled_s(pid: int) -> tuple[float, float]:
    """Seconds that the process's main thread has run, and has waited for a core. ``stat`` has only steps of 10 ms."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def on_cpu_s(pid: int) -> float:
    """Seconds that the process's main thread has run."""
    return scheduled_s(pid)[0]


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
    """A router with engines runs until the block ends. Yields its process id, client address and internal address.

    ``engines``: the module that runs engines when called with ``--engines``. ``router_module``: the router's module.
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
    """Host and port of the URL at the end of this line."""
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


def measure(name: str, num_streams: int, flags: Sequence[str] = (), num_senders: int = 1) -> Figures:
    """Runs one attack, and returns what it cost. Takes some ten seconds. ``flags``: the router's."""
    attack = ATTACKS[name]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_router(Path(folder) / "log", flags) as (pid, router, internal),
        StreamProcess(router, num_streams) as streams,
    ):
        time.sleep(NUM_EVENTS * INTERVAL_S + 1)  # Now all of them stream, and the router has the memory they need.
        streams.next_window()
        time.sleep(WINDOW_S)
        quiet = streams.next_window()
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # Resets VmHWM.
        before = memory_bytes(pid, "VmRSS")
        with Health(router, pid) as health:
            flood_with(attack, internal if attack.is_internal else router, num_senders)
            time.sleep(1)
            attacked = streams.next_window()
        growth, kept = memory_bytes(pid, "VmHWM") - before, memory_bytes(pid, "VmRSS") - before
        streams.prolong(attacked, num_streams - quiet.num_whole)  # A busy machine leaves streams little of a window.
        num_unhealthy = (Path(folder) / "log").read_text().count("engine unhealthy")
    return Figures(quiet, attacked, growth, kept, health.stall_s, health.starved_s, num_unhealthy)


def flood_with(attack: Attack, router: tuple[str, int], num_senders: int) -> None:
    """Each sender repeats the attack for ``WINDOW_S``. All senders have ended when this returns."""
    ends_at = time.monotonic() + WINDOW_S

    def send() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)  # This thread alone gives up ``--nice``.
        while time.monotonic() < ends_at:
            with suppress(OSError):
                attack.send(router)

    senders = [threading.Thread(target=send) for _ in range(1 if attack.is_crowd else num_senders)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()


COLUMNS: Final = (
    "Attack", "gap ms without", "with", "stall ms", "no core ms", "growth MiB", "kept", "whole", "broken", "unhealthy",
)  # fmt: skip


def row_of(name: str, figures: Figures) -> str:
    """The line of one attack in the table."""
    cells = (
        f"`{name}`: {ATTACKS[name].what}",
        f"{figures.quiet.gap_s * 1e3:.0f}",
        f"{figures.attacked.gap_s * 1e3:.0f}",
        f"{figures.stall_s * 1e3:.0f}",
        f"{figures.starved_s * 1e3:.0f}",
        f"{figures.growth_bytes / MB:.0f}",
        f"{figures.kept_bytes / MB:.0f}",
        *map(str, (figures.num_whole, figures.num_broken, figures.num_unhealthy)),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"some of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--senders", type=int, default=4, help="threads that attack (default: %(default)s)")
    parser.add_argument("--most-s", type=float, default=250, help="no attack begins later (default: %(default)s)")
    parser.add_argument(
        "--nice", type=int, default=0, help="of all but the senders; root may give -10 on a machine that does more"
    )
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engines:
        uvloop.run(serve(StreamingEngines()))
        return
    ends_at = time.monotonic() + given.most_s
    os.nice(given.nice)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in given.attacks or ATTACKS:
        if time.monotonic() > ends_at:
            print(f"left out, for {given.most_s:g} s are over: {name}")
            continue
        print(row_of(name, measure(name, given.streams, num_senders=given.senders)), flush=True)


if __name__ == "__main__":
    main()

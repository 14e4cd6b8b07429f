"""Measures the router's cost: requests/s and latency through it and straight to decode, side by side in one run.

    .venv/bin/python benchmarks/router.py [--seconds 3] [--connections 64]

Fake engines run in one process, the router in another, the load comes from this one. All three share the
machine's cores, so read the ratios, not the numbers. Three ways: *straight* (client to decode, no hand-over),
*local* (through the router, decode prefills: one hop), *pair* (through the router with reservation and prefill).
With ``--tls CERT KEY`` *local* and *pair* also go through another router, which speaks TLS on kept connections. With
``--also NAME FLAGS`` they also go through a router with these flags, for instance ``--also x2 "--processes 2"``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httptools
import uvloop

from pdcluster_protocol.ids import BootId, EngineId, TransferId
from pdcluster_protocol.metaserver import METASERVER_PATH, SEAL_HEADER
from pdcluster_protocol.params import Reservation, SideChannelAddress, to_wire
from pdcluster_protocol.secret import load_secret

SECRET = load_secret(os.environ, host="127.0.0.1")
PATH = "/v1/completions"
PAIR = json.dumps({"model": "m", "prompt": "x" * 1000, "max_tokens": 16}).encode()
LOCAL = json.dumps({"model": "m", "prompt": "x" * 1000, "max_tokens": 16, "echo": True}).encode()
USAGE = {"prompt_tokens": 250, "total_tokens": 266, "completion_tokens": 16, "prompt_tokens_details": None}
ANSWER_FIELDS = {"id": "cmpl-1", "choices": [{"index": 0, "text": "y" * 200}], "usage": USAGE}
ANSWER_BODY = json.dumps(ANSWER_FIELDS, separators=(",", ":")).encode()
"""As vLLM writes it: the router reads ``usage``."""
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER_BODY) + ANSWER_BODY
)

_START_S = 8.0
"""Seconds until all processes of a router answer."""

Parser = httptools.HttpRequestParser | httptools.HttpResponseParser


class Peer(asyncio.Protocol):
    """One HTTP connection, of a server or of a client. Calls ``on_message`` with each whole message's body."""

    def __init__(self, make_parser: Callable[[object], Parser], on_message: Callable[[Peer, bytes], None]) -> None:
        self.parser: Parser = make_parser(self)
        self.on_whole = on_message
        self.parts: list[bytes] = []
        self.address = ""
        """The router's process that this connection goes to, if that is known."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        body, self.parts = b"".join(self.parts), []
        self.on_whole(self, body)


class FakeEngines:
    """Engines without a model that keep the decode-first contract: decode reserves, and answers after the outcome."""

    def __init__(self) -> None:
        self._idle: list[Peer] = []
        self._waiting: dict[Peer, Peer] = {}

    def serve(self, peer: Peer, body: bytes) -> None:
        params = json.loads(body).get("kv_transfer_params") if body else None
        if params is None or params["do_remote_decode"]:
            self.answer(peer)
        elif caller := self._idle_to(_address_in(params)):
            self._reserve(caller, peer, params)
        else:
            task = asyncio.ensure_future(self._connect(peer, params))
            task.add_done_callback(lambda done: done.result())

    def answer(self, peer: Peer) -> None:
        """Answers the request of this connection."""
        peer.transport.write(ANSWER)

    def _idle_to(self, address: str) -> Peer | None:
        """An idle connection to this process of the router, which is not idle any more."""
        for number in range(len(self._idle) - 1, -1, -1):
            if self._idle[number].address == address:
                return self._idle.pop(number)
        return None

    async def _connect(self, peer: Peer, params: dict[str, object]) -> None:
        address = _address_in(params)
        host, _, port = address.partition(":")
        loop = asyncio.get_running_loop()
        _, caller = await loop.create_connection(
            lambda: Peer(httptools.HttpResponseParser, self._outcome), host, int(port)
        )
        caller.address = address
        self._reserve(caller, peer, params)

    def _reserve(self, caller: Peer, peer: Peer, params: dict[str, object]) -> None:
        self._waiting[caller] = peer
        body = reservation_for(params)
        caller.transport.write(request_bytes(METASERVER_PATH, body, f"{SEAL_HEADER}: {SECRET.seal_call(body)}\r\n"))

    def _outcome(self, caller: Peer, body: bytes) -> None:
        assert b'"ok"' in body, body
        self._idle.append(caller)
        self.answer(self._waiting.pop(caller))


def _address_in(params: dict[str, object]) -> str:
    return str(params["metaserver"]).split("/")[2]


def reservation_for(params: dict[str, object]) -> bytes:
    """Decode's call to the router that sent these ``kv_transfer_params``."""
    return json.dumps(to_wire(_reservation(params))).encode()


def _reservation(params: dict[str, object]) -> Reservation:
    boot = BootId("b")
    return Reservation(
        request_id="r",
        remote_block_ids=(tuple(range(1, 64)),),
        remote_block_size=16,
        remote_engine_id=EngineId("d"),
        remote_host="127.0.0.1",
        remote_port=1,
        remote_tp_size=1,
        remote_cached_tokens=0,
        transfer_id=TransferId(str(params["transfer_id"])),
        token=str(params["token"]),
        attempt=1,  # type: ignore[arg-type]  # a NewType of int
        deadline_ms=1000,
        remote_boot_id=boot,
        remote_side_channels=(SideChannelAddress("127.0.0.1", 1, boot),),
        num_prompt_tokens=1000,
        prompt_digest="d",
    )


def request_bytes(path: str, body: bytes, lines: str = "") -> bytes:
    """A POST request. ``lines``: more header lines, each with its line end."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{lines}\r\n".encode() + body


@dataclass
class Result:
    num_requests: int
    requests_per_s: float
    p50_us: float
    p99_us: float


async def load(url: str, body: bytes, num_connections: int, seconds: float) -> Result:
    """Every connection sends its next request as soon as the last one is answered."""
    scheme, _, address = url.partition("://")
    host, _, port = address.partition(":")
    tls = ssl._create_unverified_context() if scheme == "https" else None
    loop = asyncio.get_running_loop()
    request = request_bytes(PATH, body)
    sent_at: dict[Peer, float] = {}
    times: list[float] = []
    end = time.perf_counter() + seconds
    done = asyncio.Event()

    def send(peer: Peer) -> None:
        sent_at[peer] = time.perf_counter()
        peer.transport.write(request)

    def answered(peer: Peer, answer: bytes) -> None:
        now = time.perf_counter()
        assert answer == ANSWER_BODY, answer
        times.append(now - sent_at.pop(peer))
        if now < end:
            send(peer)
        elif not sent_at:
            done.set()

    peers = [
        (await loop.create_connection(lambda: Peer(httptools.HttpResponseParser, answered), host, int(port), ssl=tls))[
            1
        ]
        for _ in range(num_connections)
    ]
    started = time.perf_counter()
    for peer in peers:
        send(peer)
    await asyncio.wait_for(done.wait(), seconds + 10)
    took = time.perf_counter() - started
    for peer in peers:
        peer.transport.close()
    cuts = statistics.quantiles(times, n=100)
    return Result(len(times), len(times) / took, cuts[49] * 1e6, cuts[98] * 1e6)


async def serve(engines: FakeEngines) -> None:
    """Prints its URL, and serves for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Peer(httptools.HttpRequestParser, engines.serve), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def spawn(*args: str) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a child. Returns it, and the URL at the end of its first line."""
    child = subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    return child, child.stdout.readline().decode().split()[-1]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and its children have used."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    fields = [own, *(stat for stat in stats if stat[1] == str(pid))]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


async def compare(engine: str, routers: dict[str, tuple[str, int]], num_connections: int, seconds: float) -> None:
    """Measures all ways, and prints the table. ``routers``: URL and process id, by the suffix of their ways' names."""
    ways = {"straight": (engine, LOCAL, os.getpid())}
    for name, (url, pid) in routers.items():
        ways |= {f"local{name}": (url, LOCAL, pid), f"pair{name}": (url, PAIR, pid)}
    print("connections       way requests/s   p50 us   p99 us   rate  added p50 us  router CPU us/request")
    for connections in (1, num_connections):
        straight = None
        for way, (url, body, pid) in ways.items():
            await load(url, body, connections, 0.3)
            before = cpu_seconds(pid)
            result = await load(url, body, connections, seconds)
            cpu_us = (cpu_seconds(pid) - before) * 1e6 / result.num_requests
            straight = straight or result
            print(
                f"{connections:>11} {way:>9} {result.requests_per_s:>10.0f} {result.p50_us:>8.0f} {result.p99_us:>8.0f}"
                f" {result.requests_per_s / straight.requests_per_s:>6.2f} {result.p50_us - straight.p50_us:>13.0f}"
                f" {cpu_us:>22.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"), help="also through a router with this certificate")
    parser.add_argument("--also", nargs=2, action="append", default=[], metavar=("NAME", "FLAGS"))
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engines:
        uvloop.run(serve(FakeEngines()))
        return
    tls = (" tls", ["--tls-cert", given.tls[0], "--tls-key", given.tls[1]]) if given.tls else None
    others = [(f" {name}", flags.split()) for name, flags in given.also]
    children, routers, engine_url = [], {}, ""
    try:
        for name, flags in filter(None, (("", []), tls, *others)):  # Engines keep connections to their router.
            engines, engine_url = spawn(__file__, "--engines")
            urls = ["--prefill", engine_url, "--decode", engine_url, "--port", "0"]
            router, router_url = spawn("-m", "pdcluster_router", *urls, *flags)
            children += [router, engines]
            routers[name] = (router_url, router.pid)
        time.sleep(_START_S)
        uvloop.run(compare(engine_url, routers, given.connections, given.seconds))
    finally:
        for child in children:
            child.terminate()
            child.wait()


if __name__ == "__main__":
    main()

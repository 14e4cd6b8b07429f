"""Fake engines for ``router_peers``: those of ``router`` on many ports, which also stream if a client asks for it.

.venv/bin/python -m benchmarks.router_engines NUM_PREFILL NUM INTERVAL_MS    (``router_peers`` starts it)
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Final

import httptools
import uvloop
from benchmarks.router import FakeEngines, Peer

EVENT: Final = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" token"}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
NUM_EVENTS: Final = 1000
"""Ticks of an answer: events, and in the last one ``DONE``. So many that a request costs little beside its events."""
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class StreamingEngines(FakeEngines):
    """Sends one event to each open stream in every ``interval_s``. Event loop only."""

    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._asked: set[Peer] = set()
        self._streams: dict[Peer, int] = {}
        """By open stream: the number of ticks that are still to come."""

    def serve(self, peer: Peer, body: bytes) -> None:
        if b'"stream":true' in body.replace(b" ", b""):
            self._asked.add(peer)
        super().serve(peer, body)

    def answer(self, peer: Peer) -> None:
        if peer not in self._asked:
            super().answer(peer)
            return
        self._asked.discard(peer)
        peer.transport.write(_HEAD)
        self._streams[peer] = NUM_EVENTS

    async def tick(self) -> None:
        """Sends events for ever. Spreads those of one interval over it in ten parts."""
        while True:
            for part in range(10):
                for peer in [one for i, one in enumerate(list(self._streams)) if i % 10 == part]:
                    self._next(peer)
                await asyncio.sleep(self._interval_s / 10)

    def _next(self, peer: Peer) -> None:
        left = self._streams[peer] = self._streams[peer] - 1
        if peer.transport.is_closing():
            del self._streams[peer]
        elif left:
            peer.transport.write(_chunk(EVENT))
        else:
            del self._streams[peer]
            peer.transport.write(_chunk(DONE) + b"0\r\n\r\n")


async def serve(num_prefill: int, num: int, interval_s: float) -> None:
    """Prints each engine's URL, and serves until it is killed. The first ``num_prefill`` do not stream."""
    prefill, others = FakeEngines(), StreamingEngines(interval_s)
    loop = asyncio.get_running_loop()
    for number in range(num):
        answering = partial(Peer, httptools.HttpRequestParser, (prefill if number < num_prefill else others).serve)
        server = await loop.create_server(answering, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await others.tick()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1e3))

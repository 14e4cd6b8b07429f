"""Well-behaved clients of a router, in a process of their own: each streams one answer after the other.

    .venv/bin/python -m benchmarks.router_streams HOST PORT NUM    (``router_attacks`` starts it)

For each line of input it prints a ``Window`` as a line of JSON, which covers the time since the line before.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Final, Self

import uvloop
from benchmarks.router import PATH

INTERVAL_S: Final = 0.1
"""Time between two events. The engine sends ``NUM_EVENTS`` for an answer."""
NUM_EVENTS: Final = 20
PROLONGED_S: Final = 60.0
EVENT: Final = b'data: {"choices":[{"index":0,"text":"token"}]}\n\n'
BODY: Final = b'{"model":"m","prompt":"hi","stream":true}'
REQUEST: Final = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    PATH.encode(),
    len(BODY),
    BODY,
)


@dataclass
class Window:
    """``gap_s``: the longest between two events of a stream. Streams that ended whole, and broken ones."""

    gap_s: float = 0.0
    num_whole: int = 0
    num_broken: int = 0

    def add(self, more: Window) -> None:
        """The window that followed."""
        self.gap_s = max(self.gap_s, more.gap_s)
        self.num_whole += more.num_whole
        self.num_broken += more.num_broken


class Streams:
    """The clients. Event loop only."""

    def __init__(self, router: tuple[str, int], num: int) -> None:
        self._router = router
        self._num = num
        self._window = Window()
        self._heard_at: dict[int, float] = {}
        """By stream that has begun: the time of its last event."""

    async def run(self) -> None:
        """Streams on all clients, until it is cancelled."""
        await asyncio.gather(*(self._stream_on(index) for index in range(self._num)))

    def next_window(self) -> Window:
        """The window since the last call. A gap that is not over counts with its length so far."""
        for index in self._heard_at:
            self._measure(index, time.monotonic())
        window, self._window = self._window, Window()
        return window

    def _measure(self, index: int, now: float) -> None:
        self._window.gap_s = max(self._window.gap_s, now - self._heard_at[index])

    async def _stream_on(self, index: int) -> None:
        await asyncio.sleep(NUM_EVENTS * INTERVAL_S * index / self._num)
        while True:
            try:
                await self._stream(index)
                self._window.num_whole += 1
            except (OSError, asyncio.IncompleteReadError):
                self._window.num_broken += 1
                await asyncio.sleep(INTERVAL_S)

    async def _stream(self, index: int) -> None:
        reader, writer = await asyncio.open_connection(*self._router)
        writer.write(REQUEST)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                raise ConnectionError(head)
            self._heard_at[index] = time.monotonic()
            while await reader.readuntil(b"\r\n") != b"0\r\n":
                await reader.readuntil(b"\n\n\r\n")
                now = time.monotonic()
                self._measure(index, now)
                self._heard_at[index] = now
        finally:
            self._heard_at.pop(index, None)
            writer.close()


class StreamProcess:
    """Starts the process of ``num`` clients and asks it for its windows; for use in another process."""

    def __init__(self, router: tuple[str, int], num: int) -> None:
        self._command = [sys.executable, "-m", "benchmarks.router_streams", router[0], str(router[1]), str(num)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.next_window()
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.terminate()

    def next_window(self) -> Window:
        """The window since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return Window(**json.loads(self._process.stdout.readline()))

    def prolong(self, window: Window, num_whole: int) -> None:
        """Lets this window, the last one, go on until so many streams have ended whole, or for ``PROLONGED_S``."""
        ends_at = time.monotonic() + PROLONGED_S
        while window.num_whole < num_whole and time.monotonic() < ends_at:
            time.sleep(INTERVAL_S)
            window.add(self.next_window())


async def _serve(router: tuple[str, int], num: int) -> None:
    streams = Streams(router, num)
    running = asyncio.create_task(streams.run())
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(asdict(streams.next_window())), flush=True)
    running.cancel()


if __name__ == "__main__":
    uvloop.run(_serve((sys.argv[1], int(sys.argv[2])), int(sys.argv[3])))

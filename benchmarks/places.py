"""The places in which a benchmark's processes live: this machine, or the two ends of a ``link.py`` link.

prefill's place                       decode's place (and the client's)
  loopback, or End.A   ---- link ----   loopback, or End.B

It also measures one plain TCP stream between both, with which a push is compared.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from benchmarks.link import End, Link, open_link

LINKS: Final = {"loopback": "loopback", "1gbit": "1 Gbit/s", "2gbit": "2 Gbit/s"}
"""The values of ``--links``, and their names in tables. All but loopback are rates in tc's spelling."""
_LOOPBACK: Final = "127.0.0.1"

Inside = Callable[[], AbstractContextManager[None]]
"""Makes a context in which sockets or processes belong to one place."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes live. ``host``: their address for the other place; ``bind_host``: the address they listen on."""

    host: str
    bind_host: str
    device: str
    """Network device by which the other place is reached."""
    inside: Inside
    """Context in which to open sockets."""
    starting: Inside
    """Context in which to start processes."""


LOCAL: Final = Place(_LOOPBACK, _LOOPBACK, "lo", nullcontext, nullcontext)


@dataclass(frozen=True, slots=True)
class Places:
    """Both ends, and the link between them if there is one."""

    prefill: Place
    decode: Place
    link: Link | None

    @property
    def path(self) -> StreamPath:
        """The path of a plain stream that goes the same way as KV."""
        return StreamPath(self.decode.host, self.prefill.inside, self.decode.inside)

    def set_rate(self, name: str) -> None:
        """The link has this rate from now on; loopback has none.

        Raises:
            LinkError: tc refuses the rate.
        """
        if self.link is not None:
            self.link.set_rate(name)


@contextmanager
def open_places(link: str) -> Iterator[Places]:
    """Both places of ``link``, one of ``LINKS``. At the end the link is removed, and the processes in it are killed.

    Raises:
        LinkError: We are not root, iproute2 is missing, or the kernel cannot do it.
    """
    if link == "loopback":
        yield Places(LOCAL, LOCAL, None)
        return
    with open_link(link) as slow:
        yield Places(_end(slow, End.A), _end(slow, End.B), slow)


def free_port() -> int:
    """A loopback port that no process listens on now, in the caller's place."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def share_places(links: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Groups of links that can share processes: links between namespaces differ in their rate only."""
    slow = tuple(link for link in links if link != "loopback")
    if "loopback" in links:
        yield ("loopback",)
    if slow:
        yield slow


def _end(link: Link, end: End) -> Place:
    return Place(end.value, "0.0.0.0", end.device, lambda: link.inside(end), lambda: link.starting(end))


_CHUNK_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class StreamPath:
    """The two ends of a stream. ``host``: the receiver's address, which the sender's place can reach."""

    host: str
    sender: Inside
    receiver: Inside


def measure_bandwidth(path: StreamPath, num_bytes: int) -> float:
    """Bytes per second of one stream of ``num_bytes``, from its first byte until the receiver confirms the last.

    Waits at most 30 s for each step.

    Raises:
        OSError: The places cannot reach each other, or the stream stood still.
    """
    return num_bytes / _stream(path, num_bytes, 0.0)


def send_evenly(path: StreamPath, num_bytes: int, seconds: float) -> None:
    """Sends one stream of ``num_bytes``, spread over ``seconds``, or slower if the link is slower.

    Waits and raises as ``measure_bandwidth``.
    """
    _stream(path, num_bytes, seconds)


def _stream(path: StreamPath, num_bytes: int, at_least_s: float) -> float:
    """Seconds until the receiver has said that all bytes came."""
    with path.receiver():
        listener = socket.create_server((path.host, 0))
    with listener:
        listener.settimeout(_TIMEOUT_S)
        receiver = threading.Thread(target=_receive, args=(listener, num_bytes), name="raw-receiver", daemon=True)
        receiver.start()
        with path.sender():
            stream = socket.create_connection(listener.getsockname(), _TIMEOUT_S)
        with stream:
            seconds = _send(stream, num_bytes, at_least_s)
        receiver.join(_TIMEOUT_S)
    return seconds


def _send(stream: socket.socket, num_bytes: int, at_least_s: float) -> float:
    chunk = bytes(_CHUNK_BYTES)
    begun = time.perf_counter()
    for sent in range(0, num_bytes, _CHUNK_BYTES):
        time.sleep(max(0.0, begun + at_least_s * sent / num_bytes - time.perf_counter()))
        stream.sendall(chunk[: num_bytes - sent])
    stream.recv(1)
    return time.perf_counter() - begun


def _receive(listener: socket.socket, num_bytes: int) -> None:
    stream, _ = listener.accept()
    with stream:
        stream.settimeout(_TIMEOUT_S)
        buffer, left = bytearray(_CHUNK_BYTES), num_bytes
        while left and (count := stream.recv_into(buffer)):
            left -= count
        stream.sendall(b".")

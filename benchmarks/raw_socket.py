"""One plain TCP stream between two places: what a push is measured against."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

_CHUNK_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 30.0

Inside = Callable[[], AbstractContextManager[None]]
"""Makes a context in which sockets belong to one place."""


@dataclass(frozen=True, slots=True)
class Path:
    """From where to where: ``host`` is the receiver's address, reachable from inside the sender's place."""

    host: str
    sender: Inside
    receiver: Inside


def measure_bandwidth(path: Path, num_bytes: int) -> float:
    """Bytes per second of one stream of ``num_bytes``, from the first byte sent to the receiver's word that all came.

    Waits at most 30 s for each step.

    Raises:
        OSError: The places cannot reach each other, or the stream stood still.
    """
    return num_bytes / _stream(path, num_bytes, 0.0)


def send_evenly(path: Path, num_bytes: int, seconds: float) -> None:
    """One stream of ``num_bytes`` has been sent, spread over ``seconds``, or slower where the link is.

    Waits and raises as ``measure_bandwidth``.
    """
    _stream(path, num_bytes, seconds)


def _stream(path: Path, num_bytes: int, at_least_s: float) -> float:
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

"""Speaks the part of ZeroMQ's protocol that one question needs: greeting, handshake, one message each way.

Source of truth: ZMTP 3.0 (ZeroMQ RFC 23), mechanism NULL, as a DEALER that talks to a ROUTER. It is written by
hand, because to load a library for a probe every few seconds would cost more than the question.
"""

from __future__ import annotations

import socket
from typing import Final

from pdcluster_cli.pod.sockets import connect, left_s

GREETING_BYTES: Final = 64
MAX_FRAME_BYTES: Final = 64 << 10
"""A longer frame is no answer to our question."""
MAX_COMMANDS: Final = 16
"""Command frames before the answer. libzmq sends one, which ends the handshake."""

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_GREETING: Final = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_MORE, _LONG, _COMMAND = 1, 2, 4


class NotZmtp(Exception):
    """The process that listens there does not speak ZeroMQ."""


def ask_router(host: str, port: int, message: bytes, *, deadline: float) -> bytes:
    """The first frame that the ROUTER socket at this address answers to ``message`` (below 256 bytes).

    ``deadline``: monotonic seconds.

    Raises:
        OSError: No connection, or it was cut; a TimeoutError after the deadline.
        NotZmtp: Another protocol answers there.
    """
    with connect(host, port, deadline) as connection:
        connection.sendall(_GREETING)
        greeting = _read(connection, GREETING_BYTES, deadline)
        if greeting[:1] != _SIGNATURE[:1] or greeting[9:10] != _SIGNATURE[9:] or greeting[10] < 3:
            raise NotZmtp("it does not greet as ZeroMQ 3 or newer does")
        connection.sendall(_frame(_COMMAND, _READY) + _frame(0, message))
        for _ in range(MAX_COMMANDS + 1):
            flags, body = _read_frame(connection, deadline)
            if not flags & _COMMAND:
                return body
        raise NotZmtp(f"it sent more than {MAX_COMMANDS} commands before an answer")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


_READY: Final = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")


def _frame(flags: int, body: bytes) -> bytes:
    return bytes([flags, len(body)]) + body


def _read_frame(connection: socket.socket, deadline: float) -> tuple[int, bytes]:
    flags = _read(connection, 1, deadline)[0]
    num_bytes = int.from_bytes(_read(connection, 8 if flags & _LONG else 1, deadline), "big")
    if flags & ~(_MORE | _LONG | _COMMAND) or num_bytes > MAX_FRAME_BYTES:
        raise NotZmtp(f"it sent a frame with flags {flags:#x} and {num_bytes} bytes")
    return flags, _read(connection, num_bytes, deadline)


def _read(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    whole = b""
    while len(whole) < num_bytes:
        connection.settimeout(left_s(deadline))
        part = connection.recv(num_bytes - len(whole))
        if not part:
            raise ConnectionResetError("the connection was closed")
        whole += part
    return whole

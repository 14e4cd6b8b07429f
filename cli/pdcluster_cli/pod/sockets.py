"""Opens a connection by a deadline, from the host's name on. Knows no protocol.

A socket's own timeout bounds each wait anew, so a peer that sends a byte now and then is never late. Therefore
each wait gets what is left of the deadline. The operating system's look-up of a name takes no timeout at all.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any

_SocketAddresses = list[tuple[Any, ...]]
"""Addresses as ``socket.getaddrinfo`` gives them."""


def left_s(deadline: float) -> float:
    """Seconds until the deadline (monotonic), above 0.

    Raises:
        TimeoutError: The deadline has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first of the host's addresses that takes one. ``deadline``: monotonic seconds.

    Raises:
        socket.gaierror: The host has no address, or the name server does not answer.
        OSError: No address takes a connection; a TimeoutError after the deadline.
    """
    addresses = _addresses(host, port, deadline)
    for num_left, (family, kind, protocol, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        try:
            # An address that does not answer leaves the others their share.
            return _connected(socket.socket(family, kind, protocol), address, left_s(deadline) / num_left)
        except OSError:  # Also of a kernel that has no sockets of this family.
            if num_left == 1:
                raise
    raise socket.gaierror(socket.EAI_NONAME, "no address")


def _connected(connection: socket.socket, address: Any, timeout_s: float) -> socket.socket:
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _addresses(host: str, port: int, deadline: float) -> _SocketAddresses:
    with contextlib.suppress(OSError, UnicodeError):  # It is a name, and no address.
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    answer: queue.SimpleQueue[_SocketAddresses | Exception] = queue.SimpleQueue()
    # Not joined: the look-up cannot be interrupted. As a daemon it does not keep the process from its end.
    try:
        threading.Thread(target=_look_up, args=(host, port, answer), name="look-up", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"{host} cannot be looked up: {error}") from error
    try:
        found = answer.get(timeout=left_s(deadline))
    except (queue.Empty, TimeoutError):
        raise TimeoutError(f"no name server tells the address of {host}: timed out") from None
    if isinstance(found, Exception):
        raise found
    return found


def _look_up(host: str, port: int, answer: queue.SimpleQueue[_SocketAddresses | Exception]) -> None:
    try:
        answer.put(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    except UnicodeError:  # of a label that is empty or too long
        answer.put(socket.gaierror(socket.EAI_NONAME, "no name"))
    except OSError as error:
        answer.put(error)

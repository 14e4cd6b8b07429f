"""Asks whether a started process answers, and has the errors of a process that does not."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from pdcluster_cli.processes.engines import LOOPBACK
from pdcluster_cli.processes.last_words import cause_in, describe_end, last_lines, said


class EngineDied(Exception):
    """A process that should serve has ended. The message has its name, exit status, cause if known, and last lines."""

    def __init__(self, name: str, exit_code: int, log_path: Path, *, has_served: bool = False) -> None:
        super().__init__(describe_end(name, exit_code, log_path, has_served=has_served))


class NotReady(TimeoutError):
    """A process does not serve in time. The message has its name, the cause if its log has one, and its last lines."""

    def __init__(self, name: str, timeout_s: float, log_path: Path) -> None:
        cause = cause_in(log_path) or "its log holds no error"
        super().__init__(
            f"{name} is not ready after {timeout_s:.0f} s{said(cause)}; the end of {log_path}:\n{last_lines(log_path)}"
        )


@contextmanager
def held_ports(count: int, *, wish: int | None = None) -> Iterator[list[int]]:
    """Loopback ports that the kernel gives to no other process until the end of the ``with``.

    An engine imports for a minute before it binds its port, and by then another process may have taken a free one. So a
    socket that does not listen holds each port. A server with SO_REUSEADDR, such as vLLM's or our router, can bind the
    same port and listen. ``wish``: the first of the ports, if it is free.
    """
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            _bind(holder, wish if holder is holders[0] else None)
        yield [holder.getsockname()[1] for holder in holders]


def _bind(holder: socket.socket, wished: int | None) -> None:
    """Bind without SO_REUSEADDR, or two holders could have one port, and set it then, for the server."""
    try:
        holder.bind((LOOPBACK, wished or 0))
    except OSError:
        if not wished:
            raise
        holder.bind((LOOPBACK, 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def is_healthy(port: int) -> bool:
    """Whether ``GET /health`` answers 200 now, within a second."""
    try:
        with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=1.0)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False

"""Waits until a started process answers, and says why when it does not. Polls: vLLM has no other sign of readiness."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from pdcluster_cli.engines import LOOPBACK
from pdcluster_cli.last_words import cause_in, describe_end, last_lines, said
from pdcluster_cli.zygote import EngineHandle

POLL_S: Final = 0.05


class EngineDied(Exception):
    """A process ended that should serve. The message names it, its exit status, the cause and its last lines."""

    def __init__(self, name: str, exit_code: int, log_path: Path) -> None:
        super().__init__(describe_end(name, exit_code, log_path))


class NotReady(TimeoutError):
    """A process does not serve in time. The message names it, the cause if its log has one, and its last lines."""

    def __init__(self, name: str, timeout_s: float, log_path: Path) -> None:
        cause = cause_in(log_path) or "its log holds no error"
        super().__init__(
            f"{name} is not ready after {timeout_s:.0f} s{said(cause)}; the end of {log_path}:\n{last_lines(log_path)}"
        )


def free_port() -> int:
    """A loopback port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def is_healthy(port: int, *, timeout_s: float = 1.0) -> bool:
    """``GET /health`` answers 200 now."""
    try:
        with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def wait_healthy(engine: EngineHandle, port: int, *, deadline: float) -> None:
    """The process answers ``/health``. ``deadline``: monotonic seconds.

    Raises:
        EngineDied: It ended instead.
        NotReady: It does neither by the deadline.
    """
    began = time.monotonic()
    while not is_healthy(port):
        exit_code = engine.wait(POLL_S)
        if exit_code is not None:
            raise EngineDied(engine.spec.name, exit_code, engine.spec.log_path)
        if time.monotonic() > deadline:
            raise NotReady(engine.spec.name, time.monotonic() - began, engine.spec.log_path)

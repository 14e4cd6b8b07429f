"""Waits until a started process answers, and says why when it does not. Polls: vLLM has no other sign of readiness."""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path
from typing import Final

from pdcluster_cli.engines import LOOPBACK
from pdcluster_cli.zygote import EngineHandle

POLL_S: Final = 0.05


class EngineDied(Exception):
    """A process ended that should serve. The message names it, its exit status and its last lines."""

    def __init__(self, name: str, exit_code: int, log_path: Path) -> None:
        how = f"status {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
        super().__init__(f"{name} has ended with {how}; the end of {log_path}:\n{last_lines(log_path)}")
        self.name = name


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def is_healthy(port: int, *, timeout_s: float = 1.0) -> bool:
    """``GET /health`` answers 200 now."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_healthy(engine: EngineHandle, port: int, *, deadline: float) -> None:
    """The process answers ``/health``. ``deadline``: monotonic seconds.

    Raises:
        EngineDied: It ended instead.
        TimeoutError: It does neither by the deadline.
    """
    while not is_healthy(port):
        exit_code = engine.wait(POLL_S)
        if exit_code is not None:
            raise EngineDied(engine.spec.name, exit_code, engine.spec.log_path)
        if time.monotonic() > deadline:
            tail = last_lines(engine.spec.log_path)
            raise TimeoutError(f"{engine.spec.name} does not answer on port {port}; {engine.spec.log_path}:\n{tail}")


def last_lines(path: Path, count: int = 15) -> str:
    """The end of a log, indented; what a person needs to see why a process died."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-count:]
    except OSError as error:
        lines = [f"(no log: {error})"]
    return "\n".join(f"    {line}" for line in lines)

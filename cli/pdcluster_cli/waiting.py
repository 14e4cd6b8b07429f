"""Waits until a started process answers, and says why when it does not. Polls: vLLM has no other sign of readiness."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from pdcluster_cli.engines import LOOPBACK
from pdcluster_cli.root_cause import SIGNALS, root_cause
from pdcluster_cli.zygote import EngineHandle

POLL_S: Final = 0.05
_MAX_LOG_BYTES: Final = 4 << 20
"""Of a log that is searched for a cause. An engine that starts writes some ten KiB; a cause is at its beginning."""


class EngineDied(Exception):
    """A process ended that should serve. The message names it, its exit status, the cause and its last lines."""

    def __init__(self, name: str, exit_code: int, log_path: Path) -> None:
        # By the signal first: who is killed has no time to log why, and what a long log begins with is of another hour.
        cause = SIGNALS.get(-exit_code) or cause_in(log_path)
        how = f"status {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
        super().__init__(f"{name} has ended with {how}{_said(cause)}; the end of {log_path}:\n{last_lines(log_path)}")


class NotReady(TimeoutError):
    """A process does not serve in time. The message names it, the cause if its log has one, and its last lines."""

    def __init__(self, name: str, timeout_s: float, log_path: Path) -> None:
        cause = cause_in(log_path) or "its log holds no error"
        super().__init__(
            f"{name} is not ready after {timeout_s:.0f} s{_said(cause)}; the end of {log_path}:\n{last_lines(log_path)}"
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


def cause_in(log_path: Path) -> str | None:
    """The first error in the log that is no echo of another; None when there is none."""
    try:
        with log_path.open(errors="replace") as log:
            return root_cause(log.read(_MAX_LOG_BYTES))
    except OSError:
        return None


def _said(cause: str | None) -> str:
    return f": {cause}" if cause else ""


def last_lines(path: Path, count: int = 15) -> str:
    """The end of a log, indented; what a person needs to see why a process died."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-count:]
    except OSError as error:
        lines = [f"(no log: {error})"]
    return "\n".join(f"    {line}" for line in lines)

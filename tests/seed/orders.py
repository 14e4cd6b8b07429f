"""What a test run asks of its seed, and how: see ``process.py``. Both sides of one SOCK_SEQPACKET connection per fork.

    asks                                     seed
      Order + descriptors ----------->           forks
      <----------------------- Forked
      <------------------------ Ended            the fork has ended
      (connection closed) ----------->           kills the fork, if it still runs

This file is also what xdist starts and ends for a worker, ``python orders.py SEED ...``: it hands its standard streams
to a fork of the seed, and ends as that does. So it imports little.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 1 << 17
WORKER: Final = "worker"
"""Descriptors: its standard input, output and errors."""
ZYGOTE: Final = "zygote"
"""Descriptors: its end of the parent's socket, and where it logs."""


class SeedError(Exception):
    """The seed of the test run has ended: its last words come at the end of the run."""


class Fork:
    """A fork of the seed, as a ``subprocess.Popen``: nothing of it outlives this object's process."""

    def __init__(
        self, seed: Path, kind: str, descriptors: Sequence[int], env: Mapping[str, str], modules: Sequence[str] = ()
    ) -> None:
        """The fork runs. Waits until the seed has imported what it has to.

        Raises:
            SeedError: There is no seed any more.
        """
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status: int | None = None
        order = json.dumps({"kind": kind, "env": dict(env), "modules": list(modules)})
        try:
            self._connection.connect(str(seed))
            socket.send_fds(self._connection, [order.encode()], list(descriptors))
        except OSError as error:
            raise SeedError(f"the seed of this test run takes no orders at {seed}") from error
        self.pid: int = self._receive()["pid"]

    def wait(self, timeout: float | None = None) -> int:
        """As ``subprocess.Popen.wait``."""
        if self._status is None:
            if timeout is not None and not self._heard_within(timeout):
                raise subprocess.TimeoutExpired("a fork of the seed", timeout)
            self._status = self._receive()["status"]
            self._connection.close()
        return self._status

    def kill(self) -> None:
        """The fork gets SIGKILL, if it still runs."""
        if self._status is None:
            self._connection.shutdown(socket.SHUT_WR)

    def _heard_within(self, timeout_s: float) -> bool:
        return bool(select.select([self._connection], [], [], timeout_s)[0])

    def _receive(self) -> Any:
        message = b""
        with contextlib.suppress(ConnectionError):
            message = self._connection.recv(MAX_MESSAGE_BYTES)
        if not message:
            raise SeedError("the seed of this test run has ended")
        return json.loads(message)


if __name__ == "__main__":
    sys.exit(Fork(Path(sys.argv[1]), WORKER, (0, 1, 2), os.environ).wait() & 0xFF)

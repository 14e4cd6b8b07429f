"""Programs that run while a test needs them, and the ports that they listen on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

KILL_WAIT_S: Final = 10.0
"""Time for the kernel to take a killed process apart."""

_NUM_LINES: Final = 8


class ChildError(Exception):
    """A program ended though it should run. Says what it said last."""


class Child:
    """One running program. Its owner kills it; it dies with the *thread* that made it, if that comes first."""

    def __init__(self, command: Sequence[str | Path], log_file: Path) -> None:
        """It runs. Its output is added to ``log_file``."""
        self.name = Path(command[0]).name
        self.log_file = log_file
        wrapper = [sys.executable, "-P", str(Path(__file__).with_name("child.py")), str(os.getpid())]
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*wrapper, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=log_file.parent,
                start_new_session=True,  # Ctrl-C is the tests' to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """It still runs.

        Raises:
            ChildError: It does not.
        """
        code = self._process.poll()
        if code is not None:
            raise ChildError(f"{self.name} ended with {code}:\n{self.last_words()}")

    def last_words(self) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_NUM_LINES:])

    def kill(self) -> None:
        """It has ended. SIGKILL: the API server would take a minute to stop on SIGTERM."""
        self._process.kill()
        self._process.wait(KILL_WAIT_S)


class ReservedPort:
    """A port of 127.0.0.1 that nobody else is given, whether its program listens or is between two lives.

    Bound and never listening, so that connections are refused unless the program listens; the program must ask for
    the port with SO_REUSEPORT.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()

"""The parent's side of a test run's seed: how pytest starts it, and how a worker starts its zygote from it."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self

from integration.processes import PYTHON_PATH
from pdcluster_cli.processes.engines import LocalDevice, preload_modules, zygote_env
from pdcluster_cli.processes.zygote import Zygote, ZygoteProcess, merge_env
from seed import orders
from seed.orders import ZYGOTE, Fork

_WORKERS_TOO: Final = ("anthropic", "fastapi", "httpx", "kubernetes.aio", "openai", "uvloop")
"""What many tests import and no engine needs."""
SEED_MODULES: Final = (*preload_modules(LocalDevice.CPU), *_WORKERS_TOO)


class Seed:
    """One for a run; started at once, it takes orders when it has imported."""

    def __init__(self, modules: Sequence[str] = SEED_MODULES, *, python_path: str = PYTHON_PATH) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdcluster-seed-")
        self.path = Path(self._folder.name, "seed")
        self._log = self.path.with_suffix(".log")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, self._log.open("ab") as log:
            listener.bind(str(self.path))
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "seed.process", str(listener.fileno()), str(os.getpid()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=merge_env(os.environ, _env(python_path)),
                pass_fds=[listener.fileno()],
            )

    @property
    def worker_command(self) -> str:
        """For execnet, which appends arguments of Python's own."""
        return shlex.join([sys.executable, orders.__file__, str(self.path)])

    def stop(self) -> None:
        """The seed has ended, and all that it has forked. What it had to say is told."""
        self._process.kill()
        self._process.wait()
        if self._log.exists():
            sys.stderr.write(self._log.read_text())
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class SeededZygote(Zygote):
    """A zygote that needs not import what the seed has imported already."""

    def __init__(
        self,
        seed: Path,
        modules: Sequence[str],
        *,
        env: Mapping[str, str | None],
        log_path: Path,
        scratch: Sequence[str],
    ) -> None:
        self._seed = seed
        super().__init__(modules, env=env, log_path=log_path, scratch=scratch)

    def _start(
        self, theirs: socket.socket, modules: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> ZygoteProcess:
        return Fork(self._seed, ZYGOTE, (theirs.fileno(), log.fileno()), env, modules)


def _env(python_path: str) -> dict[str, str | None]:
    """That of engines, but for warnings: workers have their own filters."""
    return {**zygote_env(LocalDevice.CPU), "PYTHONWARNINGS": None, "PYTHONPATH": python_path}

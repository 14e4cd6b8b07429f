"""Starts many engines for the price of one import: the parent's side of the zygote.

Knows processes, not vLLM: the caller chooses the module and its arguments. ``zygote_process.py`` says why nothing
outlives the parent. The two sides talk over one SOCK_SEQPACKET pair:

    parent                                   zygote
      <------------------------- Ready           modules are imported
      EngineSpec -------------------->
      <--- Started + read end of a pipe          the pipe gets the exit status as text when the engine has ended
      (socket closed) --------------->           kill every engine, then end

Each engine has a pipe, so that its exit can be polled. If a pipe ends without a status, the zygote has died and the
kernel has killed the engine with it. The kernel does not kill programs that the engine has started: the parent does.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Protocol, Self

import msgspec

from pdcluster_cli.processes.last_words import describe_end

MAX_MESSAGE_BYTES: Final = 1 << 17
"""Enough for any command line, and below a socket's default buffer of 208 KiB."""
KILL_WAIT_S: Final = 10.0
"""Seconds for the kernel to end a killed process group. It takes longer only if a process hangs in the kernel."""
ORDER_WAIT_S: Final = 60.0
"""Seconds for one fork, which takes some ten milliseconds. Longer only if the zygote is stopped, or memory is out."""

_NAME: Final = "the process that imports and forks"


class ZygoteError(Exception):
    """The zygote ended or cannot fork safely. The message says why, if its log does, and names the log."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One ``python -m module argv`` to start. ``env`` changes the zygote's environment; None unsets a variable.

    ``overrides`` sets module attributes by dotted name before the module runs. Python's stdout and stderr go to
    ``log_path``, each line with ``[name]`` in front.
    """

    name: str
    module: str
    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    log_path: Path
    overrides: Mapping[str, str] = field(default_factory=dict)


def encode_spec(spec: EngineSpec) -> bytes:
    return msgspec.json.encode(spec, enc_hook=str)


def decode_spec(message: bytes) -> EngineSpec:
    return msgspec.json.decode(message, type=EngineSpec, dec_hook=lambda kind, text: kind(text))


class Ready(msgspec.Struct, frozen=True):
    """The zygote can fork. ``num_threads`` must be 1, or a fork may inherit a lock that is never released."""

    import_s: float
    num_threads: int


class Started(msgspec.Struct, frozen=True):
    pid: int


class EngineHandle:
    """One running engine. Any thread may call it; ``close`` frees its file descriptors."""

    def __init__(self, spec: EngineSpec, pid: int, status_fd: int) -> None:
        self.spec = spec
        self.pid = pid
        self.status_fd = status_fd
        """Readable (``select``, ``loop.add_reader``) once the engine and all its forks have ended."""
        self._pidfd = _open_pidfd(pid)
        self._exit_code: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None) -> int | None:
        """The exit code (negative: the signal's number); None: the engine still runs after ``timeout_s``."""
        with self._lock:
            if self._exit_code is None and _is_readable(self.status_fd, timeout_s):
                text = os.read(self.status_fd, 32)
                self._exit_code = int(text) if text else self._kill_group()
            return self._exit_code

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to the engine's main process, if it still runs."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _kill_group(self) -> int:
        """Kill what the engine has left in its process group. Returns the exit code of an engine that died so."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return -signal.SIGKILL

    def stop(self, grace_s: float) -> int | None:
        """End the engine and its forks: SIGTERM, after ``grace_s`` SIGKILL. Returns the exit code; None: it hangs."""
        self.signal(signal.SIGTERM)
        if self.wait(grace_s) is None:
            self.signal(signal.SIGKILL)
        return self.wait(KILL_WAIT_S)

    def close(self) -> None:
        """Close the file descriptors. Does nothing to the engine."""
        os.close(self.status_fd)
        if self._pidfd is not None:
            os.close(self._pidfd)


class ZygoteProcess(Protocol):
    """The part of ``subprocess.Popen`` that the parent uses."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: The process still runs after ``timeout`` seconds.
        """
        ...


class Zygote:
    """The parent's end of one zygote process. One thread at a time starts engines.

    Make it in a thread that lives until the first engine runs: the zygote dies with that thread (see ``linux.py``).
    """

    imports_once = True
    """Whether the zygote imports modules for its engines."""

    def __init__(
        self, modules: Sequence[str], *, env: Mapping[str, str | None], log_path: Path, scratch: Sequence[str] = ()
    ) -> None:
        """Start the process, which imports ``modules``; ``wait_ready`` waits for that.

        ``scratch``: variables to set to a folder of this zygote's own, for files that killed processes leave.
        """
        self.log_path = log_path
        self.imports_once = bool(modules)
        self._scratch = tempfile.mkdtemp(prefix="pdcluster-")
        self._orders = threading.Lock()
        self._ready: Ready | None = None
        self._engines: list[EngineHandle] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ORDER_WAIT_S)
        with theirs, log_path.open("ab") as log:
            own = {**env, **dict.fromkeys(scratch, self._scratch)}
            self._process = self._start(theirs, modules, merge_env(os.environ, own), log)

    def _start(
        self, theirs: socket.socket, modules: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> ZygoteProcess:
        """Start the process with ``theirs`` as its end of the socket."""
        return subprocess.Popen(  # noqa: S603 - our own module, our own interpreter
            [
                sys.executable,
                "-P",  # else the current folder is the first on sys.path: a file there would run as one of ours
                "-m",
                "pdcluster_cli.processes.zygote_process",
                str(theirs.fileno()),
                str(os.getpid()),
                *modules,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float | None) -> Ready | None:
        """Wait until the import has ended; None: it still runs after ``timeout_s``.

        Raises:
            ZygoteError: The process died, or a module left a thread behind.
        """
        if self._ready is None and _is_readable(self._socket.fileno(), timeout_s):
            self._ready = msgspec.json.decode(self._receive(), type=Ready)
            if self._ready.num_threads != 1:
                raise ZygoteError(f"cannot fork: importing left {self._ready.num_threads} threads, not 1")
        return self._ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """For ``select``: readable when the zygote becomes ready or dies."""
        return self._socket.fileno()

    def start_engine(self, spec: EngineSpec) -> EngineHandle:
        """Start an engine. Waits for the import first.

        Raises:
            ZygoteError: The zygote has died, does not answer, or cannot fork safely.
        """
        with self._orders:
            self.wait_ready(None)
            try:
                self._socket.send(encode_spec(spec))
                message, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
            except ConnectionError as error:
                raise self._died() from error
            except TimeoutError as error:
                raise ZygoteError(f"{_NAME} starts nothing for {ORDER_WAIT_S:.0f} s: see {self.log_path}") from error
            if not fds:
                raise self._died()
            engine = EngineHandle(spec, msgspec.json.decode(message, type=Started).pid, fds[0])
            self._engines.append(engine)
            return engine

    def stop(self, grace_s: float = 5.0) -> None:
        """End all engines (SIGTERM to all at once, SIGKILL after ``grace_s``), and then the zygote."""
        deadline = time.monotonic() + grace_s
        for engine in self._engines:
            engine.signal(signal.SIGTERM)
        for engine in self._engines:
            engine.wait(max(0.0, deadline - time.monotonic()))
        self._socket.close()  # the zygote kills what is left
        self._end_process()
        for engine in self._engines:
            engine.wait(KILL_WAIT_S)
            engine.close()
        self._engines.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _end_process(self) -> None:
        if self._ready is None:
            self._process.kill()  # it still imports: it has no engines, and would see the closed socket too late
        self._wait_ended()

    def _wait_ended(self) -> int:
        """The exit code. The process ends by itself, because the socket is closed; if it does not, it is killed."""
        try:
            return self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(KILL_WAIT_S)

    def _receive(self) -> bytes:
        try:
            message = self._socket.recv(MAX_MESSAGE_BYTES)
        except ConnectionError as error:
            raise self._died() from error
        if not message:
            raise self._died()
        return message

    def _died(self) -> ZygoteError:
        return ZygoteError(describe_end(_NAME, self._wait_ended(), self.log_path))


def merge_env(base: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """``base`` with ``changes``. None removes a variable."""
    merged = {**base, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

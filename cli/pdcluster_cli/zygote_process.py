"""The zygote itself: imports once, then forks one engine per order. Decides nothing about engines.

Run by ``zygote.py`` as ``python -m pdcluster_cli.zygote_process SOCKET_FD PARENT_PID MODULE...``. It must stay
single-threaded: a fork copies only the calling thread, and locks that other threads hold stay locked for ever.

Nothing outlives the parent, whichever process gets SIGKILL:
    parent dies   -> end of file on the socket -> the zygote kills every engine's process group
    zygote dies   -> parent-death signal       -> engine dies -> its forks die (fork hook in ``linux.py``)
    engine dies   -> the zygote kills the rest of its process group and waits for them before it reports
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

import msgspec

from pdcluster_cli import linux
from pdcluster_cli.zygote import MAX_MESSAGE_BYTES, EngineSpec, Ready, Started, decode_spec


@dataclass(frozen=True, slots=True)
class ForkedEngine:
    """One forked engine: leader of its own process group, and where its exit status goes."""

    pid: int
    exited_fd: int
    status_fd: int


class Ending:
    """How an engine ends: as every Python program does, but that Python does not take its objects apart.

    They are the zygote's own, and each page that is written to would be copied first: 0.5 s of CPU for a process.
    Threads are waited for and exit functions are called as ever.
    """

    def __init__(self) -> None:
        self._status: int | None = None

    def remember(self, end: SystemExit) -> None:
        """The engine ends so. Texts and uncaught errors are left to Python, which prints them."""
        if end.code is None or isinstance(end.code, int):
            self._status = end.code or 0

    def leave(self) -> None:
        """The process ends, if its status is known. An exit function: the one that was registered first is called
        last."""
        if self._status is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self._status)


def main(arguments: Sequence[str]) -> None:
    """Serves orders until the parent closes the socket."""
    ending = Ending()
    if arguments[2:]:
        atexit.register(ending.leave)
    linux.die_with_parent(int(arguments[1]))
    run(socket.socket(fileno=int(arguments[0])), arguments[2:], ending)


def run(parent: socket.socket, modules: Sequence[str], ending: Ending) -> None:
    """Imports, serves ``parent`` until it closes the socket, and is an engine in each fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _import_once(parent, modules)
    order = _serve(parent)
    if order is not None:
        try:
            _run_as_main(order)
        except SystemExit as end:
            ending.remember(end)
            raise


def _import_once(parent: socket.socket, modules: Sequence[str]) -> None:
    began = time.monotonic()
    gc.disable()  # Its passes over what is imported are a tenth of the time.
    for module in modules:
        import_if_there(module)
    linux.adopt_orphans()
    linux.make_forks_die_with_their_parent()
    gc.collect()
    gc.freeze()  # the collector then leaves the shared pages alone in every engine
    gc.enable()
    parent.send(msgspec.json.encode(Ready(time.monotonic() - began, linux.num_threads())))


def import_if_there(module: str) -> None:
    """A library's other version may lack the module: its engines import what they have instead."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if "." not in missing or not f"{module}.".startswith(f"{missing}."):
            raise


def _serve(parent: socket.socket) -> EngineSpec | None:
    """The order to carry out, in a forked engine; None in the zygote when the parent has gone."""
    linux.outlive_parent()  # from here on the closed socket is the sign, so that engines can be ended first
    children: list[ForkedEngine] = []
    with selectors.DefaultSelector() as selector:
        selector.register(parent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if isinstance(key.data, ForkedEngine):
                    selector.unregister(key.fd)
                    children.remove(key.data)
                    _report_exit(key.data)
                elif (message := _receive(parent)) is None:
                    _kill_all(children)
                    return None
                else:
                    order = decode_spec(message)
                    if (child := _fork(parent)) is None:
                        return order
                    children.append(child)
                    selector.register(child.exited_fd, selectors.EVENT_READ, child)


def _receive(parent: socket.socket) -> bytes | None:
    try:
        return parent.recv(MAX_MESSAGE_BYTES) or None
    except ConnectionError:
        return None


def _fork(parent: socket.socket) -> ForkedEngine | None:
    """The new child, in the zygote; None in the child itself."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        for fd in (read_fd, write_fd):
            os.close(fd)
        parent.close()
        return None
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # both sides set it, so that neither has to wait for the other
    with contextlib.suppress(ConnectionError):  # a parent that has gone shows as end of file in a moment
        socket.send_fds(parent, [msgspec.json.encode(Started(pid))], [read_fd])
    os.close(read_fd)
    return ForkedEngine(pid, os.pidfd_open(pid), write_fd)


def _report_exit(child: ForkedEngine) -> None:
    """The whole process group has ended and the parent knows the leader's status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the leader is not reaped yet, so the id is still its own
    _, wait_status = os.waitpid(child.pid, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-child.pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(child.status_fd, str(os.waitstatus_to_exitcode(wait_status)).encode())
    os.close(child.status_fd)
    os.close(child.exited_fd)


def _kill_all(children: Sequence[ForkedEngine]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        _report_exit(child)


def _run_as_main(order: EngineSpec) -> NoReturn:
    """Becomes ``python -m module argv``, with the order's environment and log file."""
    linux.set_process_name(order.name)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(order.log_path)
    _prefix_lines(sys.stdout, f"[{order.name}] ")
    _prefix_lines(sys.stderr, f"[{order.name}] ")
    for name, value in order.env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    for dotted, text in order.overrides.items():
        owner, _, attribute = dotted.rpartition(".")
        setattr(importlib.import_module(owner), attribute, text)
    sys.argv = [order.module, *order.argv]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _redirect(log_path: Path) -> None:
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null_fd, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)


def _prefix_lines(stream: TextIO, prefix: str) -> None:
    """Every line written to this very object gets the prefix: log handlers made before the fork hold it."""
    write = stream.write
    at_line_start = True

    def write_prefixed(text: str) -> int:
        nonlocal at_line_start
        if text:
            body = text.removesuffix("\n")
            write((prefix if at_line_start else "") + body.replace("\n", "\n" + prefix) + text[len(body) :])
            at_line_start = len(body) < len(text)
        return len(text)

    stream.write = write_prefixed  # type: ignore[method-assign]  # as vLLM's own decorate_logs does


if __name__ == "__main__":
    main(sys.argv[1:])

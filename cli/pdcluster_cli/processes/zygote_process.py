"""The zygote itself: imports once, then forks one engine for each order. Decides nothing about engines.

Run by ``zygote.py`` as ``python -m pdcluster_cli.processes.zygote_process SOCKET_FD PARENT_PID MODULE...``. It must
stay single-threaded: a fork copies only the calling thread, and locks that other threads hold stay locked for ever.

No process outlives the parent, whichever one of them gets SIGKILL, unless it has left its engine's process group:
    parent dies   -> end of file on the socket -> the zygote kills every engine's process group
    zygote dies   -> parent-death signal       -> engine dies -> its forks die (fork hook in ``linux.py``)
                  -> end of file on each pipe  -> the parent kills the rest of each engine's process group
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

from pdcluster_cli.processes import linux
from pdcluster_cli.processes.zygote import MAX_MESSAGE_BYTES, EngineSpec, Ready, Started, decode_spec


@dataclass(frozen=True, slots=True)
class ForkedEngine:
    """One forked engine, which leads its own process group. ``status_fd``: the pipe that gets its exit status."""

    pid: int
    exited_fd: int
    status_fd: int


class Ending:
    """Ends an engine like every Python program, except that Python does not free its objects.

    The engine shares them with the zygote, so to free them would first copy each page: 0.5 s of CPU. Python still waits
    for threads and calls exit functions.
    """

    def __init__(self) -> None:
        self._status: int | None = None

    def remember(self, end: SystemExit) -> None:
        """Note the engine's exit status. Python prints other ends, with a text or an error, itself."""
        if end.code is None or isinstance(end.code, int):
            self._status = end.code or 0

    def leave(self) -> None:
        """End the process, if its status is known. Registered as the first exit function, so Python calls it last."""
        if self._status is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self._status)


def main(arguments: Sequence[str]) -> None:
    """Serve orders until the parent closes the socket."""
    ending = Ending()
    if arguments[2:]:
        atexit.register(ending.leave)
    linux.die_with_parent(int(arguments[1]))
    run(socket.socket(fileno=int(arguments[0])), arguments[2:], ending)


def run(parent: socket.socket, modules: Sequence[str], ending: Ending) -> None:
    """Import, and serve ``parent`` until it closes the socket. In each fork: run the engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
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
    gc.disable()  # Its passes would take a tenth of the import's time.
    for module in modules:
        import_if_there(module)
    linux.adopt_orphans()
    linux.make_forks_die_with_their_parent()
    gc.collect()
    gc.freeze()  # so the collector does not write to shared pages in any engine
    gc.enable()
    parent.send(msgspec.json.encode(Ready(time.monotonic() - began, linux.num_threads())))


def import_if_there(module: str) -> None:
    """Import the module, unless this version of its library lacks it: engines then import another module themselves."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if "." not in missing or not f"{module}.".startswith(f"{missing}."):
            raise


def _serve(parent: socket.socket) -> EngineSpec | None:
    """Fork an engine for each order. A fork returns its order; the zygote returns None when the parent has gone."""
    linux.outlive_parent()  # from here on a closed socket shows that the parent died: we end the engines first
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
    """Fork. Returns the new child in the zygote, and None in the child itself."""
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
    with contextlib.suppress(ConnectionError):  # if the parent has gone, the socket shows end of file next
        socket.send_fds(parent, [msgspec.json.encode(Started(pid))], [read_fd])
    os.close(read_fd)
    return ForkedEngine(pid, os.pidfd_open(pid), write_fd)


def _report_exit(child: ForkedEngine) -> None:
    """End the whole process group and tell the parent the leader's status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the leader is not reaped yet, so the group's id is not reused
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
    """Run as ``python -m module argv``, with the order's environment and log file."""
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
    """Put the prefix before every line that is written to this object, which log handlers from before the fork hold."""
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

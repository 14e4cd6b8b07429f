"""The seed of a test run: it imports vLLM once, then forks the workers of the run and their zygotes.

Run by ``start.py`` as ``python -m seed.process LISTENER_FD PARENT_PID MODULE...``. Each import is 8 s of CPU time, and
without it each of five workers made it for its tests and once more for its engines. Single-threaded, as a zygote:
``pdcluster_cli/processes/zygote_process.py``.

Nothing outlives the run:
    pytest dies      -> parent-death signal -> the seed dies -> parent-death signal -> workers and zygotes die
    a worker's ask   -> end of the connection -> its fork is killed: a worker that xdist gives up, a worker's zygote
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_cli.processes import linux, zygote_process
from seed.orders import MAX_MESSAGE_BYTES, WORKER

_DESCRIPTORS: Final = 3


@dataclass(frozen=True, slots=True)
class Child:
    """One fork, its exit as a descriptor, and who asked for it."""

    pid: int
    exited_fd: int
    asker: socket.socket


def main(arguments: Sequence[str]) -> None:
    """Serves orders until it is killed; is the worker or the zygote in each fork."""
    ending = zygote_process.Ending()
    atexit.register(ending.leave)
    linux.die_with_parent(int(arguments[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the workers' to handle
    listener = socket.socket(fileno=int(arguments[0]))
    _import_once(arguments[2:])
    become = _serve(listener)
    try:
        become(ending)
        sys.exit(0)
    except SystemExit as end:
        ending.remember(end)
        raise


def _import_once(modules: Sequence[str]) -> None:
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            zygote_process.import_if_there(module)
    if (threads := linux.num_threads()) != 1:
        sys.exit(f"the seed of the tests cannot fork: importing left {threads} threads, not 1")
    os.ftruncate(sys.stdout.fileno(), 0)  # warnings of libraries: told only where something went wrong
    gc.collect()
    gc.freeze()


def _serve(listener: socket.socket) -> Callable[[zygote_process.Ending], None]:
    """What a fork does, in it. The seed itself stays here."""
    children: list[Child] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if isinstance(key.data, Child):
                    if key.data in children:
                        _look_after(key, selector, children)
                elif (order := _receive(listener)) is not None:
                    asker, message, descriptors = order
                    child = _fork(asker)
                    if child is None:
                        _close([listener, *(other.asker for other in children), asker])
                        return _becoming(message, descriptors)
                    _close_all(descriptors)
                    children.append(child)
                    selector.register(child.exited_fd, selectors.EVENT_READ, child)
                    selector.register(asker, selectors.EVENT_READ, child)


def _receive(listener: socket.socket) -> tuple[socket.socket, Any, list[int]] | None:
    asker, _ = listener.accept()
    message, descriptors, _, _ = socket.recv_fds(asker, MAX_MESSAGE_BYTES, _DESCRIPTORS)
    if message:
        return asker, json.loads(message), descriptors
    asker.close()
    return None


def _fork(asker: socket.socket) -> Child | None:
    """The new child, in the seed; None in the child itself."""
    seed = os.getpid()
    pid = os.fork()
    if pid == 0:
        linux.die_with_parent(seed)
        return None
    _tell(asker, pid=pid)
    return Child(pid, os.pidfd_open(pid), asker)


def _look_after(key: selectors.SelectorKey, selector: selectors.BaseSelector, children: list[Child]) -> None:
    """A fork has ended, or its asker has gone."""
    child: Child = key.data
    if key.fileobj is child.asker:
        selector.unregister(child.asker)
        signal.pidfd_send_signal(child.exited_fd, signal.SIGKILL)
        return
    selector.unregister(child.exited_fd)
    if child.asker in selector.get_map():
        selector.unregister(child.asker)
    children.remove(child)
    _, wait_status = os.waitpid(child.pid, 0)
    _tell(child.asker, status=os.waitstatus_to_exitcode(wait_status))
    child.asker.close()
    os.close(child.exited_fd)


def _tell(asker: socket.socket, **fact: int) -> None:
    with contextlib.suppress(ConnectionError):  # one that has gone shows as end of file in a moment
        asker.send(json.dumps(fact).encode())


def _becoming(order: Any, descriptors: list[int]) -> Callable[[zygote_process.Ending], None]:
    os.environ.clear()
    os.environ.update(order["env"])
    if order["kind"] == WORKER:
        return lambda _: _be_worker(descriptors)
    return lambda ending: _be_zygote(descriptors, order["modules"], ending)


def _be_worker(descriptors: Sequence[int]) -> None:
    """As ``python -c LINE`` with execnet's first line: it reads the rest from its standard input."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for own, given in enumerate(descriptors):
        os.dup2(given, own)
        os.close(given)
    sys.argv = ["-c"]
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    gc.enable()
    exec(eval(sys.stdin.readline()), main_module.__dict__)


def _be_zygote(descriptors: Sequence[int], modules: Sequence[str], ending: zygote_process.Ending) -> None:
    socket_fd, log_fd = descriptors
    os.setsid()
    for own in (1, 2):
        os.dup2(log_fd, own)
    os.close(log_fd)
    warnings.simplefilter("ignore")
    zygote_process.run(socket.socket(fileno=socket_fd), modules, ending)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Ties the lives of processes together as only Linux can. Knows nothing of engines.

Source of truth: prctl(2). The parent-death signal is sent when the parent *thread* ends, so a process must be started
from a thread that lives as long as the process shall. A fork does not inherit the setting, hence the fork hook.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """This process gets SIGKILL when its parent dies, or now if the parent has died already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """This process no longer gets SIGKILL when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def make_forks_die_with_their_parent() -> None:
    """From now on every ``os.fork`` child of this process and of its descendants dies with its own parent.

    So do processes that an engine forks (vLLM's EngineCore and its workers, through ``multiprocessing``).
    """
    pid_before_fork = [os.getpid()]

    def remember_parent() -> None:
        pid_before_fork[0] = os.getpid()

    os.register_at_fork(before=remember_parent, after_in_child=lambda: die_with_parent(pid_before_fork[0]))


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, which can then wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """``ps -o comm`` and ``top`` show ``name`` for this process, cut to 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def num_threads() -> int:
    """Threads of this process as the kernel counts them, those of native libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

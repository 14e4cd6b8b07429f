"""The box: namespaces of our own, in which a whole node lives and dies.

    make e2e                        outside: makes a run's folder and cgroups, waits, removes them
      unshare                       new mount, PID, network, IPC, UTS and cgroup namespaces
        box_init (PID 1)            mounts, loopback, reaps what has no parent
          pytest                    etcd, API server, containerd, kubelet, ... : its children

Whoever is killed, and however: when PID 1 dies the kernel kills everything in its PID namespace, pods too, and with the
last process go all mounts, links, addresses, firewall rules and kernel settings of the network. Nothing of it was ever
to be seen outside, and no packet leaves. What is left are a folder and empty cgroups, which this run removes or the
next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Final

from e2e import groups

PREFIX: Final = groups.PREFIX
FOLDER_VARIABLE: Final = "PDCLUSTER_E2E_FOLDER"
"""Tells those inside where the run's folder is."""
_GONE_S: Final = 20.0
"""Time for the kernel to take killed processes apart."""
_UNSHARE: Final = (
    "unshare",
    *("--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--mount-proc"),
    *("--fork", "--kill-child=SIGKILL"),
)
_ELSE: Final = "or give a cluster: KUBECONFIG=... make e2e"
_HERE: Final = Path(__file__).resolve().parent


class BoxError(Exception):
    """This machine cannot hold a node. Says why, and what helps."""


def run_in_box(runs: Path, command: Sequence[str]) -> int:
    """The exit status of ``command``, run in a new box. ``runs``: where runs have their folders.

    Raises:
        BoxError: It cannot be made.
    """
    _check_host()
    runs.mkdir(parents=True, exist_ok=True)
    with _ended_in_order(), _run_folder(runs) as folder:
        enter = [sys.executable, "-P", str(_HERE / "box_enter.py"), str(os.getpid()), folder.name]
        init = [sys.executable, "-P", str(_HERE / "box_init.py"), str(folder)]
        process = subprocess.Popen(
            [*enter, *_UNSHARE, *init, *command],
            cwd=_HERE.parent,
            env={**os.environ, FOLDER_VARIABLE: str(folder), "KUBECACHEDIR": str(folder / "kubectl")},
        )
        return _status_of(process)


def remove_dead_runs(runs: Path) -> None:
    """What killed runs left is gone. A run that lives holds its lock."""
    for folder in runs.glob(f"{PREFIX}*"):
        with _try_lock(folder) as is_dead:
            if is_dead:
                _remove(folder)
    for name in groups.found_names():
        if not (runs / name).exists():
            groups.remove_groups(name, 0.0)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end us as Ctrl-C's second time does: nothing is left for the next run to sweep."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _status_of(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches pytest too, which ends in order; the second one ends us, and with us everything."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()
    finally:
        process.kill()
        process.wait()


@contextmanager
def _run_folder(runs: Path) -> Iterator[Path]:
    """A new one, locked. One starts at a time, so that none is taken for dead before it has its lock."""
    folder = runs / f"{PREFIX}{token_hex(4)}"
    with ExitStack() as stack:
        with (runs / ".starting").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            remove_dead_runs(runs)
            folder.mkdir()
            stack.enter_context(_try_lock(folder))
        stack.callback(_remove_and_tell, folder)
        yield folder


@contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Whether it was free; the kernel gives it back when its holder dies."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _remove_and_tell(folder: Path) -> None:
    if left := _remove(folder):
        print(f"pdcluster: still there: {', '.join(map(str, left))}", file=sys.stderr)


def _remove(folder: Path) -> list[Path]:
    """Groups first: as long as they have processes, the folder is in use. Nothing is mounted there out here."""
    left = groups.remove_groups(folder.name, _GONE_S)
    shutil.rmtree(folder, ignore_errors=True)
    return [*left, *([folder] if folder.exists() else [])]


def _check_host() -> None:
    """In the order in which a person can mend it; each says what."""
    if os.geteuid() != 0:
        raise BoxError(f"a node of our own needs root: sudo make e2e; {_ELSE}")
    if not groups.own_groups(Path("/proc/self/cgroup").read_text()):
        raise BoxError(
            "this machine has cgroups of version 2 alone, and a node of our own knows version 1: start the kernel with "
            f"systemd.unified_cgroup_hierarchy=0; {_ELSE}"
        )
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise BoxError(f"no namespaces here ({tried.stderr.strip()}): a container needs --privileged; {_ELSE}")

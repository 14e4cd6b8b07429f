"""A real slow link on one machine: two network namespaces joined by a veth pair whose ends are rate-limited.

    namespace A 10.77.0.1 ---- tbf ---- veth ---- tbf ---- 10.77.0.2 namespace B

Decides names, addresses and the queue (``tbf``: not every kernel has ``netem``).
Source of truth: ip-netns(8), tc-tbf(8), setns(2). A namespace belongs to a thread: what a thread opens or starts while
it is ``inside`` an end (sockets, processes) stays there. Names hold the maker's process id, by which the next run
finds and removes the namespaces of a killed run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

PREFIX: Final = "pdcluster-link"
_COMMAND_TIMEOUT_S: Final = 10.0
_CLONE_NEWNET: Final = 0x40000000
_CLONE_NEWNS: Final = 0x00020000
_NAMESPACES: Final = Path("/run/netns")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class LinkError(Exception):
    """A link cannot be made, changed or entered here. The message says why."""


class End(Enum):
    """One side of the link. ``value``: its address."""

    A = "10.77.0.1"
    B = "10.77.0.2"

    @property
    def device(self) -> str:
        return f"link-{self.name.lower()}"


@dataclass(frozen=True, slots=True)
class Link:
    """Two namespaces that reach each other and nothing else. ``maker``: process id of the program that made it."""

    maker: int

    def namespace(self, end: End) -> str:
        """The name of one end's namespace, for ``ip netns``."""
        return f"{PREFIX}-{self.maker}-{end.name.lower()}"

    def set_rate(self, rate: str) -> None:
        """Both directions carry ``rate`` (tc's spelling: ``1gbit``) from now on.

        Raises:
            LinkError: The kernel has no tbf queue, or tc does not know the rate.
        """
        for end in End:
            shape = f"tc -n {self.namespace(end)} qdisc replace dev {end.device} root tbf rate {rate}"
            _run(*shape.split(), "burst", "1mb", "latency", "50ms")

    def command(self, end: End, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` at one end."""
        return ["ip", "netns", "exec", self.namespace(end), *argv]

    @contextmanager
    def inside(self, end: End) -> Iterator[None]:
        """The calling thread is at one end; sockets and processes that it makes stay there for good.

        Raises:
            LinkError: The namespace is gone.
        """
        with Path("/proc/thread-self/ns/net").open("rb") as home:
            _enter(_NAMESPACES / self.namespace(end))
            try:
                yield
            finally:
                _set_namespace(home.fileno())

    @contextmanager
    def starting(self, end: End) -> Iterator[None]:
        """As ``inside``, for starting processes: they also see the end's devices in ``/sys`` (UCX looks there).

        Raises:
            LinkError: The namespace is gone, or ``/sys`` cannot be mounted.
        """
        with self.inside(end), Path("/proc/thread-self/ns/mnt").open("rb") as home:
            folder = Path.cwd()
            _call("unshare", _CLONE_NEWNS)
            try:
                _run("mount", "--make-rslave", "/")
                _run("mount", "-t", "sysfs", "sysfs", "/sys")
                yield
            finally:
                _call("setns", home.fileno(), _CLONE_NEWNS)
                os.chdir(folder)  # setns took us to the root


@contextmanager
def open_link(rate: str) -> Iterator[Link]:
    """A link of ``rate`` in each direction. At the end it is removed, and what still runs in it is killed.

    Raises:
        LinkError: We are not root, iproute2 is missing, or the kernel cannot do it.
    """
    _require_tools()
    remove_leftovers()
    link = Link(os.getpid())
    try:
        _build(link)
        link.set_rate(rate)
        yield link
    finally:
        for end in End:
            _remove(link.namespace(end))


def remove_leftovers() -> list[str]:
    """Removes links of runs that have ended, and kills the processes in them. Returns the namespaces' names."""
    leftovers = [path.name for path in _NAMESPACES.glob(f"{PREFIX}-*") if not _is_running(_maker(path.name))]
    for name in leftovers:
        _remove(name)
    return leftovers


def _require_tools() -> None:
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise LinkError(f"{' and '.join(missing)} not found: apt-get install iproute2")
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root: run it with sudo")


def _build(link: Link) -> None:
    for end in End:
        _run("ip", "netns", "add", link.namespace(end))
    a, b = (link.namespace(end) for end in End)
    pair = f"ip link add {End.A.device} netns {a} type veth peer name {End.B.device} netns {b}"
    _run(*pair.split())
    for end in End:
        at = ["ip", "-n", link.namespace(end)]
        _run(*at, "address", "add", f"{end.value}/24", "dev", end.device)
        _run(*at, "link", "set", "lo", "up")
        _run(*at, "link", "set", end.device, "up")


def _remove(namespace: str) -> None:
    """The namespace is gone, and with it its end of the pair; its processes are killed first."""
    if not (_NAMESPACES / namespace).exists():
        return
    for pid in _run("ip", "netns", "pids", namespace).split():
        # Ours: only this file puts processes into a namespace of this name.
        if int(pid) != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", namespace)


def _maker(namespace: str) -> int:
    number = namespace.removeprefix(f"{PREFIX}-").partition("-")[0]
    return int(number) if number.isdigit() else 0


def _is_running(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise LinkError(f"{' '.join(argv)}: {error.stderr.strip()}: does this kernel have veth and tbf?") from error
    except subprocess.TimeoutExpired as error:
        raise LinkError(f"{' '.join(argv)} did not end within {_COMMAND_TIMEOUT_S:g} s") from error
    return done.stdout


def _enter(namespace: Path) -> None:
    try:
        with namespace.open("rb") as file:
            _set_namespace(file.fileno())
    except OSError as error:
        raise LinkError(f"{namespace} cannot be entered: {error.strerror}") from error


def _set_namespace(fd: int) -> None:
    _call("setns", fd, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    """A system call of the calling thread. ``os`` has ``setns`` and ``unshare`` only from Python 3.12 on."""
    if getattr(_LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

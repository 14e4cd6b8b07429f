"""What the kernel says about processes and ports, for tests of starting and stopping."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1]
PARTS: Final = ("protocol", "router", "connector", "operator", "kube", "cli")
PYTHON_PATH: Final = os.pathsep.join(map(str, [TESTS, *(TESTS.parent / part for part in PARTS)]))
"""Of a child that runs this checkout's code in whichever environment. An environment of an older vLLM is shared by all
checkouts, and the one that made it may be gone."""


def is_running(pid: int) -> bool:
    """The process exists and is not a zombie: no process reaps orphans in a bare container.

    A killed process is a zombie as soon as its first thread has ended. The others may still hold its ports.
    """
    folder = Path(f"/proc/{pid}")
    try:
        stat, num_threads = (folder / "stat").read_text(), len(list((folder / "task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return num_threads > 1 or stat.rpartition(")")[2].split()[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    """The process exists and SIGSTOP holds it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> set[int]:
    """All running processes below ``pid``."""
    parents = {int(entry.name): _parent_of(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found: set[int] = set()
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return {child for child in found if is_running(child)}


def process_name(pid: int) -> str:
    """What ``ps -o comm`` shows; empty for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_port_free(port: int) -> bool:
    """Nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def env_with_tests() -> dict[str, str]:
    """This environment with the tests' modules importable in a child."""
    return {**os.environ, "PYTHONPATH": PYTHON_PATH}


def _parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0

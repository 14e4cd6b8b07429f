"""A cgroup of our own in each hierarchy: everything below it goes with us.

Source of truth: cgroups(7), version 1. On a host with version 2 alone there is nothing here to be found, and ``make
e2e`` says so: give it a KUBECONFIG there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
PREFIX: Final = "pdcluster-e2e-"
_CPUSET_FILES: Final = ("cpuset.cpus", "cpuset.mems")
_POLL_S: Final = 0.05


def own_groups(told: str) -> dict[str, Path]:
    """Hierarchy to the folder of a process's cgroup. ``told``: its ``/proc/PID/cgroup``.

    ``4:memory:/user/1`` is {"memory": /sys/fs/cgroup/memory/user/1}; ``9:name=systemd:/`` is {"systemd": ...}.
    """
    lines = [line.split(":", 2) for line in told.splitlines()]
    named = {names.removeprefix("name="): path.lstrip("/") for number, names, path in lines if number != "0"}
    return {name: ROOT / name / path for name, path in named.items()}


def enter_new_groups(name: str) -> None:
    """This process, and all that it starts, is in a cgroup ``name`` below the one that it was in."""
    for hierarchy, parent in own_groups(Path("/proc/self/cgroup").read_text()).items():
        group = parent / name
        group.mkdir()
        if hierarchy == "cpuset":  # A new one has no cores, and takes nobody in.
            for file in _CPUSET_FILES:
                (group / file).write_text((parent / file).read_text())
        (group / "cgroup.procs").write_text("0")


def remove_groups(name: str, limit_s: float) -> list[Path]:
    """Those called ``name`` are gone, with all below them. Returns those that are not: somebody still lives there."""
    deadline = time.monotonic() + limit_s
    while (left := _removed_all_but(name)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def found_names() -> set[str]:
    """Names of cgroups that this or an earlier run made."""
    return {group.name for group in _found(f"{PREFIX}*")}


def _removed_all_but(name: str) -> list[Path]:
    for group in _found(name):
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            _remove(folder)
        _remove(group)
    return _found(name)


def _found(pattern: str) -> list[Path]:
    """Right below our own: another's cgroups are many, and none of our business."""
    places = own_groups(Path("/proc/self/cgroup").read_text()).values()
    return [path for place in places for path in place.glob(pattern) if path.is_dir()]


def _remove(folder: Path) -> None:
    """The kernel refuses while a process is in it, and the next look tries again."""
    try:
        folder.rmdir()
    except OSError:
        return

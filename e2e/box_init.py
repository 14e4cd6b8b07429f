"""``python box_init.py FOLDER PROGRAM ARGUMENTS...``: PID 1 of a box. Furnishes it, runs PROGRAM, ends with its status.

What is written below /var and /run goes to FOLDER or to memory, for CNI, containerd, iptables and the kubelet have
places there that no flag changes. Kernel settings that the kubelet wants for itself look to it as it wants them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
KERNEL_SETTINGS: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet would write for the whole machine (Kubernetes 1.35, ``setupKernelTunables``)."""


def main(folder: Path, command: Sequence[str]) -> int:
    """The status of ``command``, 2 when the box cannot be furnished. When this returns, the kernel kills all that is
    left."""
    try:
        furnish(folder)
    except subprocess.CalledProcessError as error:
        told = f"{' '.join(error.cmd)} ended with {error.returncode}"
        print(f"pdcluster: this machine cannot hold a node: {told}; KUBECONFIG=... make e2e", file=sys.stderr)
        return 2
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's to handle
    return reap_until(process.pid)


def furnish(folder: Path) -> None:
    """Mounts and links; seen by nobody outside."""
    _mount("-t", "tmpfs", "tmpfs", "/run")
    _show_own_groups(Path("/proc/self/mounts").read_text())
    _overlay(folder / "var", Path("/var"))
    _freeze_kernel_settings(folder / "kernel")
    _run("ip", "link", "set", "lo", "up")


def reap_until(pid: int) -> int:
    """The exit status of ``pid``; what died without a parent meanwhile is nobody's zombie."""
    while True:
        dead, status = os.wait()
        if dead == pid:
            return abs(os.waitstatus_to_exitcode(status))


def _show_own_groups(mounts: str) -> None:
    """Mounted anew, a hierarchy shows our cgroup as its root: runc and the kubelet find themselves at ``/``. Version 2
    beside version 1 has no cgroup of ours to be the root, and what runc makes there nobody would remove: not shown."""
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        if Path(place).parent != CGROUPS:
            continue
        if kind == "cgroup2":
            _run("umount", place)
        if kind == "cgroup":
            name = Path(place).name
            controllers = [option for option in options.split(",") if option == name or option.startswith("name=")]
            chosen = controllers or name.split(",")
            _run("umount", place)
            _mount("-t", "cgroup", "-o", ",".join(_named(chosen)), "cgroup", place)


def _named(controllers: Sequence[str]) -> list[str]:
    """A hierarchy without a controller is called by its name."""
    return ["none", *controllers] if any(one.startswith("name=") for one in controllers) else [*controllers]


def _overlay(folder: Path, over: Path) -> None:
    upper, work = folder / "upper", folder / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir={over},upperdir={upper},workdir={work}", str(over))


def _freeze_kernel_settings(folder: Path) -> None:
    folder.mkdir()
    for name, value in KERNEL_SETTINGS.items():
        file = folder / name.replace("/", ".")
        file.write_text(value + "\n")
        _mount("--bind", str(file), f"/proc/sys/{name}")


def _mount(*words: str) -> None:
    _run("mount", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

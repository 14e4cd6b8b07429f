"""Makes Mooncake move bytes by the protocol that was asked for, or says why it cannot.

Mooncake's Python ``initialize`` hardly looks at its protocol argument. It finds transports by itself, and obeys
environment variables, which count as set whatever their value is (read in ``transfer_engine_impl.cpp``). The published
wheels mooncake-transfer-engine 0.3.13.post1, -cuda13 0.3.14 and -non-cuda 0.3.13.post1 have these names:

    MC_FORCE_TCP        TCP and nothing else; looked at before all others
    MC_FORCE_HCA        RDMA, or an error
    neither             RDMA if it sees a device that it can use, else TCP, without a word
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import TransferProtocol

_FORCED_BY: Final = {TransferProtocol.TCP: "MC_FORCE_TCP", TransferProtocol.RDMA: "MC_FORCE_HCA"}
_CHOOSES: Final = (
    "MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL", "MC_FORCE_SHM", "MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK",
    "MC_USE_TENT", "MC_USE_TEV1",
)  # fmt: skip
"""Variables that tell Mooncake which transport to use, or to choose one by rules of its own."""
_LEGACY: Final = "MC_TCP_PROTO"
_VERBS: Final = "libibverbs.so.1"
_LOCKED_LINE: Final = "CapEff:"
_CAP_IPC_LOCK: Final = 14


def environment_of(protocol: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make Mooncake use ``protocol``; ``environ``: the user's environment.

    Raises:
        ConfigError: There is no such protocol, or ``environ`` asks for another one or for TCP without acknowledgements.
    """
    if environ.get(_LEGACY) == "1":
        raise ConfigError(f"{_LEGACY}=1 makes Mooncake report bytes that have not arrived: unset it")
    if protocol not in list(TransferProtocol):
        raise ConfigError(f"transfer_protocol is {protocol!r}: use one of {', '.join(sorted(TransferProtocol))}")
    forced = _FORCED_BY.get(TransferProtocol(protocol))
    if contrary := [name for name in _CHOOSES if name in environ and name != forced]:
        name = contrary[0]
        raise ConfigError(
            f"transfer_protocol is {protocol}, but {name}={environ[name]} tells Mooncake to use something else (it "
            f"counts as set whatever its value is): unset {name}, or choose the other transfer_protocol"
        )
    return {forced: environ.get(forced, "1")} if forced else {}


def load_verbs() -> Any:
    """The library by which RDMA devices are opened.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        verbs = ctypes.CDLL(_VERBS, use_errno=True)
    except OSError as error:
        raise ConfigError(
            f"transfer_protocol is rdma, but {_VERBS} cannot be loaded ({error}): apt-get install libibverbs1, or use "
            "transfer_protocol tcp"
        ) from error
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype, verbs.ibv_get_device_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    verbs.ibv_open_device.restype, verbs.ibv_open_device.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    verbs.ibv_close_device.argtypes = [ctypes.c_void_p]
    verbs.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    return verbs


def require_rdma_devices(names: Sequence[str] = (), load: Callable[[], Any] = load_verbs) -> None:
    """This process may open each of the RDMA devices in ``names``, or at least one device if none is named.

    A container may lack a device that ``/sys`` shows. Mooncake passes over a name that it does not find.

    Raises:
        ConfigError: libibverbs or a named device is missing, or a named device cannot be opened. Or none is named, and
            none can be opened.
    """
    found = _devices_found(load())
    there = ", ".join(found) or "no RDMA device"
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"transfer_devices names {', '.join(missing)}, and libibverbs finds {there}: name devices of this machine, "
            "or leave transfer_devices out"
        )
    closed = [name for name in names or found if not found[name]]
    if closed if names else len(closed) == len(found):
        problem = f"{', '.join(closed)} cannot be opened" if closed else "libibverbs finds no RDMA device"
        raise ConfigError(
            f"transfer_protocol is rdma, but {problem}: give this process /dev/infiniband/uverbs* (in Kubernetes the "
            "resource of your RDMA device plugin), or use transfer_protocol tcp"
        )


def _devices_found(verbs: Any) -> dict[str, bool]:
    """The RDMA devices by name, in libibverbs' order, and whether this process may open each."""
    number = ctypes.c_int(0)
    devices = verbs.ibv_get_device_list(ctypes.byref(number))
    try:
        return {
            verbs.ibv_get_device_name(devices[index]).decode(): _may_open(verbs, devices[index])
            for index in range(number.value)
        }
    finally:
        if devices:
            verbs.ibv_free_device_list(devices)


def _may_open(verbs: Any, device: Any) -> bool:
    context = verbs.ibv_open_device(device)
    if context:
        verbs.ibv_close_device(context)
    return bool(context)


def locked_memory_problem(
    num_bytes: int, limit_bytes: int | None = None, status: Path = Path("/proc/self/status")
) -> str:
    """Why RDMA may be unable to register ``num_bytes`` of host memory; empty: it is allowed to.

    ``limit_bytes``: None: this process's limit. A process with CAP_IPC_LOCK has no limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit_bytes is None else limit_bytes
    if limit == resource.RLIM_INFINITY or limit >= num_bytes or _may_lock(status):
        return ""
    return (
        f"this process may lock {limit} bytes (ulimit -l) and has {num_bytes} bytes of KV to register for rdma: if "
        "that fails, raise the limit (ulimit -l unlimited), or give it CAP_IPC_LOCK"
    )


def _may_lock(status: Path) -> bool:
    lines = (line for line in status.read_text().splitlines() if line.startswith(_LOCKED_LINE))
    return any(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1 for line in lines)

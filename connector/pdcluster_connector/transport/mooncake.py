"""Mooncake Transfer Engine (0.3.13) by submit and poll.

Source of truth: ``mooncake.engine.TransferEngine`` of ``mooncake-transfer-engine-non-cuda`` 0.3.13:
``initialize``, ``register_memory``, ``transfer_submit_write`` (returns an id, 0 or less on refusal),
``transfer_check_status`` (0 pending, 1 done, negative failed; an id is forgotten once it is not pending).
"""

from __future__ import annotations

import os
from typing import Any, Final

from pdcluster_connector.transport.base import WriteId, WriteStatus
from pdcluster_connector.transport.registered import RegisteredMemory
from pdcluster_protocol.errors import ConfigError, TransferError

_QUEUE_VARIABLE: Final = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
_QUEUE_LIMIT: Final = "65535"
"""Default 2,048 for all threads together; past it Mooncake refuses and leaves the peer in doubt."""
_ACKED_FROM: Final = "MC_TCP_PROTO"
_SYSTEM_LIBRARIES: Final = "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"


class MooncakeTransport:
    """One TransferEngine. Lane threads may call ``submit_write`` and ``write_status`` at the same time."""

    def __init__(self, host: str, protocol: str) -> None:
        """Listen on ``host`` at a free port. Waits for Mooncake's own start (tens of milliseconds).

        Raises:
            ConfigError: Mooncake is missing, set up without acknowledgements, or refuses to start.
        """
        self._memory = RegisteredMemory()
        self._engine = _start_engine(host, protocol)
        self._session = f"{host}:{self._engine.get_rpc_port()}"

    @property
    def session(self) -> str:
        return self._session

    def register(self, address: int, num_bytes: int) -> None:
        status = self._engine.register_memory(address, num_bytes)
        if status != 0:
            raise ConfigError(
                f"Mooncake cannot register {num_bytes} bytes of KV cache (status {status}): "
                "is the locked-memory limit (ulimit -l) large enough, and the protocol right for this device?"
            )
        self._memory.add(address, num_bytes)

    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        self._memory.require(source, num_bytes)
        write = self._engine.transfer_submit_write(session, source, target, num_bytes)
        if write <= 0:
            raise TransferError(f"Mooncake refused a write of {num_bytes} bytes (status {write})")
        return WriteId(write)

    def write_status(self, write: WriteId) -> WriteStatus:
        status = self._engine.transfer_check_status(write)
        if status == 0:
            return WriteStatus.PENDING
        return WriteStatus.DONE if status > 0 else WriteStatus.FAILED

    def close(self) -> None:
        # The engine stops listening when it is destroyed.
        self._engine = None


def _start_engine(host: str, protocol: str) -> Any:
    if os.environ.get(_ACKED_FROM) == "1":
        raise ConfigError(f"{_ACKED_FROM}=1 lets Mooncake report bytes that have not arrived: unset {_ACKED_FROM}")
    # Read by Mooncake when an engine is constructed, so it must be in the environment by now.
    os.environ.setdefault(_QUEUE_VARIABLE, _QUEUE_LIMIT)
    try:
        from mooncake.engine import TransferEngine  # needs system libraries: fail with their names
    except ImportError as error:
        raise ConfigError(f"Mooncake cannot be loaded ({error}): {_SYSTEM_LIBRARIES}") from error
    engine = TransferEngine()
    if status := engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise ConfigError(
            f"Mooncake cannot start on {host} with transfer_protocol {protocol!r} (status {status}): "
            "is the host an address of this machine, and the protocol tcp, rdma or ascend?"
        )
    return engine

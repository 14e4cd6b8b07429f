"""A peer in a process of its own: HOST FD NUM_BYTES. Registers the shared memory and serves until stdin is closed."""

from __future__ import annotations

import ctypes
import mmap
import sys

from pdcluster_connector.transport.base import TransportSettings
from pdcluster_connector.transport.mooncake import MooncakeTransport


def main(host: str, fd: int, num_bytes: int) -> None:
    """Serves until stdin is closed."""
    memory = mmap.mmap(fd, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    transport = MooncakeTransport(TransportSettings(host, "tcp"))
    transport.register(address, num_bytes)
    print(transport.session, address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

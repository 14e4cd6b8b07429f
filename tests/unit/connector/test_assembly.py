"""A session that cannot be started whole leaves nothing of itself."""

from __future__ import annotations

import pytest

from fakes.network import FakeNetwork, FakeTransport
from integration.ranks import Cache, Shape, fingerprint_of
from pdcluster_connector.assembly import _registered
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.transport.base import RegisteredMemory
from pdcluster_protocol.errors import ConfigError


class Unregistered(FakeTransport):
    """Takes no memory."""

    def register(self, address: int, num_bytes: int) -> None:
        raise ConfigError(f"{num_bytes} bytes at {address:#x} cannot be pinned")


def test_a_session_whose_memory_cannot_be_registered_is_closed() -> None:
    transport = Unregistered(FakeNetwork(), "s", RegisteredMemory())
    memory = Cache(Shape()).memory(fingerprint_of(Shape()))
    with pytest.raises(ConfigError, match="cannot be pinned"):
        _registered(transport, memory, CpuDevice())
    assert not transport.is_open

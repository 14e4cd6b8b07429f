"""A session that cannot be started whole leaves nothing of itself."""

from __future__ import annotations

import pytest

from integration.ranks import Cache, Shape, engine_facts, fingerprint_of
from pdcluster_connector import assembly
from pdcluster_connector.assembly import _start_transport
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.settings import Settings
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role


class Unregistered:
    """A transport that listens, and may pin no memory."""

    made: list[Unregistered]

    def __init__(self, *_: object) -> None:
        self.is_closed = False
        self.made.append(self)

    def register(self, address: int, num_bytes: int) -> None:
        raise ConfigError(f"{num_bytes} bytes at {address:#x} cannot be pinned")

    def close(self) -> None:
        self.is_closed = True


def test_a_session_whose_memory_cannot_be_registered_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    Unregistered.made = []
    monkeypatch.setattr(assembly, "MooncakeTransport", Unregistered)
    facts, memory = engine_facts(Role.PREFILL, Shape(), Settings()), Cache(Shape()).memory(fingerprint_of(Shape()))
    with pytest.raises(ConfigError, match="cannot be pinned"):
        _start_transport(facts, memory, CpuDevice())
    assert [one.is_closed for one in Unregistered.made] == [True]

"""Transports: how bytes get from one engine's memory into another's."""

from __future__ import annotations

from pdcluster_connector.transport.base import Transport, TransportSettings
from pdcluster_connector.transport.mooncake import MooncakeTransport
from pdcluster_protocol.errors import ConfigError


def make_transport(kind: str, settings: TransportSettings) -> Transport:
    """The transport ``kind``. Engine start.

    Raises:
        ConfigError: There is no such transport, or it cannot start here.
    """
    if kind != "mooncake":
        raise ConfigError(f"transport is {kind!r}: the only one that joins two engines is 'mooncake'")
    return MooncakeTransport(settings)

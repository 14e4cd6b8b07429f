"""PROXY headers, as load balancers write them."""

from __future__ import annotations

from ipaddress import ip_address

from pdcluster_router.core.clients.proxy_protocol import SIGNATURE


def line(client: str, port: int = 50000) -> bytes:
    """Version 1."""
    version = ip_address(client).version
    ours = "10.0.0.1" if version == 4 else "2001:db8::1"
    return f"PROXY TCP{version} {client} {ours} {port} 443\r\n".encode()


def header(client: str, port: int = 50000, tlvs: bytes = b"", command: int = 0x21) -> bytes:
    """Version 2."""
    address = ip_address(client)
    family, ours = (0x11, bytes(4)) if address.version == 4 else (0x21, bytes(16))
    return block(address.packed + ours + port.to_bytes(2) + b"\x01\xbb" + tlvs, family, command)


def block(rest: bytes, family: int = 0x11, command: int = 0x21) -> bytes:
    """Version 2 of any content."""
    return SIGNATURE + bytes([command, family]) + len(rest).to_bytes(2) + rest

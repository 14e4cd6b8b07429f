"""The bytes that a proxy sends before its client's first one: the PROXY protocol, versions 1 and 2, as HAProxy
specifies it.

    1   PROXY TCP4 203.0.113.7 10.0.0.1 50000 443\\r\\n        PROXY UNKNOWN ...\\r\\n
    2   12 bytes of signature, version and command, family, length, addresses, TLVs

Other files decide which peers are believed. All TLVs are skipped, checksums too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
MAX_V1_BYTES: Final = 107
"""The longest line that the specification knows, with its end."""
MAX_V2_BYTES: Final = 4096
"""As many as nginx takes. Addresses need 52; TLVs may bring a name, a certificate's owner, a cloud's own words."""

_WORD: Final = b"PROXY "
_HEAD_BYTES: Final = 16
_UNKNOWN: Final = re.compile(rb"PROXY UNKNOWN(?: [^\r\n]*)?\r\n")
_TCP: Final = re.compile(rb"PROXY TCP([46]) ([0-9A-Fa-f:.]{2,39}) ([0-9A-Fa-f:.]{2,39}) (\d{1,5}) (\d{1,5})\r\n")
_VERSIONS: Final = {b"4": IPv4Address, b"6": IPv6Address}
_LOCAL, _PROXY = 0x20, 0x21
_NUM_ADDRESS_BYTES: Final = {1: 4, 2: 16}
"""The bytes of each of the two addresses, by family."""
_STREAM: Final = 1


class BadPreface(Exception):
    """The bytes are no PROXY header. The message says why, and quotes none of them."""


class Origin(Enum):
    """The side for which the proxy has opened a connection."""

    CLIENT = "client"
    """A client. The header tells its address."""
    UNKNOWN = "unknown"
    """A client. The header tells no IP address of it."""
    PROXY = "proxy"
    """The proxy itself, as for a check of our health."""


@dataclass(frozen=True, slots=True)
class Preface:
    """A whole PROXY header. ``client``: address and port, only for ``Origin.CLIENT``."""

    num_bytes: int
    origin: Origin
    client: tuple[str, int] | None = None


def read_preface(data: bytes) -> Preface | None:
    """The preface that ``data`` begins with; None: it is not whole yet.

    Raises:
        BadPreface: ``data`` does not begin with a preface, or it is too long or not as specified.
    """
    if data.startswith(SIGNATURE[: len(data)]):
        return _read_v2(data)
    if data.startswith(_WORD[: len(data)]):
        return _read_v1(data)
    raise BadPreface("no PROXY header")


def _read_v1(data: bytes) -> Preface | None:
    end = data.find(b"\n", 0, MAX_V1_BYTES) + 1
    if not end:
        if len(data) >= MAX_V1_BYTES:
            raise BadPreface(f"a PROXY line of more than {MAX_V1_BYTES} bytes")
        return None
    line = data[:end]
    if _UNKNOWN.fullmatch(line):
        return Preface(end, Origin.UNKNOWN)
    found = _TCP.fullmatch(line)
    if found is None:
        raise BadPreface("a PROXY line that is not as specified")
    client, _ = _v1_end(found[1], found[2], found[4]), _v1_end(found[1], found[3], found[5])
    return Preface(end, Origin.CLIENT, client)


def _v1_end(version: bytes, address: bytes, port: bytes) -> tuple[str, int]:
    """Address and port of one end. Raises: BadPreface: The address or the port is not valid."""
    try:
        told = _VERSIONS[version](address.decode())
    except ValueError as error:
        raise BadPreface("a PROXY line whose address is none") from error
    if int(port) > 0xFFFF:
        raise BadPreface("a PROXY line whose port is none")
    return str(told), int(port)


def _read_v2(data: bytes) -> Preface | None:
    if len(data) < _HEAD_BYTES:
        return None
    command, family, transport = data[12], data[13] >> 4, data[13] & 0xF
    if command not in (_LOCAL, _PROXY):
        raise BadPreface("a PROXY header of another version or command")
    num_bytes = _HEAD_BYTES + int.from_bytes(data[14:16])
    if num_bytes > MAX_V2_BYTES:
        raise BadPreface(f"a PROXY header of more than {MAX_V2_BYTES} bytes")
    if len(data) < num_bytes:
        return None
    if command == _LOCAL:
        return Preface(num_bytes, Origin.PROXY)
    if transport != _STREAM or family not in _NUM_ADDRESS_BYTES:
        return Preface(num_bytes, Origin.UNKNOWN)
    return Preface(num_bytes, Origin.CLIENT, _v2_client(data[_HEAD_BYTES:num_bytes], _NUM_ADDRESS_BYTES[family]))


def _v2_client(told: bytes, width: int) -> tuple[str, int]:
    if len(told) < 2 * width + 4:
        raise BadPreface("a PROXY header too short for its addresses")
    return str(ip_address(told[:width])), int.from_bytes(told[2 * width : 2 * width + 2])

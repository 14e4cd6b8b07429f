"""The first bytes of clients with TLS, made by hand (RFC 8446, 4 and 5.1)."""

from __future__ import annotations

from typing import Final

_FIRST_GROUP: Final = b"\x00\x1d\x00\x17"
"""X25519 before P-256, as OpenSSL offers them."""
_ITS_SHARE: Final = b"\x00\x24\x00\x1d\x00\x20"
_UNKNOWN_GROUP: Final = b"\x0a\x0a"
CHANGE: Final = b"\x14\x03\x03\x00\x01\x01"
"""A record that says nothing any more; clients send one for the sake of middleboxes."""


def claim(num_bytes: int) -> bytes:
    """The header of a ClientHello that is to be so long."""
    return b"\x01" + num_bytes.to_bytes(3)


def records(message: bytes, record_bytes: int = 1 << 14) -> bytes:
    """``message`` in records of so many bytes each."""
    parts = [message[at : at + record_bytes] for at in range(0, len(message), record_bytes)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts)


def with_unknown_share(hello: bytes) -> bytes:
    """OpenSSL's ``hello``, with a key share of a group that no server knows: it asks for a second one."""
    assert (hello.count(_FIRST_GROUP), hello.count(_ITS_SHARE)) == (1, 1)
    changed = hello.replace(_FIRST_GROUP, _UNKNOWN_GROUP + _FIRST_GROUP[2:])
    return changed.replace(_ITS_SHARE, _ITS_SHARE[:2] + _UNKNOWN_GROUP + _ITS_SHARE[4:])

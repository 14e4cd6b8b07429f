"""PROXY headers, byte by byte: HAProxy's specification, sections 2.1 and 2.2."""

from __future__ import annotations

import pytest

from fakes.prefaces import block, header, line
from pdcluster_router.core.clients.proxy_protocol import (
    MAX_V1_BYTES,
    MAX_V2_BYTES,
    SIGNATURE,
    BadPreface,
    Origin,
    Preface,
    read_preface,
)

LONGEST = b"PROXY UNKNOWN " + b"f" * (MAX_V1_BYTES - 16) + b"\r\n"
TLVS = b"\x04\x00\x01x" + b"\xea\x00\x05\x01vpce"
V6 = "2001:db8::7"

WHOLE: dict[str, tuple[bytes, Origin, tuple[str, int] | None]] = {
    "IPv4": (line("203.0.113.7"), Origin.CLIENT, ("203.0.113.7", 50000)),
    "IPv6": (line(V6, 0), Origin.CLIENT, (V6, 0)),
    "IPv6 in large letters": (b"PROXY TCP6 2001:DB8::7 ::1 65535 1\r\n", Origin.CLIENT, (V6, 65535)),
    "unknown": (b"PROXY UNKNOWN\r\n", Origin.UNKNOWN, None),
    "unknown with addresses": (b"PROXY UNKNOWN 203.0.113.7 10.0.0.1 1 2\r\n", Origin.UNKNOWN, None),
    "the longest line": (LONGEST, Origin.UNKNOWN, None),
    "2: IPv4": (header("203.0.113.7", 1), Origin.CLIENT, ("203.0.113.7", 1)),
    "2: IPv6": (header(V6), Origin.CLIENT, (V6, 50000)),
    "2: TLVs": (header("203.0.113.7", tlvs=TLVS), Origin.CLIENT, ("203.0.113.7", 50000)),
    "2: TLVs that are none": (header("203.0.113.7", tlvs=b"\xff\xff"), Origin.CLIENT, ("203.0.113.7", 50000)),
    "2: as long as may be": (
        header("203.0.113.7", tlvs=bytes(MAX_V2_BYTES - 28)),
        Origin.CLIENT,
        ("203.0.113.7", 50000),
    ),
    "2: local": (block(b"", 0, 0x20), Origin.PROXY, None),
    "2: local with an address": (header("203.0.113.7", command=0x20), Origin.PROXY, None),
    "2: of no family": (block(b"", 0), Origin.UNKNOWN, None),
    "2: of no family, with TLVs": (block(TLVS, 0), Origin.UNKNOWN, None),
    "2: Unix sockets": (block(bytes(216), 0x31), Origin.UNKNOWN, None),
    "2: datagrams": (block(bytes(12), 0x12), Origin.UNKNOWN, None),
    "2: a family to come": (block(bytes(12), 0x41), Origin.UNKNOWN, None),
}


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("rest", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"\r\n"])
def test_a_header_is_told_with_its_length_whatever_follows(case: str, rest: bytes) -> None:
    data, origin, client = WHOLE[case]
    assert read_preface(data + rest) == Preface(len(data), origin, client)


@pytest.mark.parametrize("case", WHOLE)
def test_of_a_header_that_is_not_whole_more_is_wanted(case: str) -> None:
    data, _, _ = WHOLE[case]
    assert [read_preface(data[:num]) for num in range(len(data))] == [None] * len(data)


BAD: dict[str, tuple[bytes, str]] = {
    "HTTP": (b"POST /v1/completions HTTP/1.1\r\n", "no PROXY header"),
    "a method of HTTP/2": (b"PRI * HTTP/2.0\r\n", "no PROXY header"),
    "TLS": (b"\x16\x03\x01\x02\x00", "no PROXY header"),
    "a blank line": (b"\r\nGET", "no PROXY header"),
    "zeros": (bytes(20), "no PROXY header"),
    "small letters": (b"proxy TCP4 ", "no PROXY header"),
    "a line without end": (b"PROXY TCP4 " + b"1" * 200, "more than 107 bytes"),
    "one byte too long": (LONGEST[:-2] + b"f\r\n", "more than 107 bytes"),
    "no CR": (b"PROXY UNKNOWN\n", "not as specified"),
    "another protocol": (b"PROXY UDP4 1.2.3.4 1.2.3.4 1 2\r\n", "not as specified"),
    "nothing": (b"PROXY \r\n", "not as specified"),
    "no ports": (b"PROXY TCP4 1.2.3.4 1.2.3.4\r\n", "not as specified"),
    "two blanks": (b"PROXY TCP4  1.2.3.4 1.2.3.4 1 2\r\n", "not as specified"),
    "a word more": (b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2 3\r\n", "not as specified"),
    "a sign": (b"PROXY TCP4 1.2.3.4 1.2.3.4 -1 2\r\n", "not as specified"),
    "a zone": (b"PROXY TCP6 fe80::1%eth0 ::1 1 2\r\n", "not as specified"),
    "the other family": (b"PROXY TCP4 ::1 ::1 1 2\r\n", "address is none"),
    "the other family of the two": (b"PROXY TCP6 ::1 1.2.3.4 1 2\r\n", "address is none"),
    "no address": (b"PROXY TCP4 1.2.3.256 1.2.3.4 1 2\r\n", "address is none"),
    "octal": (b"PROXY TCP4 010.2.3.4 1.2.3.4 1 2\r\n", "address is none"),
    "no port": (b"PROXY TCP4 1.2.3.4 1.2.3.4 65536 2\r\n", "port is none"),
    "2: version 1": (block(bytes(12), command=0x11), "another version or command"),
    "2: a command to come": (block(bytes(12), command=0x22), "another version or command"),
    "2: too short for IPv4": (block(bytes(11)), "too short for its addresses"),
    "2: too short for IPv6": (block(bytes(35), 0x21), "too short for its addresses"),
    "2: too long": (SIGNATURE + b"\x21\x11\xff\xff", "more than 4096 bytes"),
    "2: one byte too long": (block(bytes(MAX_V2_BYTES - 15)), "more than 4096 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_none_is_refused_and_nothing_of_it_is_told(case: str) -> None:
    data, why = BAD[case]
    with pytest.raises(BadPreface, match=why):
        read_preface(data)

"""Who the client is, header by header. The peer is a trusted proxy, 10.0.0.1, unless a row says otherwise."""

from __future__ import annotations

import pytest

from pdcluster_protocol.launch import ForwardedHeader
from pdcluster_protocol.networks import parse_network
from pdcluster_router.core.apis.request_head import Headers
from pdcluster_router.core.clients.client_address import MAX_ELEMENT_BYTES, MAX_HOPS, ClientAddresses

PROXY = "10.0.0.1"
CLIENT = "203.0.113.7"
TRUSTED = [parse_network(text) for text in ("10.0.0.0/8", "2001:db8:a::/48")]
XFF, FORWARDED = b"x-forwarded-for", b"forwarded"


def told(headers: Headers, header: ForwardedHeader = ForwardedHeader.X_FORWARDED_FOR, peer: str | None = PROXY) -> str:
    end = None if peer is None else (peer, 7)
    return ClientAddresses(TRUSTED, header).of_connection(end)(headers)


def lines(name: bytes, *values: bytes | str) -> Headers:
    return [(name, value.encode("latin-1") if isinstance(value, str) else value) for value in values]


LISTED: dict[str, tuple[tuple[bytes | str, ...], str]] = {
    "no header": ((), PROXY),
    "one address": ((CLIENT,), CLIENT),
    "a client that made up another one": ((f"198.51.100.9, {CLIENT}",), CLIENT),
    "a client that says that it is a proxy": ((f"10.0.0.9, {CLIENT}",), CLIENT),
    "a proxy behind a proxy": ((f"{CLIENT}, 10.9.9.9",), CLIENT),
    "both": ((f"198.51.100.9, {CLIENT},10.9.9.9 ,\t10.8.8.8",), CLIENT),
    "a client that is a proxy": (("10.9.9.9, 10.8.8.8",), "10.9.9.9"),
    "lines are one list": (("198.51.100.9", CLIENT, "10.9.9.9"), CLIENT),
    "lines with lists": ((f"198.51.100.9, {CLIENT}", "10.9.9.9, 10.8.8.8"), CLIENT),
    "a port": ((f"{CLIENT}:51234",), CLIENT),
    "IPv6": (("2001:db8::7",), "2001:db8::7"),
    "IPv6, large letters, not short": (("2001:0DB8:0:0:0:0:0:7",), "2001:db8::7"),
    "IPv6 in brackets": (("[2001:db8::7]",), "2001:db8::7"),
    "IPv6 in brackets with a port": (("[2001:db8::7]:443",), "2001:db8::7"),
    "IPv6 with a zone": (("fe80::1%eth0",), "fe80::1"),
    "IPv6 with a zone in brackets with a port": (("[fe80::1%eth0]:443",), "fe80::1"),
    "IPv6 of a proxy": ((f"{CLIENT}, [2001:db8:a::1]:443",), CLIENT),
    "IPv4 within IPv6": ((f"::ffff:{CLIENT}",), CLIENT),
    "IPv4 within IPv6, in hexadecimal": (("::ffff:cb00:7107",), CLIENT),
    "a proxy's IPv4 within IPv6": ((f"{CLIENT}, ::ffff:10.9.9.9",), CLIENT),
    "a port with a zone behind brackets": (("[2001:db8::7]:_p",), "2001:db8::7"),
    # What is no address: the hop before it is told, never what stands left of it.
    "unknown": ((f"{CLIENT}, unknown",), PROXY),
    "unknown behind a proxy": ((f"{CLIENT}, unknown, 10.9.9.9",), "10.9.9.9"),
    "hidden": ((f"{CLIENT}, _hidden",), PROXY),
    "a name": ((f"{CLIENT}, proxy.example",), PROXY),
    "empty": (("",), PROXY),
    "an empty end": ((f"{CLIENT},",), PROXY),
    "an empty line behind": ((CLIENT, ""), PROXY),
    "commas": ((b"," * 5000,), PROXY),
    "a number": ((f"{CLIENT}, 3405803783",), PROXY),
    "octal": ((f"{CLIENT}, 010.0.0.1",), PROXY),
    "too large a number": ((f"{CLIENT}, 10.0.0.256",), PROXY),
    "three numbers": ((f"{CLIENT}, 10.0.1",), PROXY),
    "digits of another alphabet": ((f"{CLIENT}, ".encode() + "\uff11.2.3.4".encode(),), PROXY),
    "bytes": ((f"{CLIENT}, ".encode() + bytes(range(1, 10)) + b"\xff",), PROXY),
    "half a bracket": ((f"{CLIENT}, [2001:db8::7",), PROXY),
    "a bracket behind": ((f"{CLIENT}, 2001:db8::7]",), PROXY),
    "IPv4 in brackets": ((f"{CLIENT}, [10.9.9.9]",), PROXY),
    "IPv4 with a zone": ((f"{CLIENT}, 10.9.9.9%eth0",), PROXY),
    "a zone with a blank": ((f"{CLIENT}, fe80::1%a b",), PROXY),
    "two colons too many": ((f"{CLIENT}, 1::2::3",), PROXY),
    "a port that is none": ((f"{CLIENT}, 10.9.9.9:http",), PROXY),
    "two ports": ((f"{CLIENT}, 10.9.9.9:1:2",), PROXY),
    "quotes": ((f'{CLIENT}, "10.9.9.9"',), PROXY),
    "two words": ((f"{CLIENT}, 10.9.9.9 10.8.8.8",), PROXY),
    "a huge one": ((f"{CLIENT}, ".encode() + b"1" * 60_000,), PROXY),
    "a huge one before": ((b"1" * 60_000 + f", {CLIENT}".encode(),), CLIENT),
    "a proxy behind a huge blank": ((f"{CLIENT}," + " " * MAX_ELEMENT_BYTES + "10.9.9.9",), PROXY),
    "blanks without end": ((f"{CLIENT}, ".encode() + b" " * 60_000,), PROXY),
    "many lines": ((*["198.51.100.9"] * 255, CLIENT), CLIENT),
    "as many proxies as are looked at": ((CLIENT, *["10.9.9.9"] * (MAX_HOPS - 1)), CLIENT),
    "more than that": ((CLIENT, *["10.9.9.9"] * MAX_HOPS), "10.9.9.9"),
}


@pytest.mark.parametrize("case", LISTED)
def test_x_forwarded_for_is_read_from_its_right_end(case: str) -> None:
    values, client = LISTED[case]
    assert told(lines(XFF, *values)) == client


PAIRS: dict[str, tuple[tuple[bytes | str, ...], str]] = {
    "one address": ((f"for={CLIENT}",), CLIENT),
    "quoted, with a port": ((f'for="{CLIENT}:47011"',), CLIENT),
    "IPv6": (('for="[2001:db8::7]"',), "2001:db8::7"),
    "IPv6 with a port": (('For="[2001:DB8::7]:4711"',), "2001:db8::7"),
    "a hidden port": (('for="[2001:db8::7]:_p"',), "2001:db8::7"),
    "IPv6 without quotes, as some write": (("for=[2001:db8::7]:47",), "2001:db8::7"),
    "other pairs": ((f'proto=https;host="a;b,c";FOR={CLIENT};by=10.0.0.1',), CLIENT),
    "blanks and empty pairs": ((f" ; for={CLIENT} ; ;proto=http;",), CLIENT),
    "a host with a quote that is escaped": ((f'for={CLIENT};host="a\\", for=198.51.100.9"',), CLIENT),
    "a host that ends with a backslash": ((f'for={CLIENT};host="a\\\\"',), CLIENT),
    "a client that made up another one": ((f"for=198.51.100.9, for={CLIENT}",), CLIENT),
    "a proxy behind a proxy": ((f"for=198.51.100.9, for={CLIENT}, for=10.9.9.9;proto=http",), CLIENT),
    "lines are one list": (("for=198.51.100.9", f"for={CLIENT}", "for=10.9.9.9"), CLIENT),
    "a quote that its client never closed": ((f'for="198.51.100.9, for={CLIENT}',), CLIENT),
    "the same, before IPv6": (('for="198.51.100.9, for="[2001:db8::7]"',), "2001:db8::7"),
    "a backslash at its client's end": ((f"for=\\, for={CLIENT}",), CLIENT),
    "a quote in a line before": (('for="', f"for={CLIENT}"), CLIENT),
    # What is no address.
    "unknown": ((f"for={CLIENT}, for=unknown",), PROXY),
    "hidden": ((f'for={CLIENT}, for="_gazonk"',), PROXY),
    "hidden behind a proxy": ((f"for={CLIENT}, for=_a, for=10.9.9.9",), "10.9.9.9"),
    "no for": ((f"for={CLIENT}, proto=https",), PROXY),
    "for twice": ((f"for={CLIENT}, for=10.9.9.9;for=10.8.8.8",), PROXY),
    "empty": ((f"for={CLIENT}", ""), PROXY),
    "an empty end": ((f"for={CLIENT},",), PROXY),
    "no pair": ((f"for={CLIENT}, {CLIENT}",), PROXY),
    "a quote too many": ((f'for={CLIENT}, for=10.9.9.9"',), PROXY),
    "an escaped end": ((f'for={CLIENT}, for="10.9.9.9\\"',), PROXY),
    "escapes in an address": ((f'for={CLIENT}, for="10\\.9.9.9"',), PROXY),
    "only quotes": ((b'"' * 60_001,), PROXY),
    "only backslashes": ((b"\\" * 60_000,), PROXY),
    "a huge host": ((f"for={CLIENT}, for=10.9.9.9;host=" + "a" * MAX_ELEMENT_BYTES,), PROXY),
    "a long host": ((f"for={CLIENT}, for=10.9.9.9;host=" + "a" * 253,), CLIENT),
    "a huge one before": ((b'"' * 60_001 + f", for={CLIENT}".encode(),), CLIENT),
    "bytes": ((f"for={CLIENT}, for=".encode() + bytes(range(128, 256)),), PROXY),
}


@pytest.mark.parametrize("case", PAIRS)
def test_forwarded_is_read_from_its_right_end(case: str) -> None:
    values, client = PAIRS[case]
    assert told(lines(FORWARDED, *values), ForwardedHeader.FORWARDED) == client


@pytest.mark.parametrize("header", ForwardedHeader)
def test_only_the_header_that_the_proxies_write_is_read(header: ForwardedHeader) -> None:
    theirs = lines(XFF, CLIENT) if header is ForwardedHeader.X_FORWARDED_FOR else lines(FORWARDED, f"for={CLIENT}")
    made_up = [*lines(XFF, "198.51.100.9"), *lines(FORWARDED, "for=198.51.100.9"), (b"x-real-ip", b"198.51.100.9")]
    others = [line for line in made_up if line[0] != theirs[0][0]]
    assert told([*others, *theirs, *others], header) == CLIENT


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (CLIENT, CLIENT),
        ("::ffff:203.0.113.7", CLIENT),
        ("2001:db8::7", "2001:db8::7"),
        ("fe80::7%eth0", "fe80::7"),
        ("2001:db8:b::1", "2001:db8:b::1"),
        (None, ""),
        ("/run/a.sock", ""),
    ],
)
def test_a_peer_that_is_no_trusted_proxy_is_not_believed(peer: str | None, client: str) -> None:
    assert told(lines(XFF, "198.51.100.9"), peer=peer) == client


@pytest.mark.parametrize("peer", [PROXY, "::ffff:10.0.0.1", "2001:db8:a::9"])
def test_a_trusted_proxy_is_known_by_each_of_its_addresses(peer: str) -> None:
    assert told(lines(XFF, CLIENT), peer=peer) == CLIENT


def test_where_none_is_trusted_headers_are_not_looked_at() -> None:
    nobody = ClientAddresses([], ForwardedHeader.X_FORWARDED_FOR).of_connection((PROXY, 7))
    assert nobody(None) == PROXY  # type: ignore[arg-type]  # to look at it would raise

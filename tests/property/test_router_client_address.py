"""No client moves its address: whatever it sends, through whatever chain of trusted proxies."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_protocol.launch import ForwardedHeader
from pdcluster_protocol.networks import parse_network
from pdcluster_router.core.apis.request_head import Headers, read_head
from pdcluster_router.core.clients.client_address import MAX_HOPS, ClientAddresses

NETWORKS = [parse_network(text) for text in ("10.0.0.0/8", "2001:db8:a::/48")]
XFF, FORWARDED = b"x-forwarded-for", b"forwarded"

Address = IPv4Address | IPv6Address
Proxy = Callable[[Headers, Address], Headers]
"""What it sends of what it got from this peer."""

proxies4 = st.integers(0, 2**24 - 1).map(lambda low: IPv4Address((10 << 24) + low))
proxies6 = st.integers(0, 2**80 - 1).map(lambda low: IPv6Address((0x20010DB8000A << 80) + low))
proxy_addresses = st.one_of(proxies4, proxies6)


def is_trusted(address: Address) -> bool:
    return any(address in network for network in NETWORKS)


def as_told(address: Address) -> Address:
    return getattr(address, "ipv4_mapped", None) or address


clients = st.ip_addresses().map(as_told).filter(lambda address: not is_trusted(address))

parts = st.one_of(
    st.sampled_from(
        [b'"', b"\\", b",", b";", b"=", b" ", b"for=", b'for="', b"for=10.0.0.1", b"unknown", b"_a", b"[", b"]"]
    ),
    st.sampled_from([b"10.0.0.1", b"1.2.3.4", b"[2001:db8:a::1]:7", b"::ffff:10.0.0.1", b", 10.0.0.1", b"%eth0"]),
    st.binary(max_size=4).map(lambda raw: raw.translate(None, b"\r\n\0")),
)
values = st.lists(parts, max_size=12).map(b"".join)
names = st.sampled_from([XFF, FORWARDED, b"x-real-ip", b"connection", b"via"])
sent = st.lists(st.tuples(names, st.one_of(values, st.just(b"x-forwarded-for, forwarded, close"))), max_size=6)


def written(header: ForwardedHeader, peer: Address, style: int) -> bytes:
    """A proxy's word for its peer, in one of the ways that there are."""
    text = str(peer)
    if isinstance(peer, IPv6Address):
        bare = [text, f"[{text}]", f"[{text}]:443", text.upper(), peer.exploded][style % 5]
    else:
        bare = [text, f"{text}:443", f"::ffff:{text}", f"[::ffff:{text}]:1"][style % 4]
    if header is ForwardedHeader.X_FORWARDED_FOR:
        return bare.encode()
    quoted = f'"{bare}"' if bare[0] == "[" or (isinstance(peer, IPv4Address) and style % 4 < 2) else f'"[{bare}]"'
    word = quoted if style % 3 or ":" in bare else bare
    return [f"for={word}", f"proto=https;For={word}", f'for={word};host="a,b;c\\"d";by=_x'][style % 3].encode()


def appended(header: ForwardedHeader, style: int, is_line: bool) -> Proxy:
    """A proxy that adds to what it got: a line, or to all of them in one. The other header goes through."""
    name = header.value.encode()

    def send(headers: Headers, peer: Address) -> Headers:
        word = written(header, peer, style)
        if is_line:
            return [*headers, (name, word)]
        before = [value for one, value in headers if one == name]
        return [*(line for line in headers if line[0] != name), (name, b", ".join([*before, word]))]

    return send


@settings(max_examples=drawn(6000), deadline=None)
@given(
    st.sampled_from(ForwardedHeader),
    clients,
    sent,
    st.lists(st.tuples(proxy_addresses, st.integers(0, 59), st.booleans()), min_size=0, max_size=5),
)
def test_no_client_moves_its_address(
    header: ForwardedHeader, client: Address, headers: Headers, chain: list[tuple[Address, int, bool]]
) -> None:
    peer = client
    for address, style, is_line in chain:
        headers = appended(header, style, is_line)(headers, peer)
        peer = address
    head = read_head("1.1", [(b"host", b"a"), *headers])
    addresses = ClientAddresses(NETWORKS, header)
    assert addresses.of_connection((str(peer), 7))(head.headers) == str(client)


@settings(max_examples=drawn(3000), deadline=None)
@given(st.sampled_from(ForwardedHeader), proxy_addresses, sent)
def test_whatever_comes_something_is_told_that_is_an_address(
    header: ForwardedHeader, peer: Address, headers: Headers
) -> None:
    told = ClientAddresses(NETWORKS, header).of_connection((str(peer), 7))(headers)
    assert str(as_told(ip_address(told))) == told


@settings(max_examples=drawn(1000), deadline=None)
@given(st.sampled_from(ForwardedHeader), st.lists(proxy_addresses, min_size=1, max_size=MAX_HOPS), st.integers(0, 59))
def test_of_proxies_alone_the_farthest_is_told(header: ForwardedHeader, hops: list[Address], style: int) -> None:
    lines: Headers = [(header.value.encode(), written(header, hop, style)) for hop in hops]
    assert ClientAddresses(NETWORKS, header).of_connection(("10.0.0.1", 7))(lines) == str(hops[0])

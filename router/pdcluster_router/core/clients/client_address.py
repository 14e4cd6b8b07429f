"""The address of a client when proxies stand before the router: docs/decisions/0034-client-addresses.md.

    peer is no trusted proxy   its own address; headers are the client's words, and are not looked at
    peer is a trusted proxy    the header from its right end: the first address that is no trusted proxy's

The walk goes from right to left, because each trusted proxy appends the address of its own peer to what that peer had
sent. So the walk ends before the part that the client wrote itself. It also ends at an entry that is no address: then
the client's address is the entry to the right, or the peer's address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import islice
from typing import Final, TypeAlias

from pdcluster_protocol.launch import ForwardedHeader
from pdcluster_protocol.networks import Network
from pdcluster_router.core.apis.request_head import Headers

Address: TypeAlias = IPv4Address | IPv6Address

MAX_HOPS: Final = 32
"""The most entries of one request that are looked at: more trusted proxies in a row than any site has."""
MAX_ELEMENT_BYTES: Final = 512
"""The most bytes of one entry. In ``Forwarded`` a host's name of up to 253 bytes may stand beside the address."""

_NODE: Final = re.compile(
    rb"(?:([0-9.]{7,15})|\[([0-9A-Fa-f:.]{2,45})(?:%[\w.~-]{1,16})?\])(?::(?:[0-9]{1,5}|_[\w.-]{1,32}))?"
    rb"|([0-9A-Fa-f:.]{2,45})(?:%[\w.~-]{1,16})?"
)
"""IPv4, or IPv6 in brackets, each with or without a port; or bare IPv6. A zone of IPv6 is left out of the address: it
means nothing on another machine."""
_PAIR: Final = re.compile(
    rb"[ \t]*(?:([!#$%&'*+.^`|~\w-]+)=(\"(?:[^\"\\]|\\.)*\"|[^\"\\\s;,]+)[ \t]*)?(?:;|\Z)", re.DOTALL
)
"""One pair of ``Forwarded`` (RFC 7239, 4). An address without the quotes that the RFC demands matches too."""
_QUOTE, _COMMA = b'",'


@dataclass(frozen=True, slots=True)
class FarEnd:
    """The other end of a connection. ``address``: empty, where it is not known."""

    address: str
    is_trusted: bool


class ClientAddresses:
    """Finds clients' addresses. Holds the trusted proxies and the header that they write; never changes."""

    def __init__(self, trusted: Iterable[Network], header: ForwardedHeader) -> None:
        """``header``: the one that all of ``trusted`` write. Any other header may be the client's own."""
        self._trusted = tuple(trusted)
        self._name = header.value.encode()
        self._elements = _forwarded_for if header is ForwardedHeader.FORWARDED else _listed

    def trusts(self, host: str) -> bool:
        """Whether the other end of a connection is a trusted proxy."""
        return self.far_end(host).is_trusted

    def of_connection(self, end: tuple[str, int] | None) -> Callable[[Headers], str]:
        """``client_of`` for all requests of one connection. ``end``: host and port of its other end."""
        return partial(self.client_of, self.far_end(None if end is None else end[0]))

    def far_end(self, host: str | None) -> FarEnd:
        """The other end of a connection. ``host``: as the kernel, or a PROXY header, tells it; None: not known."""
        address = None if host is None else parse_node(host.encode())
        is_trusted = address is not None and self._trusts(address)
        return FarEnd("" if address is None else str(address), is_trusted=is_trusted)

    def client_of(self, peer: FarEnd, headers: Headers) -> str:
        """The address of the client whose request came from ``peer``; empty, where it is not known.

        ``headers``: all of a whole head, names in lower case.
        """
        if not peer.is_trusted:
            return peer.address
        nearest = peer.address
        for node in islice(self._nodes(headers), MAX_HOPS):
            if (address := parse_node(node)) is None:
                break
            nearest = str(address)
            if not self._trusts(address):
                break
        return nearest

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)

    def _nodes(self, headers: Headers) -> Iterator[bytes]:
        """Entries from the newest to the oldest. All lines of the header are one list, in order (RFC 9110, 5.3)."""
        for name, value in reversed(headers):
            if name == self._name:
                yield from self._elements(value)


def parse_node(node: bytes) -> Address | None:
    """The address in one entry; None: there is none, as in ``unknown`` or ``_hidden``. IPv4 within IPv6 is IPv4."""
    found = _NODE.fullmatch(node)
    if found is None:
        return None
    try:
        address = ip_address((found[1] or found[2] or found[3]).decode())
    except ValueError:
        return None
    if found[1] is None and isinstance(address, IPv4Address):
        return None  # IPv4 in brackets, or with a zone, is no address.
    return getattr(address, "ipv4_mapped", None) or address


def _listed(line: bytes) -> Iterator[bytes]:
    """The elements of ``X-Forwarded-For``, the last one first. An element that is too long counts as empty, and ends
    the list.

    An empty element is no address, so it ends the walk.
    """
    end = len(line)
    while end >= 0:
        comma = line.rfind(b",", max(0, end - MAX_ELEMENT_BYTES), end)
        if comma < 0 and end > MAX_ELEMENT_BYTES:
            yield b""
            return
        yield line[comma + 1 : end].strip(b" \t")
        end = comma


def _forwarded_for(line: bytes) -> Iterator[bytes]:
    """The ``for`` of each element of ``Forwarded``, the last element first; empty where there is none to use."""
    end = len(line)
    while end >= 0:
        begin = _element_begin(line, end)
        yield b"" if begin is None else _for_in(line[begin:end])
        end = -1 if begin is None else begin - 1


def _element_begin(line: bytes, end: int) -> int | None:
    """The index at which the element that ends at ``end`` begins; None: it is too long, or a quote stays open.

    Searches from the right. A client may have sent a quote that it never closed; a search from the left would take all
    that proxies wrote behind that quote for quoted.
    """
    is_quoted = False
    for at in range(end - 1, max(0, end - MAX_ELEMENT_BYTES) - 1, -1):
        if line[at] == _QUOTE:
            is_quoted ^= not _is_escaped(line, at)
        elif line[at] == _COMMA and not is_quoted:
            return at + 1
    return 0 if end <= MAX_ELEMENT_BYTES and not is_quoted else None


def _is_escaped(line: bytes, at: int) -> bool:
    before = line[max(0, at - MAX_ELEMENT_BYTES) : at]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _for_in(element: bytes) -> bytes:
    """The value of ``for``. Empty: the element has none, has two, or is no element."""
    found, at = b"", 0
    while at < len(element):
        pair = _PAIR.match(element, at)
        if pair is None:
            return b""
        if pair[1] is not None and pair[1].lower() == b"for":
            if found:
                return b""
            found = pair[2].strip(b'"')
        at = pair.end()
    return found

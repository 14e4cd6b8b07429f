"""IP networks as people write them: ``10.0.0.0/8``, ``2001:db8::/32``, or one address."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final, TypeAlias

Network: TypeAlias = IPv4Network | IPv6Network

_MAPPED_BITS: Final = 96
"""Prefix length of ``::ffff:0:0/96``, in which IPv6 writes IPv4."""


def parse_network(text: str) -> Network:
    """The network that ``text`` names.

    Raises:
        ValueError: ``text`` names no network, has bits behind its prefix, or names every address.
    """
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no network: write one like 10.0.0.0/8 or 2001:db8::/32, or an address"
        ) from error
    if "/" in text and str(network.network_address) != str(ip_network(text.partition("/")[0]).network_address):
        raise ValueError(f"{text!r} has bits behind its prefix: write {network}")
    network = _as_ipv4(network)
    if network.prefixlen == 0:
        raise ValueError(f"{text!r} is every address, so each client could name any as its own: name the proxies' only")
    return network


def _as_ipv4(network: Network) -> Network:
    if isinstance(network, IPv4Network) or network.prefixlen < _MAPPED_BITS:
        return network
    mapped = network.network_address.ipv4_mapped
    return network if mapped is None else IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))

"""Proxies before routers that the API server refuses, and the message it must show."""

from __future__ import annotations

from typing import Final

from operator_cases.objects import By, Refused

_PROXIES: Final = (
    ": each must be an address, or a network like 10.0.0.0/8 or 2001:db8::/32, not of every address, and without bits "
    "behind its prefix"
)
REFUSED_PROXIES: Final = (
    *(
        Refused(
            f"a network {what}",
            {"spec.router.proxies": {"trusted": ["10.0.0.0/8", network]}},
            f"router.proxies.trusted is 10.0.0.0/8, {network}{_PROXIES}",
        )
        for what, network in (
            ("of every address", "0.0.0.0/0"),
            ("of every address of IPv6", "::/0"),
            ("with bits behind its prefix", "10.0.0.1/8"),
            ("with too long a prefix", "10.0.0.0/33"),
            ("that is a number", "1234"),
            ("that is a name", "proxy"),
            ("that is several", "10.1.0.0/16,10.2.0.0/16"),
        )
    ),
    Refused(
        "a PROXY header of nobody",
        {"spec.router.proxies": {"proxyProtocol": "required"}},
        "spec.router.proxies.trusted: Required value",
        By.SCHEMA,
    ),
    Refused(
        "no proxies",
        {"spec.router.proxies": {"trusted": []}},
        "spec.router.proxies.trusted in body should have at least 1 items",
        By.SCHEMA,
    ),
)

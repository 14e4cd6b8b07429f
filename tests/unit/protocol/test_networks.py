"""Networks as people write them, and what is refused with its cure."""

from __future__ import annotations

import pytest

from pdcluster_protocol.networks import parse_network


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("192.0.2.7", "192.0.2.7/32"),
        ("10.0.0.0/255.0.0.0", "10.0.0.0/8"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("2001:DB8::1", "2001:db8::1/128"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:192.0.2.7", "192.0.2.7/32"),
    ],
)
def test_a_network_is_told_in_one_way(text: str, network: str) -> None:
    assert str(parse_network(text)) == network


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.1/8", "has bits behind its prefix: write 10.0.0.0/8"),
        ("0.0.0.0/0", "is every address"),
        ("::/0", "is every address"),
        ("::ffff:0:0/96", "is every address"),
        ("", "is no network"),
        ("10.0.0.0/33", "is no network"),
        ("10.0.0.0/8/8", "is no network"),
        ("proxy.example", "is no network"),
        (" 10.0.0.0/8", "is no network"),
        ("010.0.0.0/8", "is no network"),
    ],
)
def test_what_is_none_is_refused_with_what_to_write(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse_network(text)
    assert repr(text) in str(refused.value)
